"""ModelSpec: all settings that shape a decoder, read from and written to Hugging Face configs.

Used by `causal_lm`, `decoder`, `layout` and `weights` of `rollout.models`, by
`rollout.models.checkpoints`, `rollout.engine`, `rollout.worker.loading`,
`rollout.serve.control.announcement`, `rollout_vllm.engine`, `trainer_hooks.doctor.diagnosis` and
benchmarks. Immutable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from rollout.backends.forward_batch import RotaryRounding
from rollout.errors import ModelError
from rollout.layers.latent_attention import LatentDims
from rollout.layers.rope import RopeSpec, rotary_dim
from rollout.layers.shard import ALONE, Shard
from rollout.models.config_keys import activation_of, activation_to_hf, read_keys
from rollout.models.families.registry import find_family
from rollout.models.family import Family, Key
from rollout.models.layer_rules import experts_after_first, ropes_by_type
from rollout.models.rope_config import FULL, SLIDING, rope_from_hf, rope_parameters, rope_to_hf

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
_MOE_SIZES = (
    "num_experts",
    "experts_per_token",
    "expert_size",
    "num_shared_experts",
    "num_expert_groups",
    "num_chosen_groups",
)
DEFAULT_ROPE = RopeSpec()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Settings of a decoder-only language model. `family` is the Hugging Face `model_type`.

    `windows` gives for each layer how many tokens a token sees, itself included, or None for all
    tokens. () means all tokens in every layer. `ropes` gives each layer's rope, or None for a layer
    without a rope. () means `rope` in every layer. `moe_layers` has the indices of the layers with
    experts, in order. Raises ModelError for a value of a wrong type and for sizes that do not fit
    together.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeSpec = DEFAULT_ROPE
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # for query, key and value
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # norm over all heads together, not over each head
    norm: str = "rms"  # or "layer"
    norm_offset: float = 0.0  # added to the weights of norms
    # Rounding in half precision, as in the trainers' modules; see docs/kernels.md.
    norm_rounds_first: bool = True  # before the product with the weight as well as after it
    rotary_rounding: RotaryRounding = "each"
    activation: str = "silu"  # or "gelu_tanh", "clamped_swiglu" (see GatedActivation)
    activation_alpha: float = 1.0
    activation_limit: float = math.inf
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate size of one expert
    num_shared_experts: int = 0
    shared_expert_size: int = 0  # 0: expert_size
    router_normalizes: bool = False
    router_scale: float = 1.0
    num_expert_groups: int = 1
    num_chosen_groups: int = 1
    num_mtp_layers: int = 0  # layers for multi-token prediction; saved last, and not served
    windows: tuple[int | None, ...] = ()
    ropes: tuple[RopeSpec | None, ...] = ()
    attention_scale: float | None = None  # factor of scores; None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # c: scores become c tanh(score / c)
    latent: LatentDims | None = None  # latent attention's sizes; head_dim is its qk_rope_head_dim
    attention_sinks: bool = False  # each query head has a learned score without a value
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    shard: Shard = ALONE  # the rank whose part is built; all other fields are the whole model's

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"{name}={value!r} must be a positive integer")
        for field in fields(self):
            value = getattr(self, field.name)
            is_unset = value is None and field.type == "float | None"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if field.type in ("float", "float | None") and not (is_number or is_unset):
                raise ModelError(f"{field.name}={value!r} must be a number")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        for name in ("windows", "ropes"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ModelError(f"{name} must have num_layers={self.num_layers} entries or none")
        for rope in (self.rope, *self.distinct_ropes):
            self._check_rope(rope)
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.moe_layers:
            self._check_experts()
        parse_dtype(self.dtype)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Return the spec of a config.json of transformers v4 or v5. Raises ModelError for an
        unknown `model_type`, a missing key, an unsupported value such as an unknown activation or
        quantization, and a key that the family does not read. Keys without effect are accepted."""
        family = find_family(config.get("model_type"))
        config = read_keys(config, family)
        hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        values: dict[str, Any] = {
            "vocab_size": _size(config, "vocab_size"),
            "hidden_size": hidden_size,
            "num_layers": _size(config, "num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": config.get("num_key_value_heads") or num_heads,
            "head_dim": config.get("head_dim") or hidden_size // num_heads,
            "intermediate_size": _size(config, "intermediate_size"),
            "max_position_embeddings": _size(config, "max_position_embeddings"),
            "rms_norm_eps": config.get(family.norm_eps_key, 1e-6),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "activation": activation_of(config, family),
            "eos_token_ids": tuple(end_ids_of(config, "the config")),
            "dtype": _dtype_of(config),
        }
        values |= _layers_from_hf(config, family, values["num_layers"])
        if family.has_latent_attention:
            values |= _latent_from_hf(config)
        values |= _values_of_family(config, family)
        if family.has_sqrt_embedding:
            values["embedding_multiplier"] = float(hidden_size**0.5)
        return cls(family=family.name, **values)

    def local(self, rank: int, size: int) -> ModelSpec:
        """Return this spec with the `shard` of rank `rank` of `size`. Other fields are the same.

        Each rank keeps a part of the heads, the MLPs' widths, the experts and the vocabulary.
        Raises ModelError for a rank outside [0, size), and for a field that cannot be divided among
        `size` ranks.
        """
        if not 0 <= rank < size:
            raise ModelError(f"rank={rank} must be in [0, tensor_parallel_size={size})")
        divided = {"num_heads": self.num_heads}
        if self.latent is None:
            large, small = max(self.num_kv_heads, size), min(self.num_kv_heads, size)
            divided["num_kv_heads"] = self.num_kv_heads if large % small else size
        if len(self.moe_layers) < self.num_layers:
            divided["intermediate_size"] = self.intermediate_size
        if self.moe_layers:
            shared_size = self.shared_expert_size or self.expert_size
            divided["shared experts' size"] = self.num_shared_experts * shared_size
        for name, value in divided.items():
            if value % size:
                raise ModelError(
                    f"{name}={value} cannot be divided among tensor_parallel_size={size} ranks; "
                    "use a size that divides it, or data_parallel_size"
                )
        for name in ("vocab_size", "num_experts") if self.moe_layers else ("vocab_size",):
            if getattr(self, name) < size:
                raise ModelError(
                    f"{name}={getattr(self, name)} is less than tensor_parallel_size={size}"
                )
        return replace(self, shard=Shard(rank, size)) if size > 1 else self

    @property
    def num_kept_heads(self) -> int:
        """Number of query heads on this rank."""
        return self.shard.range_of(self.num_heads).length

    @property
    def num_kept_kv_heads(self) -> int:
        """Number of key and value heads on this rank, which its query heads read."""
        return self.shard.kv_heads_of(self.num_kv_heads).length

    def to_hf_config(self) -> dict[str, Any]:
        """Return a config.json for transformers v4 and v5. Raises ModelError if the family's config
        cannot express the spec."""
        family = find_family(self.family)
        config = {
            "architectures": [family.architecture],
            "model_type": family.name,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            family.activation_key: activation_to_hf(self.activation, family),
            family.norm_eps_key: self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": None,
            "pad_token_id": None,
            "eos_token_id": list(self.eos_token_ids) or None,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }
        for name, rule in family.values.items():
            if isinstance(rule, Key):
                config[rule.name] = rule.write(getattr(self, name))
        config |= self._layers_to_hf(family)
        if self.latent is not None:
            config |= asdict(self.latent)
        self._require_same(ModelSpec.from_hf_config(config))
        return config

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def distinct_ropes(self) -> tuple[RopeSpec, ...]:
        """The layers' ropes without duplicates, in the order of layers."""
        ropes = self.ropes or (self.rope,)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def _layers_to_hf(self, family: Family) -> dict[str, Any]:
        """Return the config keys for ropes, windows and layers with experts that `family` reads."""
        keys: dict[str, Any] = rope_to_hf(self.rope)
        if "partial_rotary_factor" not in family.read_keys:
            del keys["partial_rotary_factor"]
        windows = self.windows or (None,) * self.num_layers
        if family.ropes is ropes_by_type:
            layers = [*zip(windows, self.ropes or (self.rope,) * self.num_layers, strict=True)]
            full = next((rope for window, rope in layers if window is None and rope), self.rope)
            sliding = next((rope for window, rope in layers if window and rope), self.rope)
            keys = {
                "rope_parameters": {FULL: rope_parameters(full), SLIDING: rope_parameters(sliding)}
            }
        if "no_rope_layers" in family.keys:
            ropes = self.ropes or (self.rope,) * self.num_layers
            keys["no_rope_layers"] = [int(rope is not None) for rope in ropes]
        if "rope_interleave" in family.read_keys:
            keys["rope_interleave"] = self.rope.is_interleaved
        window = next(filter(None, windows), None)
        # With layer_types, transformers needs a window even if no layer slides.
        if "sliding_window" in family.read_keys and (window or "layer_types" not in family.keys):
            keys["sliding_window"] = window
        if "use_sliding_window" in family.read_keys:
            keys["use_sliding_window"] = bool(self.windows)
        if "mlp_only_layers" in family.keys:
            keys["mlp_only_layers"] = sorted({*range(self.num_layers)} - {*self.moe_layers})
        if family.moe_layers is experts_after_first:
            keys["first_k_dense_replace"] = min(self.moe_layers, default=self.num_layers)
        if "mlp_layer_types" in family.keys:
            keys["mlp_layer_types"] = [
                "sparse" if layer in self.moe_layers else "dense"
                for layer in range(self.num_layers)
            ]
        if "layer_types" in family.keys:
            keys["layer_types"] = [FULL if window is None else SLIDING for window in windows]
        return keys

    def _check_latent(self, dims: LatentDims) -> None:
        if self.num_kv_heads != self.num_heads:
            raise ModelError(
                f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads} with latent "
                "attention: each head has keys and values of its own"
            )
        if self.head_dim != dims.qk_rope_head_dim:
            raise ModelError(
                f"head_dim={self.head_dim} must be qk_rope_head_dim={dims.qk_rope_head_dim} with "
                "latent attention: it is the number of rotated dims"
            )
        if self.attention_bias and dims.q_lora_rank is None:
            raise ModelError("attention_bias needs q_lora_rank: without it q_proj has no bias")

    def _check_experts(self) -> None:
        for name in _MOE_SIZES:
            value, least = getattr(self, name), 0 if name == "num_shared_experts" else 1
            if not isinstance(value, int) or value < least:
                kind = "positive" if least else "0 or more"
                raise ModelError(f"{name}={value!r} must be {kind} with experts")
        for name in ("router_scale", "activation_alpha", "activation_limit"):
            if not isinstance(getattr(self, name), int | float):
                raise ModelError(f"{name}={getattr(self, name)!r} must be a number with experts")
        per_group, rest = divmod(self.num_experts, self.num_expert_groups)
        is_lone = self.num_expert_groups > 1 and per_group == 1
        if rest or is_lone or not 0 < self.num_chosen_groups <= self.num_expert_groups:
            raise ModelError(
                f"num_experts={self.num_experts} must make num_expert_groups="
                f"{self.num_expert_groups} equal groups of two or more; num_chosen_groups="
                f"{self.num_chosen_groups} must be from 1 to the number of groups"
            )
        if self.experts_per_token > per_group * self.num_chosen_groups:
            raise ModelError(
                f"experts_per_token={self.experts_per_token} exceeds the "
                f"{per_group * self.num_chosen_groups} experts that can be chosen"
            )
        if not set(self.moe_layers) <= {*range(self.num_layers)}:
            raise ModelError(
                f"moe_layers={self.moe_layers} must be in [0, num_layers={self.num_layers})"
            )

    def _check_rope(self, rope: RopeSpec) -> None:
        num_dims = rotary_dim(rope, self.head_dim)
        if num_dims < 2 or num_dims % 2:
            raise ModelError(
                f"partial_rotary_factor={rope.partial} of head_dim={self.head_dim} must give an "
                f"even number of dims, not {num_dims}"
            )
        factors = {len(rope.short_factors), len(rope.long_factors)}
        if rope.kind == "longrope" and factors != {num_dims // 2}:
            raise ModelError(
                f"longrope needs {num_dims // 2} factors, one for each frequency, not {factors}"
            )

    def _require_same(self, read_back: ModelSpec) -> None:
        """Raise ModelError unless the config reads back as this spec. For example, no config can
        express Qwen2 without its biases."""
        lost = {
            f.name: (getattr(self, f.name), getattr(read_back, f.name))
            for f in fields(self)
            if getattr(self, f.name) != getattr(read_back, f.name)
        }
        if lost:
            raise ModelError(
                f"a {self.family!r} config cannot express this spec; (wanted, family's): {lost}"
            )


def _layers_from_hf(config: Mapping[str, Any], family: Family, num_layers: int) -> dict[str, Any]:
    """Return the fields `rope`, `windows`, `ropes` and `moe_layers`."""
    windows = family.windows(config, num_layers)
    each = family.ropes(config, windows or (None,) * num_layers)
    pairs = zip(each, windows or (None,) * num_layers, strict=False)
    # Layers of full attention first. Empty if all layers have the same rope.
    ordered = sorted(pairs, key=lambda pair: pair[1] is not None)
    rope = next((own for own, _ in ordered if own is not None), None) or rope_from_hf(config)
    for own in filter(None, (rope, *each)):
        _require_rope(own, family)
    if config.get("rope_interleave", family.has_interleaved_rope):
        rope = replace(rope, is_interleaved=True)
        each = tuple(own and replace(own, is_interleaved=True) for own in each)
    return {
        "rope": rope,
        "windows": windows,
        "ropes": () if set(each) <= {rope} else each,
        "moe_layers": family.moe_layers(config, num_layers),
    }


def _require_rope(rope: RopeSpec, family: Family) -> None:
    """Raise ModelError for a rope that transformers does not support in this family."""
    if rope.kind not in family.rope_kinds:
        raise ModelError(
            f"rope type {rope.kind!r} is not supported in the family {family.name!r}; supported: "
            f"{', '.join(family.rope_kinds)}"
        )
    if rope.partial != 1.0 and "partial_rotary_factor" not in family.read_keys:
        raise ModelError(f"partial_rotary_factor={rope.partial} is not known to {family.name!r}")
    if rope.query_growth and not family.has_query_growth:
        raise ModelError(
            f"llama_4_scaling_beta={rope.query_growth} is not known to {family.name!r}"
        )


def _latent_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `latent` and `head_dim`. Raises ModelError if the config has a head_dim
    other than its qk_rope_head_dim."""
    dims = LatentDims(**{field.name: config[field.name] for field in fields(LatentDims)})
    head_dim = config.get("head_dim", dims.qk_rope_head_dim)
    if head_dim != dims.qk_rope_head_dim:
        raise ModelError(
            f"head_dim={head_dim!r} in the config must be qk_rope_head_dim="
            f"{dims.qk_rope_head_dim}, or absent"
        )
    return {"latent": dims, "head_dim": head_dim}


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """Return the weights' dtype from `dtype`, else from the older `torch_dtype`, else float32."""
    named = (config.get(key) for key in ("dtype", "torch_dtype"))
    return parse_dtype(next((dtype for dtype in named if dtype is not None), torch.float32))


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype for a dtype or its name, such as "bfloat16". Raises ModelError for a
    dtype that is not in DTYPES."""
    parsed = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if parsed is None or parsed not in DTYPES.values():
        raise ModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return parsed


def _size(config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise ModelError(f"{key} is missing in the config: it must be a positive integer")
    return int(config[key])


def _values_of_family(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields in `family.values`: constants, and fields whose keys the config has."""
    return {
        name: rule.read(config[rule.name]) if isinstance(rule, Key) else rule
        for name, rule in family.values.items()
        if not isinstance(rule, Key) or rule.name in config
    }


def end_ids_of(config: Mapping[str, Any], origin: str) -> list[int]:
    """Return the end-of-sequence token ids of a config. Raises ModelError, which names `origin`,
    for a value that is not a token id or a list of them."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"eos_token_id={value!r} in {origin} must be a token id or a list of them")
    return union_of_ids(ids)


def union_of_ids(*values: int | Sequence[int] | None) -> list[int]:
    """Return every id once, in order. Each of `values` is an id, a sequence of ids, or None."""
    lists = ([] if v is None else [v] if isinstance(v, int) else v for v in values)
    return list(dict.fromkeys(token_id for ids in lists for token_id in ids))
