"""Variants of published configs, each loaded here and by transformers.

Every variant must be refused with a ModelError, or give the logits that transformers gives with
the same weights. `python -m tests.models.config_fuzz [FAMILY ...]` counts all variants.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from rollout.backends.ops.reference import ReferenceOps
from rollout.errors import ModelError
from rollout.models import CausalLM, ModelSpec
from rollout.models.config_keys import WITHOUT_EFFECT
from rollout.models.families.registry import FAMILIES
from rollout.models.family import ROUTER_LOSSES
from rollout.models.plain_tensors import named_weights
from rollout.models.rope_config import FULL, SLIDING
from rollout.models.weights import copy_weights
from tests.contracts.reference_attention import ReferenceAttention
from tests.family_cases import FAMILY_CASES, family_of
from tests.models.oracle_backend import BLOCK_SIZE, make_batch, oracle_backend
from tests.run_seed import VARIABLE
from tests.tiny_models import randomize, tiny_config

Config: TypeAlias = dict[str, Any]
ACCEPTED, REFUSED = "accepted", "refused"
THEY_REFUSE, WRONG, OTHER = "transformers refuses", "wrong", "other exception"
OUTCOMES = (ACCEPTED, REFUSED, THEY_REFUSE, WRONG, OTHER)

PUBLISHED: dict[str, Config] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text(encoding="utf-8")
)
PROMPT = tuple((7 * i * i + 3 * i + 5) % 97 for i in range(24))
ABSENT = object()
VALUES: tuple[Any, ...] = (
    *(ABSENT, None, False, True, 0, 1, 2, 3, -1, 0.5, 1.0, 2.5, -1.0, float("nan"), 10**400),
    *("", "x", [], [1], {}, {"x": 1}),
)
FEW_VALUES: tuple[Any, ...] = (ABSENT, None, "x", 0, 2)
# What a key may plausibly have beside these.
PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("silu", "gelu", "gelu_pytorch_tanh"),
    "hidden_size": (32, 65),
    "head_dim": (8, 16, 24, 33),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (4, 8),
    "sliding_window": (5, 24, 100),
    "layer_types": (
        *([SLIDING] * 4, [FULL] * 4, [FULL, SLIDING] * 2, [SLIDING] * 3, ["linear_attention"] * 4),
        *([SLIDING] * 2, [FULL] * 2, "full_attention"),
    ),
    "mlp_layer_types": (["sparse"] * 4, ["dense"] * 4, ["dense", "sparse"] * 2, ["moe"] * 4),
    "no_rope_layers": ([1] * 4, [0] * 4, [0, 1] * 2, [1] * 5),
    "mlp_only_layers": ([0], [0, 1], [9], [True], ["0"]),
    "rope_theta": (1e4, 5e5, 10_000),
    "rope_local_base_freq": (1e4, 1e6),
    "rope_type": ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "magic"),
    "type": ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "magic"),
    "original_max_position_embeddings": (16, 64, 512, 1024),
    "max_position_embeddings": (16, 64, 1024),
    "num_experts": (4, 8),
    "num_local_experts": (4, 8),
    "n_routed_experts": (4, 8),
    "n_group": (4, 8),
    "dtype": ("float32", "bfloat16", "float16", "torch.bfloat16", "int8"),
    "torch_dtype": ("float32", "bfloat16", "float16", "torch.bfloat16", "int8"),
    "quantization_config": ({"quant_method": "awq"}, {"quant_method": "fp8"}),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_method": ("noaux_tc", "greedy"),
    "short_factor": ([1.0] * 8, [0.0] * 8, [1.0] * 6),
    "long_factor": ([1.0] * 8, [1.0] * 6),
    "attn_type_list": ([1] * 4, [0] * 4),
    "per_layer_config": ({"0": {"sliding_window": 5}},),
    "eos_token_id": (96, [3, 4], [3, "x"]),
    "query_pre_attn_scalar": (16, 256),
}
# Read by transformers though no class of a config has them.
OTHER_NAMES = (
    *("is_causal", "rope_interleave", "attention_chunk_size", "per_layer_config", "torch_dtype"),
    *("use_bidirectional_attention", "_attn_implementation", "experts_implementation"),
    *("partial_rotary_factor", "rotary_dim", "head_dim", "layer_types", "mtp_layer_types"),
    *("original_max_position_embeddings", "rope_theta", "rope_scaling", "rope_local_base_freq"),
    *("pruned_heads", "text_config", "decoder", "_rope_type_labels", "num_labels"),
    *("quantization_config", "tie_last_hidden_states", "add_cross_attention", "no_such_key"),
)
ROPE_NAMES = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "mscale"),
    *("mscale_all_dim", "attention_factor", "short_factor", "long_factor", "mrope_section"),
    *("partial_rotary_factor", "llama_4_scaling_beta", "max_position_embeddings", "finetuned"),
)
SCALINGS: tuple[Config, ...] = (
    {"type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 4},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"type": "su", "short_factor": [1.2] * 8, "long_factor": [2.0] * 8},
    {"type": "yarn", "short_factor": [1.2] * 8, "long_factor": [2.0] * 8},
    {"rope_type": "dynamic", "factor": 2.0},
    {"type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"factor": 4.0},
    {"rope_theta": 500.0},
    {FULL: {"rope_type": "default", "rope_theta": 500.0}},
    {FULL: {"rope_type": "linear", "factor": 2.0}, SLIDING: {"rope_type": "default"}},
    {FULL: {"type": "linear", "factor": 2.0}, SLIDING: {"rope_theta": 100.0}},
    {FULL: None, SLIDING: {"rope_type": "default", "rope_theta": 100.0}},
)


@dataclass(frozen=True)
class Variant:
    """A config with the value at `path` replaced, or ABSENT."""

    base: str
    config: Config
    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        path = ".".join(self.path)
        is_absent = self.value is ABSENT
        return f"{self.base} without {path}" if is_absent else f"{self.base}, {path}={self.value!r}"

    @property
    def is_change(self) -> bool:
        parent, name = _at(self.config, self.path[:-1]), self.path[-1]
        if self.value is ABSENT:
            return name in parent
        return name not in parent or repr(parent[name]) != repr(self.value)

    def changed(self) -> Config:
        """A copy of the config with the change."""
        changed = deepcopy(self.config)
        parent, name = _at(changed, self.path[:-1]), self.path[-1]
        if self.value is ABSENT:
            del parent[name]
        else:
            parent[name] = deepcopy(self.value)
        return changed


def bases_of(family: str) -> dict[str, Config]:
    """The configs of this family that are varied: published ones, and those of other tests."""
    tiny = {
        f"tiny {case}": json.loads(tiny_config(family, **FAMILY_CASES[case]).to_json_string(False))
        for case in FAMILY_CASES
        if family_of(case) == family
    }
    return tiny | {k: v for k, v in PUBLISHED.items() if v["model_type"] == family}


@cache
def all_names() -> tuple[str, ...]:
    """Every key that a config of any family may have."""
    names = {*OTHER_NAMES, *(name for config in PUBLISHED.values() for name in config)}
    for family in FAMILIES:
        names |= {field.name for field in fields(type(AutoConfig.for_model(family)))}
    return tuple(sorted(names - {"model_type"}))


def variants_of(family: str) -> list[Variant]:
    """Every variant in one key of the family's configs, and every notation of ropes.

    Keys that a config lacks are added to the first config alone.
    """
    found = []
    for number, (base, config) in enumerate(bases_of(family).items()):
        found += _variants(base, config, () if number else all_names())
    return [variant for variant in found if variant.is_change]


def _variants(base: str, config: Config, more: Sequence[str]) -> Iterator[Variant]:
    """All values of the config's own keys and of `more`, all ropes, and what ropes may hold."""
    for name in dict.fromkeys((*config, *more)):
        for value in _values_of(name, config):
            yield Variant(base, config, (name,), value)
    without = {key: value for key, value in config.items() if not key.startswith("rope_")}
    for key in ("rope_scaling", "rope_parameters"):
        for scaling in SCALINGS:
            yield Variant(base, config, (key,), scaling)
            yield Variant(f"{base} without ropes", without, (key,), scaling)
            themed = without | {"rope_theta": 500.0}
            yield Variant(f"{base} with rope_theta=500 alone", themed, (key,), scaling)
        yield from _rope_variants(base, config, (key,), ROPE_NAMES if more else ())


