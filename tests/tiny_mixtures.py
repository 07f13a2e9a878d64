"""Tiny random transformers models with experts: 8 of them, of which a token has 2.

Shape letters: B rows, T positions, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.tiny_models import tiny_model
from trainer_hooks.losses.replay_routing import find_routers

NUM_EXPERTS, TOP_K = 8, 2
_OF_MIXTURE = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
_SIGMOID = {
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
# Routers of all kinds: softmax before and after the choice, sigmoid with a correction, groups.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": _OF_MIXTURE,
    "olmoe": {"hidden_size": 64, "num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K},
    "gpt_oss": _OF_MIXTURE,
    "minimax_m2": _OF_MIXTURE,
    "glm4_moe": _SIGMOID | {"n_shared_experts": 1},
    "deepseek_v3": _SIGMOID
    | {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def tiny_mixture(family: str = "qwen3_moe", *, seed: int = 0, **changes: Any) -> Any:
    """A random model of the family; corrections of routers are random, too."""
    # Only eager attention has the sinks of GPT-OSS.
    return tiny_model(family, seed=seed, attention="eager", **{**MIXTURES[family], **changes})


def checkpoint_activations(model: Any, *, use_reentrant: bool) -> None:
    """Have the layers of a transformers model run again in the backward pass. Before 5.18 the
    method has another name."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": use_reentrant})


def corrections_of(model: Any) -> list[torch.Tensor]:
    """Return the corrections that routers add to scores only to choose experts."""
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


@torch.no_grad()
def perturb_routers(model: Any, std: float, seed: int = 0) -> None:
    """Let the routers choose other experts: by their corrections, or else by their weights."""
    generator = torch.Generator().manual_seed(seed)
    for chosen_by in corrections_of(model) or [r.weight for r in find_routers(model)]:
        chosen_by += torch.randn(chosen_by.shape, generator=generator) * std


@contextmanager
def routing_of(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the routers' choices within the block: [tokens, K] each, in the order of calls."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _args, result: chosen.append(result[2]))
        for router in find_routers(model)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def own_routing(model: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the routers' choices in a forward pass without cache, int16 [B, T, L, K]."""
    with routing_of(model) as chosen:
        model(input_ids=tokens_BT, use_cache=False)
    routing_NLK = torch.stack(chosen, dim=1)
    return routing_NLK.view(*tokens_BT.shape, *routing_NLK.shape[1:]).to(torch.int16)
