"""The check that a model keeps rollouts apart that lie one behind the other in a single row.

Whether it does is decided by its attention mask, which not every model makes from position ids.
Shape letters: N tokens of one row, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from rollout.errors import ConfigError

# Short rollouts of ids that any vocabulary has.
_BEFORE, _OTHER_BEFORE, _BEHIND = range(1, 9), range(8, 0, -1), range(3, 11)
# Nats between next-token distributions of _BEHIND, the median over its tokens, in float32 and in 16
# bits. Behind two different rollouts of one length all shapes are the same, and so are the numbers,
# up to how many tokens an expert has: small models of 25 families are at most 1e-13 apart. Those of
# gpt_oss, opt, falcon, bloom, mpt, minimax and nemotron_h, which mix rollouts, are 1e-6 to 1 apart.
# Alone, the shapes differ: 1e-13 in float32 and 3e-5 in bfloat16, and more in deeper models.
_MAX_NATS_BY_OTHERS = {4: 1e-9, 2: 1e-3}
_MAX_NATS_FROM_ALONE = {4: 1e-3, 2: 0.05}
_NUM_MODELS = 16  # whose verdict is remembered


def require_separate_rollouts(policy: Callable[..., Any], device: torch.device) -> None:
    """Raise ConfigError for a policy whose rollouts in one row are not computed as each alone.

    The first call with a module costs three forward passes of a few tokens without a gradient;
    under FSDP they are collectives. `device`: of the token ids.
    """
    if isinstance(policy, nn.Module):
        how = getattr(getattr(policy, "config", None), "_attn_implementation", None)
        fault = _remembered_fault(weakref.ref(policy), how, device)
    else:
        how, fault = None, _fault(policy, device)
    if fault:
        raise ConfigError(
            f"is_packed=True with {type(policy).__name__} and attention {how!r}, which lets the "
            f"rollouts of a row attend to each other: one is {fault}; set is_packed=False, or load "
            "the model with an attn_implementation whose mask takes position ids"
        )


@lru_cache(_NUM_MODELS)
def _remembered_fault(
    policy: weakref.ref[nn.Module], how: str | None, device: torch.device
) -> str | None:
    """`_fault` of the module, with this attention."""
    module = policy()
    assert module is not None, "the caller holds it"
    was_training = [part for part in module.modules() if part.training]
    module.eval()  # dropout differs from pass to pass
    try:
        return _fault(module, device)
    finally:
        for part in was_training:
            part.training = True


@torch.no_grad()
def _fault(policy: Callable[..., Any], device: torch.device) -> str | None:
    """How far a rollout is from where it should be, for a message; None if it is there."""
    alone_NV = _logits(policy, [_BEHIND], device)
    behind_NV = _logits(policy, [_BEFORE, _BEHIND], device)[len(_BEFORE) :]
    other_NV = _logits(policy, [_OTHER_BEFORE, _BEHIND], device)[len(_BEFORE) :]
    size = min(alone_NV.dtype.itemsize, 4)
    if (nats := _nats(behind_NV, other_NV)) > _MAX_NATS_BY_OTHERS[size]:
        return f"{nats:.2g} nats per token from the same behind another one"
    if (nats := _nats(alone_NV, behind_NV)) > _MAX_NATS_FROM_ALONE[size]:
        return f"{nats:.2g} nats per token from the same alone"
    return None


def _nats(first_NV: torch.Tensor, second_NV: torch.Tensor) -> float:
    """The median KL divergence of the tokens' distributions; infinite where one is NaN."""
    first_NV, second_NV = (each.double().log_softmax(-1) for each in (first_NV, second_NV))
    # A token that the model excludes, with a log-prob of -inf, adds nothing.
    gap_NV = first_NV.exp() * (first_NV - second_NV).masked_fill(first_NV == -torch.inf, 0.0)
    return float(gap_NV.sum(-1).median().nan_to_num(nan=torch.inf))


def _logits(
    policy: Callable[..., Any], rollouts: Sequence[range], device: torch.device
) -> torch.Tensor:
    """Logits [N, V] of rollouts in one row."""
    tokens_1N = torch.tensor([[token for each in rollouts for token in each]], device=device)
    positions = [position for each in rollouts for position in range(len(each))]
    positions_1N = torch.tensor([positions], device=device)
    logits_1NV: torch.Tensor = policy(
        input_ids=tokens_1N, position_ids=positions_1N, use_cache=False
    ).logits
    return logits_1NV[0]