def _rope_variants(
    base: str, config: Config, path: tuple[str, ...], more: Sequence[str]
) -> Iterator[Variant]:
    rope = _at(config, path)
    if not isinstance(rope, dict) or not rope:
        return
    for name in rope:
        yield from _rope_variants(base, config, (*path, name), more)
    for name in dict.fromkeys((*rope, *more)):
        for value in _values_of(name, rope):
            yield Variant(base, config, (*path, name), value)


def _values_of(name: str, config: Config) -> tuple[Any, ...]:
    """Values to try: few of keys that have no effect, and of rope parameters of other ropes."""
    has_none = name in WITHOUT_EFFECT or name in ROUTER_LOSSES
    is_foreign = name in ROPE_NAMES and name not in config
    values = FEW_VALUES if has_none or is_foreign else VALUES
    return (*values, *PLAUSIBLE.get(name, ()))


def _at(config: Config, path: Sequence[str]) -> Any:
    value: Any = config
    for name in path:
        value = value.get(name)
    return value


def outcome_of(config: Config, seed: int) -> tuple[str, str]:
    """Classify a config: accepted, refused, wrong or failing. Returns the class and the reason."""
    before = deepcopy(config)
    try:
        spec = ModelSpec.from_hf_config(config)
        model = CausalLM(replace(spec, dtype=torch.float32))
    except ModelError as error:
        return REFUSED, str(error)
    except Exception as error:
        return OTHER, repr(error)
    assert repr(config) == repr(before), "reading changed the config"
    prompt = PROMPT
    if spec.rope.kind == "longrope":  # engines end sequences there, see docs/models.md
        prompt = PROMPT[: spec.rope.original_max_positions]
    explanation = ""
    # A router's near tie may go the other way by rounding, but not with other weights as well.
    for draw in range(3):
        try:
            expected_TV, tensors = _reference(config, prompt, seed + draw)
        except Exception as error:
            return THEY_REFUSE, repr(error)
        try:
            copy_weights(model.weight_table(), tensors, "transformers")
            given_TV = _logits_of(model, prompt)
        except ModelError as error:
            return WRONG, f"the weights do not fit: {error}"
        except Exception as error:
            return OTHER, repr(error)
        difference = (given_TV - expected_TV).abs().max().item()
        scale = max(1.0, expected_TV.abs().max().item())
        tolerance = 1e-4 * scale
        if difference > tolerance:  # some variants amplify rounding: that of transformers tells
            exact_TV, _ = _reference(config, prompt, seed + draw, torch.float64)
            tolerance += 4 * (expected_TV - exact_TV).abs().max().item()
        if difference <= tolerance:
            return ACCEPTED, ""
        explanation = f"logits differ by {difference:.2g} of {scale:.2g}"
    return WRONG, explanation


