"""Builds a CausalLM from a directory, a transformers model, a ModelSpec or another CausalLM.

The public functions are `build_model` and `save_hf_directory`. `rollout.worker.loading` calls
`open_model`. `rollout.tensor_parallel.start` calls `spec_of` and `without_shards`, and
`rollout.apis.fleet_processes` calls `without_shards`. Only `save_hf_directory` writes files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from rollout.errors import ModelError
from rollout.layers.shard import Shard
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoints.dequantized import Dequantized
from rollout.models.checkpoints.directory import fault_of_directory
from rollout.models.checkpoints.reader import Checkpoint, read_config, write_directory
from rollout.models.plain_tensors import is_sharded, named_weights
from rollout.models.quantization import quant_method_of
from rollout.models.spec import ModelSpec, parse_dtype, union_of_ids
from rollout.models.weights import TensorsByName, copy_weights

Fill: TypeAlias = Callable[[], None]


def build_model(
    source: str | Path | nn.Module | ModelSpec,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> CausalLM:
    """Return a model ready for `CausalLM.prepare`. `source` is not changed.

    A Hugging Face directory is loaded. A transformers model is copied. A ModelSpec gets random
    weights from `seed`. A CausalLM that already has the dtype and device is returned itself, any
    other CausalLM is copied. `dtype` "auto" means the dtype of the spec, of the directory's config,
    or of the module's first parameter. If the config has no dtype, the directory's embeddings set
    it. Sharded parameters are gathered in the order of their names, a collective of all ranks.
    Raises ModelError for any other source, and for weights that do not fit their config.
    """
    model, fill = open_model(source, dtype=dtype, device=device, seed=seed)
    if fill is not None:
        fill()
    return model


def open_model(
    source: str | Path | nn.Module | ModelSpec,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    seed: int = 0,
    rank: int = 0,
    size: int = 1,
) -> tuple[CausalLM, Fill | None]:
    """Return a model with undefined weights, and a function that fills them in.

    If the result is `source` itself, its weights are defined and the function is None. `source`,
    `dtype`, `device` and `seed` are as in `build_model`. The model is the part that rank `rank` of
    `size` tensor-parallel ranks keeps. The caller can move the parameters before calling the
    function. This call and the function can raise ModelError.
    """
    device = torch.empty(0, device=device).device  # with its index, so that devices compare equal
    # Unfilled weights on a CPU take no memory: pages that were never written are not resident.
    if isinstance(source, ModelSpec):
        model = CausalLM(_with_dtype(source, dtype).local(rank, size), device)
        return model, partial(model.randomize, seed)
    if isinstance(source, CausalLM) and _is_as_wanted(source, dtype, device, Shard(rank, size)):
        return source, None
    spec, tensors, origin = _contents_of(source, dtype)
    model = CausalLM(spec.local(rank, size), device)
    return model, lambda: copy_weights(model.weight_table(), tensors, origin)


def spec_of(
    source: str | Path | nn.Module | ModelSpec, dtype: torch.dtype | str = "auto"
) -> ModelSpec:
    """Return the spec of the model that `build_model` would return. Raises ModelError for a source
    that has no spec."""
    if isinstance(source, ModelSpec):
        return _with_dtype(source, dtype)
    return _contents_of(source, dtype)[0]


def _contents_of(source: Any, dtype: torch.dtype | str) -> tuple[ModelSpec, TensorsByName, str]:
    """Return the spec, all weights, and the source's name for error messages."""
    if isinstance(source, str | Path):
        return _of_directory(Path(source), dtype)
    if isinstance(source, CausalLM):
        spec = _with_dtype(_own_spec(source), dtype)
        return spec, source.read_weights(), "the given CausalLM"
    if _is_transformers_model(source):
        return _of_transformers(source, dtype)
    raise ModelError(
        f"cannot build a model from {type(source).__name__}; give a Hugging Face directory, "
        "a transformers model, a rollout.models.CausalLM or a ModelSpec"
    )


def without_shards(source: Any, dtype: torch.dtype | str) -> Any:
    """Return `source`, or a CausalLM with its gathered weights if `source` is a sharded module.
    Call this before `source` is sent to another process, which cannot gather its parameters.
    Gathering is a collective of all ranks. Raises ModelError as `build_model` does."""
    if isinstance(source, nn.Module) and any(map(is_sharded, source.parameters())):
        return build_model(source, dtype=dtype)
    return source


def save_hf_directory(model: CausalLM, path: str | Path) -> None:
    """Write config.json and model.safetensors to `path`, for transformers and `build_model`. Tied
    weights are written once. Raises ModelError if no Hugging Face config can express the spec, and
    on a rank of a group, which does not have all weights."""
    weights = {name: values.contiguous() for name, values in model.read_weights().items()}
    if model.spec.tie_word_embeddings:
        del weights["lm_head.weight"]
    write_directory(Path(path), model.spec.to_hf_config(), weights)


def _of_directory(
    directory: Path, dtype: torch.dtype | str
) -> tuple[ModelSpec, TensorsByName, str]:
    if fault := fault_of_directory(directory):
        raise ModelError(fault)
    config = read_config(directory)
    if dtype != "auto":
        config["dtype"] = dtype
    spec, method = ModelSpec.from_hf_config(config), quant_method_of(config)
    checkpoint = Checkpoint.open(directory)
    tensors = Dequantized(checkpoint, method, spec.dtype) if method else checkpoint
    return spec, tensors, str(directory)


def _own_spec(model: CausalLM) -> ModelSpec:
    # Parameters can have been cast since the model was built.
    return replace(model.spec, dtype=model.model.embed_tokens.weight.dtype)


def _is_as_wanted(
    model: CausalLM, dtype: torch.dtype | str, device: torch.device, shard: Shard
) -> bool:
    weight = model.model.embed_tokens.weight
    has_dtype = dtype == "auto" or parse_dtype(dtype) == weight.dtype
    return has_dtype and device == weight.device and shard == model.spec.shard


def _of_transformers(model: Any, dtype: torch.dtype | str) -> tuple[ModelSpec, TensorsByName, str]:
    weights = dict(sorted(named_weights(model).items()))
    config = dict(model.config.to_dict())
    first_dtype = next((parameter.dtype for parameter in model.parameters()), None)
    config["dtype"] = first_dtype if dtype == "auto" else dtype
    generation_config = getattr(model, "generation_config", None)
    config["eos_token_id"] = union_of_ids(
        config.get("eos_token_id"), getattr(generation_config, "eos_token_id", None)
    )
    return ModelSpec.from_hf_config(config), weights, f"the given {type(model).__name__}"


def _is_transformers_model(source: object) -> bool:
    """Return whether `source` has the attributes of a transformers model."""
    # transformers is optional and slow to import, so it is not imported.
    config = getattr(source, "config", None)
    has_config = hasattr(config, "to_dict") and hasattr(config, "model_type")
    return has_config and hasattr(source, "named_parameters")


def _with_dtype(spec: ModelSpec, dtype: torch.dtype | str) -> ModelSpec:
    return spec if dtype == "auto" else replace(spec, dtype=parse_dtype(dtype))
