"""Reads the weights of any trainer as a stream of Hugging Face names and whole tensors.

Used by `trainer_hooks.weight_sync.weight_sync` for pushes, by `trainer_hooks.weight_sync.fsdp2` for
checkpoints, and by users' exports. Reading changes no weight.

If each rank of a trainer holds a part of the weights, all ranks read the stream together. Each
tensor is gathered by a collective, in the same order on all ranks. A rank needs memory for one
whole tensor beside the model, or for one unit with FSDP1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rollout.models.plain_tensors import is_sharded, named_weights, plain_name
from rollout.weights.lora import LoraAdapter
from rollout.weights.lora_merge import Merger, gathered
from rollout.weights.update import NamedTensors, WeightStream, by_name, lasting, streamed
from trainer_hooks.weight_sync.fsdp1 import has_units, unit_tensors
from trainer_hooks.weight_sync.zero3 import gathered_partitions, is_partitioned

_LORA = ".lora_"  # part of the names of all tensors that PEFT adds to a model
_PEFT_ROOT = "base_model.model."
_PEFT_LAYER = ".base_layer."


def full_tensors(source: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of `source` under its Hugging Face name, as a whole plain tensor.

    `source`: a module, a mapping, an adapter (see `weights_of`), or an iterator of names and
    tensors, such as a Megatron bridge's export. A module may be plain or wrapped by DDP, FSDP2,
    FSDP1, DeepSpeed (also ZeRO-3) or torch.compile. A module gives its persistent buffers too, and
    each tied weight once.

    If each rank holds a part, reading is a collective: all ranks read to the end, from sources of
    one kind. A rank without an engine calls `join_push(policy)` while another rank pushes. Gathered
    tensors are copied, unlike in a push. Raises WeightUpdateError, naming the tensor, if a tensor
    cannot be read.
    """
    return map(_kept_pair, streamed(weights_of(source)))


def join_push(source: NamedTensors) -> None:
    """Take part in the gathering of a push by another rank, and keep nothing.

    The other rank's source must be of the same kind. Raises WeightUpdateError, naming the tensor,
    if a tensor cannot be read.
    """
    deque(streamed(weights_of(source)), maxlen=0)


def merged_tensors(
    model: nn.Module, adapter_name: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of a PEFT model with its adapter merged: base + scale * (B @ A), cast once.

    Use this for engines that do not serve the model's base and so cannot apply the adapter alone.
    The sum is computed in float32. The model is not changed. Collectives are as for `full_tensors`.
    `adapter_name`: None means the active adapter.
    Raises WeightUpdateError, naming a part of the adapter that B @ A cannot express.
    """
    adapter = _gathered_adapter(model, adapter_name)
    pairs = replace(adapter, tensors=gathered(adapter.tensors)).pairs()
    merger = Merger(pairs.values())

    def merge(given: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name = given[0].removeprefix(_PEFT_ROOT).replace(_PEFT_LAYER, ".")
        pair = pairs.get(name.removesuffix(".weight"))
        if pair is None:
            return name, _kept_pair(given)[1]
        return name, merger.merged(given[1].detach().cpu(), pair, None)

    return map(merge, streamed(_weights_in(model, lambda name: _LORA not in name)))


def weights_of(source: NamedTensors) -> NamedTensors:
    """Return the tensors that a push of `source` gives to an LLM, detached, under plain names.

    Tensors that this process holds whole share the trainer's memory. Sharded tensors, and tensors
    of an iterator, become a WeightStream. A PEFT model gives its active adapter, gathered.
    """
    if isinstance(source, nn.Module):
        if _peft_model(source) is not None:
            return _gathered_adapter(source, None)
        return _weights_in(source)
    if isinstance(source, LoraAdapter):
        if any(map(is_sharded, source.tensors.values())):
            return replace(source, tensors=by_name(streamed(source)))
        return replace(source, tensors=dict(map(_detached_pair, source.tensors.items())))
    if isinstance(source, WeightStream):
        return source
    if isinstance(source, Mapping):
        source = source.items()
    pairs = ((plain_name(name), tensor) for name, tensor in source)
    return streamed(pairs) if isinstance(source, Iterator) else _live_or_gathered(list(pairs))


def _weights_in(
    module: nn.Module, is_wanted: Callable[[str], bool] = lambda name: True
) -> NamedTensors:
    if has_units(module):
        pairs = ((name, tensor) for name, tensor in unit_tensors(module) if is_wanted(name))
        return streamed(pairs)
    weights = {n: tensor for n, tensor in named_weights(module).items() if is_wanted(n)}
    if any(map(is_partitioned, weights.values())):
        return streamed(gathered_partitions(weights))
    return _live_or_gathered(weights.items())


def _live_or_gathered(weights: Iterable[tuple[str, Any]]) -> NamedTensors:
    pairs = [*weights]
    if any(is_sharded(tensor) for _, tensor in pairs):
        return streamed(pairs)
    return [*map(_detached_pair, pairs)]


def _detached_pair(pair: tuple[str, Any]) -> tuple[str, Any]:
    name, tensor = pair  # a value that is no tensor is refused where it is read
    return name, tensor.detach() if isinstance(tensor, Tensor) else tensor


def _kept_pair(pair: tuple[str, Tensor]) -> tuple[str, Tensor]:
    return pair[0], lasting(pair[1]).detach()


def _gathered_adapter(model: nn.Module, adapter_name: str | None) -> LoraAdapter:
    parts = _weights_in(model, lambda name: _LORA in name)
    lasting = by_name(parts)
    peft_model = _peft_model(model)
    return LoraAdapter.from_peft(model if peft_model is None else peft_model, adapter_name, lasting)


def _peft_model(module: nn.Module) -> nn.Module | None:
    """Return `module`, or the model inside it that has PEFT adapters, or None without adapters."""
    return next((part for part in module.modules() if getattr(part, "peft_config", None)), None)