@torch.no_grad()
def _logits_of(model: CausalLM, prompt: Sequence[int]) -> Tensor:
    """Our logits of every token, [T, V]."""
    attention, ops = ReferenceAttention(ReferenceOps()), ReferenceOps()
    model.prepare(replace(oracle_backend(), ops=ops, attention=attention))
    spec = model.cache_spec(BLOCK_SIZE)
    kv = [torch.zeros(attention.cache_shape(spec, 1)) for _ in range(spec.num_layers)]
    return model.compute_logits(model(make_batch(kv, [(0, prompt)])))


@torch.no_grad()
def _reference(
    config: Mapping[str, Any], prompt: Sequence[int], seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [T, V] of transformers' model of random weights, and the weights.

    dtype: of the computation. The weights are the same whatever it is.
    """
    theirs = AutoConfig.for_model(**deepcopy(dict(config)))
    theirs.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").float().eval()
    randomize(model, seed=seed)
    model.to(dtype)
    output = model(torch.tensor([list(prompt)]), use_cache=False, return_dict=True)
    logits_TV = output.logits[0]
    if not logits_TV.isfinite().all():
        raise ValueError("its logits are not finite")
    return logits_TV, dict(sorted(named_weights(model).items()))


def count_outcomes(variants: Sequence[Variant], seed: int) -> tuple[Counter[str], list[str]]:
    """How many variants have each outcome, and a line for each that must not be."""
    counts: Counter[str] = Counter()
    faults = []
    for variant in variants:
        outcome, explanation = outcome_of(variant.changed(), seed)
        counts[outcome] += 1
        if outcome in (WRONG, OTHER):
            faults.append(f"{outcome}: {variant}: {explanation}")
    return counts, faults


def row_of(family: str, counts: Counter[str]) -> str:
    """A line of the table of outcomes."""
    return f"| {family} | " + " | ".join(f"{counts[name]:,}" for name in OUTCOMES) + " |"


HEAD = "| family | " + " | ".join(OUTCOMES) + " |\n" + "|---" * (len(OUTCOMES) + 1) + "|"


def main(families: Sequence[str]) -> int:
    """Print the table of outcomes, and each fault. Return how many faults there are."""
    logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    seed = int(os.environ.get(VARIABLE) or SystemRandom().getrandbits(31))
    print(f"{VARIABLE}={seed}\n{HEAD}", flush=True)
    total: Counter[str] = Counter()
    faults = []
    for family in families or FAMILIES:
        counts, found = count_outcomes(variants_of(family), seed)
        print(row_of(family, counts), *found, sep="\n", flush=True)
        total += counts
        faults += found
    print(row_of("all", total))
    return len(faults)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
