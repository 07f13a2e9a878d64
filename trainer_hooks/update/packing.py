"""Checks that rollouts packed into one row do not affect each other.

Used by `trainer_hooks.update.micro_batches` before it computes packed rows. The check runs the
model.

Shape letters: N tokens of one row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rollout.errors import ConfigError
from trainer_hooks.update.model_checks import cached_fault, difference

# Token ids of short rollouts. Any vocabulary has these ids.
_BEFORE, _OTHER_BEFORE, _BEHIND = range(1, 9), range(8, 0, -1), range(3, 11)


def require_separate_rollouts(policy: Callable[..., Any], device: torch.device) -> None:
    """Raise ConfigError if `policy` computes packed rollouts differently from separate ones.

    The first call with a module makes three forward passes of a few tokens without a gradient,
    which are collectives under FSDP. Later calls use the cached result. `device`: device of the
    token ids.
    """
    if isinstance(policy, nn.Module):
        fault = cached_fault(_fault, policy, device)
    else:
        fault = _fault(policy, device)
    if fault:
        how = getattr(getattr(policy, "config", None), "_attn_implementation", None)
        raise ConfigError(
            f"is_packed=True with {type(policy).__name__} and attention {how!r}: the rollouts of a "
            f"row attend to each other ({fault}); set is_packed=False, or load the model with an "
            "attn_implementation whose mask follows position ids"
        )


@torch.no_grad()
def _fault(policy: Callable[..., Any], device: torch.device) -> str | None:
    alone_NV = _logits(policy, [_BEHIND], device)
    packed = (
        _logits(policy, [before, _BEHIND], device)[len(before) :]
        for before in (_BEFORE, _OTHER_BEFORE)
    )
    return difference(alone_NV, *packed)


def _logits(
    policy: Callable[..., Any], rollouts: Sequence[range], device: torch.device
) -> torch.Tensor:
    tokens_1N = torch.tensor([[token for each in rollouts for token in each]], device=device)
    positions = [position for each in rollouts for position in range(len(each))]
    positions_1N = torch.tensor([positions], device=device)
    logits_1NV: torch.Tensor = policy(
        input_ids=tokens_1N, position_ids=positions_1N, use_cache=False
    ).logits
    return logits_1NV[0]
