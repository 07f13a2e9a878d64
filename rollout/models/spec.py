"""ModelSpec: everything that shapes a decoder, read from and written to Hugging Face configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from rollout.errors import ModelError
from rollout.layers.rope import RopeSpec
from rollout.models.family import has_bias
from rollout.models.registry import find_family
from rollout.models.rope_config import rope_from_hf, rope_to_hf
from rollout.models.unsupported import refuse_unsupported

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
DEFAULT_ROPE = RopeSpec()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A dense decoder-only language model. `family` is the Hugging Face `model_type`.

    Raises ModelError for sizes that do not fit together.
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
    attention_bias: bool = False  # of query, key and value
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"{name}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        parse_dtype(self.dtype)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a config.json of transformers v4 or v5.

        Raises ModelError for an unknown `model_type`, a missing key, or a feature that this package
        would silently get wrong: sliding windows, experts, quantization, other activations.
        """
        family = find_family(config.get("model_type"))
        hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        num_layers = _size(config, "num_hidden_layers")
        refuse_unsupported(config, num_layers)
        return cls(
            family=family.name,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or family.default_head_dim or hidden_size // num_heads,
            intermediate_size=_size(config, "intermediate_size"),
            max_position_embeddings=_size(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope_from_hf(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=has_bias(family.qkv_bias, config),
            attention_output_bias=has_bias(family.output_bias, config),
            mlp_bias=has_bias(family.mlp_bias, config),
            qk_norm=family.qk_norm,
            eos_token_ids=tuple(union_of_ids(config.get("eos_token_id"))),
            dtype=parse_dtype(config.get("dtype") or config.get("torch_dtype") or torch.float32),
        )

    def to_hf_config(self) -> dict[str, Any]:
        """A config.json for transformers v4 and v5. Raises ModelError if it cannot say all."""
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
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": None,
            "eos_token_id": list(self.eos_token_ids) or None,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }
        rules = {family.qkv_bias: self.attention_bias, family.mlp_bias: self.mlp_bias}
        config |= {key: has for key, has in rules.items() if isinstance(key, str)}
        config |= rope_to_hf(self.rope)
        self._require_same(ModelSpec.from_hf_config(config))
        return config

    def _require_same(self, read_back: ModelSpec) -> None:
        """A config cannot say everything a ModelSpec can, such as Qwen2 without its biases."""
        lost = {
            f.name: (getattr(self, f.name), getattr(read_back, f.name))
            for f in fields(self)
            if getattr(self, f.name) != getattr(read_back, f.name)
        }
        if lost:
            raise ModelError(
                f"a {self.family!r} config cannot express this spec; (wanted, family's): {lost}"
            )


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype by value or name, such as "bfloat16". Raises ModelError naming the supported ones."""
    parsed = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if parsed is None or parsed not in DTYPES.values():
        raise ModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return parsed


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key}={value!r} in the config must be a positive integer")
    return value


def union_of_ids(*values: int | Sequence[int] | None) -> list[int]:
    """Every id once, in order; a value is an id, several of them, or None."""
    lists = ([] if v is None else [v] if isinstance(v, int) else v for v in values)
    return list(dict.fromkeys(token_id for ids in lists for token_id in ids))
