"""Finds out whether a model keeps several sequences in one row apart.

Used by `trainer_hooks.update.packing` and `trainer_hooks.update.tree_pass`, which put several
sequences into one row. A model's class does not show whether its attention mask and layers keep
sequences apart. The check runs the model on a few tokens, alone and beside different neighbours,
and compares the logits. Results are cached for each module.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

# Runs a module on a few tokens. Returns a text on how the logits differ, or None if they agree.
Check = Callable[[Any, torch.device], str | None]
# Largest allowed median divergence of next-token distributions in nats, by bytes of the dtype.
# Between passes beside two neighbours of one length, small models of 25 families differ by at most
# 1e-13. gpt_oss, opt, falcon, bloom, mpt, minimax and nemotron_h, which mix packed rollouts, differ
# by 1e-6 to 1. Between a pass beside a neighbour and one alone, whose shapes differ, small models
# differ by 1e-13 in float32 and 3e-5 in bfloat16, and SmolLM2 of 30 layers by 0.06, as far as its
# bfloat16 is from its float32.
_MAX_NATS_BESIDE_OTHERS = {4: 1e-9, 2: 1e-3}
_MAX_NATS_FROM_ALONE = {4: 1e-3, 2: 0.3}
_NUM_CACHED = 32  # results, one for each check, model and device


def cached_fault(check: Check, policy: nn.Module, device: torch.device) -> str | None:
    """Return the result of `check`, from the cache if this module was checked before.

    The check runs in eval mode and without gradients. Its passes are collectives under FSDP.
    """
    how = getattr(getattr(policy, "config", None), "_attn_implementation", None)
    return _fault(check, weakref.ref(policy), how, device)


@lru_cache(_NUM_CACHED)
def _fault(
    check: Check, policy: weakref.ref[nn.Module], how: str | None, device: torch.device
) -> str | None:
    module = policy()  # `how`, the name of its attention, is part of the cache's key
    assert module is not None, "the caller holds a reference"
    was_training = [part for part in module.modules() if part.training]
    module.eval()  # dropout would differ between passes
    try:
        with torch.no_grad():
            return check(module, device)
    finally:
        for part in was_training:
            part.training = True


def difference(
    alone_NV: torch.Tensor, beside_one_NV: torch.Tensor, beside_other_NV: torch.Tensor
) -> str | None:
    """Return a text on how the logits of a sequence differ between passes, or None if they agree.

    The three passes computed the sequence alone, and beside each of two other sequences.
    """
    size = min(alone_NV.dtype.itemsize, 4)
    if (nats := _nats(beside_one_NV, beside_other_NV)) > _MAX_NATS_BESIDE_OTHERS[size]:
        return f"{nats:.2g} nats per token between the same rollout beside two different ones"
    if (nats := _nats(alone_NV, beside_one_NV)) > _MAX_NATS_FROM_ALONE[size]:
        return f"{nats:.2g} nats per token between the same rollout beside another one and alone"
    return None


def _nats(first_NV: torch.Tensor, second_NV: torch.Tensor) -> float:
    """Return the median over tokens of KL(first || second), or infinity if it is NaN."""
    first_NV, second_NV = (each.double().log_softmax(-1) for each in (first_NV, second_NV))
    # A token that the model excludes, with a log-prob of -inf, adds nothing.
    gap_NV = first_NV.exp() * (first_NV - second_NV).masked_fill(first_NV == -torch.inf, 0.0)
    return float(gap_NV.sum(-1).median().nan_to_num(nan=torch.inf))
