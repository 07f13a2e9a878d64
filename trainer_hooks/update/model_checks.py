"""Finds out by comparison, once for each model, whether it keeps sequences of one pass apart.

Used by `trainer_hooks.update.packing` and `trainer_hooks.update.tree_pass`, which put several
sequences into one row. Whether a model computes each as it would alone depends on its attention
mask and on layers that mix neighbours, which its class does not show. So both compute a few tokens
beside different neighbours, and alone, and compare the logits here. Results are cached.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

# Computes a few tokens by a module. Returns a text on how the logits are wrong, or None if they are
# right.
Check = Callable[[Any, torch.device], str | None]
# Largest allowed divergence of next-token distributions in nats, by bytes of the dtype; it is the
# median over tokens. Beside two neighbours of one length all shapes are equal, so the numbers are
# equal except for the number of tokens of each expert: small models of 25 families differ by at
# most 1e-13. gpt_oss, opt, falcon, bloom, mpt, minimax and nemotron_h, which mix packed rollouts,
# differ by 1e-6 to 1. Compared with the same tokens alone, shapes differ: 1e-13 in float32, 3e-5 in
# bfloat16 for small models and 0.06 for SmolLM2 of 30 layers, as far as its bfloat16 is from its
# float32.
_MAX_NATS_BESIDE_OTHERS = {4: 1e-9, 2: 1e-3}
_MAX_NATS_FROM_ALONE = {4: 1e-3, 2: 0.3}
_NUM_CACHED = 32  # results, one for each check, model and device


def cached_fault(check: Check, policy: nn.Module, device: torch.device) -> str | None:
    """Return the result of `check`, from the cache if this module was checked before.

    The check runs in eval mode and without gradients. Under FSDP its passes are collectives.
    """
    how = getattr(getattr(policy, "config", None), "_attn_implementation", None)
    return _fault(check, weakref.ref(policy), how, device)


@lru_cache(_NUM_CACHED)
def _fault(
    check: Check, policy: weakref.ref[nn.Module], how: str | None, device: torch.device
) -> str | None:
    """Return the result of `check` for the module. `how`: its attention, a key of the cache."""
    module = policy()
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
    """Return a text on how the logits of a sequence differ between passes; None if they agree.

    The sequence was computed alone, and in one pass with each of two other sequences.
    """
    size = min(alone_NV.dtype.itemsize, 4)
    if (nats := _nats(beside_one_NV, beside_other_NV)) > _MAX_NATS_BESIDE_OTHERS[size]:
        return f"{nats:.2g} nats per token between the same rollout beside two different ones"
    if (nats := _nats(alone_NV, beside_one_NV)) > _MAX_NATS_FROM_ALONE[size]:
        return f"{nats:.2g} nats per token between the same rollout beside another one and alone"
    return None


def _nats(first_NV: torch.Tensor, second_NV: torch.Tensor) -> float:
    """Return the median KL divergence of the tokens' distributions; infinity if it is NaN."""
    first_NV, second_NV = (each.double().log_softmax(-1) for each in (first_NV, second_NV))
    # A token that the model excludes, with a log-prob of -inf, adds nothing.
    gap_NV = first_NV.exp() * (first_NV - second_NV).masked_fill(first_NV == -torch.inf, 0.0)
    return float(gap_NV.sum(-1).median().nan_to_num(nan=torch.inf))
