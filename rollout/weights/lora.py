"""LoraAdapter: a low-rank change of some linear layers, with PEFT's tensor names.

Trainers pass a LoraAdapter to `update_weights` in place of weights. ServedWeights merges the
adapter into the weights with `rollout.weights.lora_merge`. Also used by the weight transports, the
coordinator's agent, `rollout.tensor_parallel.update_source`, `rollout_vllm.executor` and
`trainer_hooks.weight_sync.sources`. Shape letters: R rank, N out features, K in features of a
layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.models.checkpoints.reader import read_json, read_tensors, tensor_names
from rollout.models.plain_tensors import named_weights, plain_name, refusal

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# Tensors' names in a live model contain the adapter's name, such as "default"; in a file they do
# not.
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight"
)
_REMEDY = "merge the adapter in the trainer and push all weights"
# Settings with which PEFT computes more than the product of A and B, and their values without
# effect.
_OFF = (None, False)
_NONE_NAMED: tuple[Any, ...] = (None, [], ())
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "use_bdlora"), _OFF),
    **dict.fromkeys(("modules_to_save", "target_parameters", "layer_replication"), _NONE_NAMED),
    "trainable_token_indices": (*_NONE_NAMED, {}),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "monteclora_config"), (None,)),
    "kasa_config": (None,),
    "ensure_weight_tying": _OFF,
    "bias": (None, "none"),
}
# Settings that `_from_config` reads, and settings that matter in training only.
READ_KEYS = frozenset(
    (
        *("peft_type", "init_lora_weights", "r", "lora_alpha", "use_rslora"),
        *("rank_pattern", "alpha_pattern"),
    )
)
TRAINING_KEYS = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "target_modules", "exclude_modules", "lora_dropout", "runtime_config"),
        *("layers_to_transform", "layers_pattern", "megatron_config", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
        "qalora_group_size",  # matters with use_qalora only
    )
)
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # the base is not changed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """A, B and scale of one adapted layer, whose weight becomes base + scale * (B @ A). `names` are
    the adapter's names of A and B."""

    names: tuple[str, str]
    a_RK: Tensor
    b_NR: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """A low-rank change of linear layers: `update_weights` adds alpha / rank * (B @ A) to weights.

    `tensors` has A, [R, K], and B, [N, R], of each layer by PEFT's names, such as
    "model.layers.0.mlp.up_proj.lora_A.weight". Names can have the prefix "base_model.model." and
    the adapter's name. `use_rslora` changes the scale to alpha / sqrt(rank). `ranks` and `alphas`
    have the rank and alpha of layers, by module name, that differ from `rank` and `alpha`. `base`
    has all weights, by name, to which the change is added. If `base` is None, the change is added
    to the served weights, and replaces their present adapter.

    Raises WeightUpdateError for a rank that is not a positive integer, and for an alpha that is not
    a finite number.
    """

    tensors: Mapping[str, Tensor]
    rank: int
    alpha: float
    use_rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    base: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.ranks.values()):
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise WeightUpdateError(f"rank={rank!r} of an adapter must be a positive integer")
        for alpha in (self.alpha, *self.alphas.values()):
            if isinstance(alpha, bool) or not isinstance(alpha, int | float):
                raise WeightUpdateError(f"alpha={alpha!r} of an adapter must be a number")
            if not math.isfinite(alpha):
                raise WeightUpdateError(f"alpha={alpha!r} of an adapter must be finite")

    @classmethod
    def from_peft(
        cls,
        model: Any,
        adapter_name: str | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> LoraAdapter:
        """Return an adapter of a PEFT model, by default the active one.

        The result refers to the model's tensors, which must not change until the push returns. If
        the model's parameters are sharded, `weights` must give its tensors by name. Raises
        WeightUpdateError for a model without PEFT, for a missing or ambiguous adapter, and for a
        scale that differs from the config's. Settings that B @ A cannot express, such as DoRA or
        trained biases, also raise WeightUpdateError.
        """
        configs = getattr(model, "peft_config", None)
        if not isinstance(configs, Mapping):
            raise WeightUpdateError(f"{type(model).__name__} has no peft_config; give a PEFT model")
        name = _active_adapter(model, configs) if adapter_name is None else adapter_name
        if name not in configs:
            raise WeightUpdateError(f"no adapter {name!r}; name one of {', '.join(configs)}")
        weights = named_weights(model) if weights is None else weights
        adapter = _from_config(
            configs[name].to_dict(),
            {
                key: tensor.detach()
                for key, tensor in weights.items()
                if f".{name}." in f"{key.partition('.lora_')[2]}."
            },
        )
        pairs = adapter.pairs()
        for path, module in model.named_modules():
            scales = getattr(module, "scaling", None)
            pair = pairs.get(plain_name(path).removeprefix("base_model.model."))
            if pair and isinstance(scales, Mapping) and scales.get(name) != pair.scale:
                raise WeightUpdateError(
                    f"{path!r} scales its adapter by {scales.get(name)}, but its config gives "
                    f"{pair.scale}; undo set_scale, or {_REMEDY}"
                )
        return adapter

    @classmethod
    def from_directory(cls, directory: str | Path) -> LoraAdapter:
        """Return the adapter in a directory that PEFT's `save_pretrained` has written. Raises
        ModelError for missing or broken files, and WeightUpdateError for settings that B @ A cannot
        express."""
        weights = Path(directory) / WEIGHTS_FILE
        config = read_json(Path(directory) / CONFIG_FILE)
        return _from_config(config, dict(read_tensors(weights, tensor_names(weights))))

    def pairs(self) -> dict[str, LoraPair]:
        """Return A, B and scale of each adapted module, by the module's name.

        Raises WeightUpdateError if there are no tensors, if `ranks` or `alphas` name a module
        without tensors, or if a tensor is invalid. Valid tensors are A and B of a linear layer,
        each once, readable, floating and with the layer's rank.
        """
        halves: dict[str, dict[str, str]] = {}
        for name in self.tensors:
            match = _NAME.fullmatch(name)
            if match is None:
                raise WeightUpdateError(
                    f"{name!r} is no lora_A or lora_B weight of a linear layer; DoRA, embeddings, "
                    f"biases and modules_to_save are not supported: {_REMEDY}"
                )
            other = halves.setdefault(match["module"], {}).setdefault(match["half"], name)
            if other != name:
                raise WeightUpdateError(
                    f"{name!r} and {other!r} name the same half of a layer; push one adapter"
                )
        if not halves:
            raise WeightUpdateError("the adapter has no tensors; name an adapter that was trained")
        for module in {*self.ranks, *self.alphas} - halves.keys():
            raise WeightUpdateError(
                f"ranks or alphas name {module!r}, but the adapter has no tensors of it; send them"
            )
        return {module: self._pair(module, names) for module, names in halves.items()}

    def _pair(self, module: str, names: Mapping[str, str]) -> LoraPair:
        for half, other in (("A", "B"), ("B", "A")):
            if half not in names:
                raise WeightUpdateError(
                    f"the adapter has {names[other]!r}, but not its lora_{half}; send both"
                )
        rank = self.ranks.get(module, self.rank)
        pair = LoraPair(
            names=(names["A"], names["B"]),
            a_RK=self.tensors[names["A"]],
            b_NR=self.tensors[names["B"]],
            scale=_scale(self.alphas.get(module, self.alpha), rank, self.use_rslora),
        )
        for name, dim in ((names["A"], 0), (names["B"], 1)):
            tensor = self.tensors[name]
            if reason := refusal(tensor):
                raise WeightUpdateError(f"{name!r} {reason}")
            if not tensor.is_floating_point():
                raise WeightUpdateError(f"{name!r} has dtype {tensor.dtype}; send a floating one")
            if tensor.dim() != 2 or tensor.shape[dim] != rank:
                form = "[rank, in features]" if dim == 0 else "[out features, rank]"
                raise WeightUpdateError(
                    f"{name!r} has shape {list(tensor.shape)}, but {form} with rank {rank} is "
                    "expected"
                )
        return pair


def _scale(alpha: float, rank: int, use_rslora: bool) -> float:
    """Return the factor by which B @ A is multiplied. Sources: LoRA (Hu et al. 2021), section 4.1;
    rsLoRA (Kalajdzievski 2023)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def _active_adapter(model: Any, configs: Mapping[str, Any]) -> str:
    active = getattr(model, "active_adapters", [*configs])
    names = list(active() if callable(active) else active)
    if len(names) != 1:
        raise WeightUpdateError(
            f"{len(names)} active adapters ({', '.join(names)}); call model.set_adapter with one "
            f"of {', '.join(configs)}"
        )
    return str(names[0])


def _from_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LoraAdapter:
    """Return the adapter of a PEFT config and its tensors. Raises WeightUpdateError for settings
    that B @ A cannot express."""
    kind = config.get("peft_type")
    if getattr(kind, "value", kind) != "LORA":
        raise WeightUpdateError(f"peft_type={kind!r} is not supported, only LORA is: {_REMEDY}")
    for key, value in config.items():
        if key in READ_KEYS or key in TRAINING_KEYS:
            continue
        if not any(
            type(value) is type(each) and value == each for each in NEUTRAL_VALUES.get(key, _OFF)
        ):
            raise WeightUpdateError(f"{key}={value!r} is not supported: {_REMEDY}")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise WeightUpdateError(
            f"init_lora_weights={config['init_lora_weights']!r} changes the base weights: push all "
            "of them once, and then LoraAdapter(tensors=..., rank=..., alpha=...)"
        )
    modules = [match["module"] for name in tensors if (match := _NAME.fullmatch(name))]
    return LoraAdapter(
        tensors=tensors,
        rank=config.get("r"),  # type: ignore[arg-type]
        alpha=config.get("lora_alpha"),  # type: ignore[arg-type]
        use_rslora=bool(config.get("use_rslora")),
        ranks=_by_module(config.get("rank_pattern") or {}, modules),
        alphas=_by_module(config.get("alpha_pattern") or {}, modules),
    )


def _by_module(patterns: Mapping[str, Any], modules: list[str]) -> dict[str, Any]:
    """Return values by module name, from a config's `rank_pattern` or `alpha_pattern`. A module
    gets the value of the first pattern that matches the end of its name. Modules without a matching
    pattern are left out."""
    found: dict[str, Any] = {}
    for module in modules:
        for pattern, value in patterns.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                found[module] = value
                break
    return found
