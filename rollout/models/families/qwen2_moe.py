"""QWEN2_MOE: the Family of Qwen1.5-MoE and Qwen2-MoE, listed in `families.registry`. Beside the
chosen experts these models have a shared expert with its own gate."""

from collections.abc import Mapping
from typing import Any

from rollout.layers.experts import MoeNames
from rollout.models.families.qwen2 import QWEN_WINDOWS
from rollout.models.family import ROUTER_LOSSES, Family, Key, Mixture
from rollout.models.layer_rules import Windows, experts_by_step, windows_of_types
from rollout.models.rope_config import FULL, SLIDING


def _windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Return windows by `layer_types`. Without that key every second layer below
    `max_window_layers` slides, if `use_sliding_window` is set."""
    types = config.get("layer_types")
    if types is None:
        end = config["max_window_layers"] if config["use_sliding_window"] else 0
        types = [FULL if n % 2 or n >= end else SLIDING for n in range(num_layers)]
    return windows_of_types(types, config, num_layers)


QWEN2_MOE = Family(
    name="qwen2_moe",
    title="Qwen1.5-MoE, Qwen2-57B-A14B",
    architecture="Qwen2MoeForCausalLM",
    values={
        "attention_bias": Key(name="qkv_bias"),
        "num_experts": Key(name="num_experts"),
        "experts_per_token": Key(name="num_experts_per_tok"),
        "expert_size": Key(name="moe_intermediate_size"),
        "num_shared_experts": 1,
        "shared_expert_size": Key(name="shared_expert_intermediate_size"),
        "router_normalizes": Key(name="norm_topk_prob"),
    },
    defaults={
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
        **QWEN_WINDOWS,
    },
    keys=frozenset({"layer_types", "mlp_only_layers"}),
    ignored=ROUTER_LOSSES,
    windows=_windows,
    moe_layers=experts_by_step,
    mixture=Mixture(
        scores="softmax",
        names=MoeNames(shared="shared_expert", shared_gate="shared_expert_gate"),
    ),
)
