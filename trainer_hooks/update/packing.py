"""Checks that a model keeps packed rollouts apart: those that lie one behind the other in one row.

Used before every update with `is_packed=True`. Whether a model separates rollouts depends on its
attention mask, which not every model derives from position ids. So the check computes a few tokens
with different neighbours in the row and compares.

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

# Token ids of short rollouts. Any vocabulary has these ids.
_BEFORE, _OTHER_BEFORE, _BEHIND = range(1, 9), range(8, 0, -1), range(3, 11)
# Largest allowed divergence of the next-token distributions of _BEHIND, in nats, by bytes of the
# dtype; it is the median over tokens. Behind two different rollouts of one length all shapes are
# equal, so the numbers are equal except for the number of tokens of each expert: small models of 25
# families differ by at most 1e-13. gpt_oss, opt, falcon, bloom, mpt, minimax and nemotron_h, which
# mix rollouts, differ by 1e-6 to 1. Compared with _BEHIND alone, shapes differ: 1e-13 in float32,
# 3e-5 in bfloat16, and more in deeper models.
_MAX_NATS_BY_OTHERS = {4: 1e-9, 2: 1e-3}
_MAX_NATS_FROM_ALONE = {4: 1e-3, 2: 0.05}
_NUM_MODELS = 16  # number of models whose result is cached


def require_separate_rollouts(policy: Callable[..., Any], device: torch.device) -> None:
    """Raise ConfigError if `policy` computes packed rollouts differently from separate ones.

    The first call with a module costs three forward passes of a few tokens without a gradient.
    Under FSDP they are collectives. Later calls use the cached result. `device`: device of the
    token ids.
    """
    if isinstance(policy, nn.Module):
        how = getattr(getattr(policy, "config", None), "_attn_implementation", None)
        fault = _remembered_fault(weakref.ref(policy), how, device)
    else:
        how, fault = None, _fault(policy, device)
    if fault:
        raise ConfigError(
            f"is_packed=True with {type(policy).__name__} and attention {how!r}: the rollouts of a "
            f"row attend to each other ({fault}); set is_packed=False, or load the model with an "
            "attn_implementation whose mask follows position ids"
        )


@lru_cache(_NUM_MODELS)
def _remembered_fault(
    policy: weakref.ref[nn.Module], how: str | None, device: torch.device
) -> str | None:
    """Return `_fault` of the module with attention `how`, from the cache if it is known."""
    module = policy()
    assert module is not None, "the caller holds it"
    was_training = [part for part in module.modules() if part.training]
    module.eval()  # dropout would differ between passes
    try:
        return _fault(module, device)
    finally:
        for part in was_training:
            part.training = True


@torch.no_grad()
def _fault(policy: Callable[..., Any], device: torch.device) -> str | None:
    """Return by how much a packed rollout differs from a separate one; None if it does not."""
    alone_NV = _logits(policy, [_BEHIND], device)
    behind_NV = _logits(policy, [_BEFORE, _BEHIND], device)[len(_BEFORE) :]
    other_NV = _logits(policy, [_OTHER_BEFORE, _BEHIND], device)[len(_BEFORE) :]
    size = min(alone_NV.dtype.itemsize, 4)
    if (nats := _nats(behind_NV, other_NV)) > _MAX_NATS_BY_OTHERS[size]:
        return f"{nats:.2g} nats per token between the same rollout behind two different ones"
    if (nats := _nats(alone_NV, behind_NV)) > _MAX_NATS_FROM_ALONE[size]:
        return f"{nats:.2g} nats per token between the same rollout packed and alone"
    return None


def _nats(first_NV: torch.Tensor, second_NV: torch.Tensor) -> float:
    """Return the median over tokens of the KL divergence from `first_NV` to `second_NV`; inf if
    NaN.
    """
    first_NV, second_NV = (each.double().log_softmax(-1) for each in (first_NV, second_NV))
    # A token that the model excludes, with a log-prob of -inf, adds nothing.
    gap_NV = first_NV.exp() * (first_NV - second_NV).masked_fill(first_NV == -torch.inf, 0.0)
    return float(gap_NV.sum(-1).median().nan_to_num(nan=torch.inf))


def _logits(
    policy: Callable[..., Any], rollouts: Sequence[range], device: torch.device
) -> torch.Tensor:
    """Return the logits [N, V] of `rollouts` packed into one row."""
    tokens_1N = torch.tensor([[token for each in rollouts for token in each]], device=device)
    positions = [position for each in rollouts for position in range(len(each))]
    positions_1N = torch.tensor([positions], device=device)
    logits_1NV: torch.Tensor = policy(
        input_ids=tokens_1N, position_ids=positions_1N, use_cache=False
    ).logits
    return logits_1NV[0]
