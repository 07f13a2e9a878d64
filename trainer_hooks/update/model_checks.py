"""What a model does with an unusual forward pass, found by comparison, once for each model.

Whether a model keeps sequences apart that share one row is decided by its attention mask and by
layers that mix neighbours; neither can be read off its class.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn

# Returns how far a pass of the module is from what it should be, for a message; None if it is right.
Check = Callable[[nn.Module, torch.device], str | None]
# Nats between next-token distributions, the median over tokens, by the size of the model's numbers.
# With the same shapes the numbers are the same, up to how many tokens an expert has: small models
# of 25 families are at most 1e-13 apart. Those of gpt_oss, opt, falcon, bloom, mpt, minimax and
# nemotron_h, which mix packed rollouts, are 1e-6 to 1 apart. With other shapes right models differ
# by 1e-13 in float32 and 3e-5 in bfloat16, and deeper ones by more: SmolLM2, 30 layers, in bfloat16
# by 0.06 on a few ids in turn, and by as much from itself in float32.
MAX_NATS_SAME_SHAPES = {4: 1e-9, 2: 1e-3}
MAX_NATS_OTHER_SHAPES = {4: 1e-3, 2: 0.3}
_NUM_REMEMBERED = 32


def remembered_fault(check: Check, policy: nn.Module, device: torch.device) -> str | None:
    """Return what `check` finds. It runs in evaluation mode, without gradients, and once for each
    module and attention implementation; under FSDP its passes are collectives."""
    how = getattr(getattr(policy, "config", None), "_attn_implementation", None)
    return _fault(check, weakref.ref(policy), how, device)


@lru_cache(_NUM_REMEMBERED)
def _fault(
    check: Check, policy: weakref.ref[nn.Module], how: str | None, device: torch.device
) -> str | None:
    module = policy()
    assert module is not None, "the caller holds it"
    was_training = [part for part in module.modules() if part.training]
    module.eval()  # dropout differs from pass to pass
    try:
        with torch.no_grad():
            return check(module, device)
    finally:
        for part in was_training:
            part.training = True


def nats_between(first_NV: torch.Tensor, second_NV: torch.Tensor) -> float:
    """Return the median KL divergence of the tokens' distributions; infinite where one is NaN."""
    first_NV, second_NV = (each.double().log_softmax(-1) for each in (first_NV, second_NV))
    # A token that the model excludes, with a log-prob of -inf, adds nothing.
    gap_NV = first_NV.exp() * (first_NV - second_NV).masked_fill(first_NV == -torch.inf, 0.0)
    return float(gap_NV.sum(-1).median().nan_to_num(nan=torch.inf))


def size_of(logits_NV: torch.Tensor) -> int:
    """Return the bytes of a number of the model, at most 4: the key of the limits above."""
    return min(logits_NV.dtype.itemsize, 4)
