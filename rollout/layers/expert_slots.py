"""The weights of stacked experts by the names that checkpoints have for them.

A live module of transformers has each stack as one parameter, which is how it is kept here. Saved
directories, and pushes in their names, have a matrix for each part of each expert.
Shape letters: N experts, G = 2 F rows of gates and then ups, F expert size, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollout.layers.shard import Cut, Range
from rollout.layers.weight_slot import (
    AbsentSlot,
    CutSlot,
    Index,
    ReorderedSlot,
    TensorSlot,
    WeightAlias,
    WeightSlot,
    part_of,
)

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # of live modules
GATE_UP_BIAS, DOWN_BIAS = f"{GATE_UP}_bias", f"{DOWN}_bias"


def slots_of_experts(
    gate_up_NGE: Tensor,
    down_NEF: Tensor,
    first: int,
    num_experts: int,
    *,
    gate: str,
    up: str,
    down: str,
) -> tuple[dict[str, WeightSlot], dict[str, WeightAlias]]:
    """(slots by the names of each of `num_experts`, the names of the stacks of them all).

    The stacks given have the experts from `first` on; other ranks have the others.
    `gate`, `up`, `down`: what directories call an expert's matrices, as in `3.gate_proj.weight`.
    """
    num_rows = gate_up_NGE.shape[1]
    halves = {gate: slice(0, num_rows // 2), up: slice(num_rows // 2, num_rows)}
    gate_up: dict[str, Index] = {
        f"{expert}.{part}.weight": (expert, rows)
        for expert in range(num_experts)
        for part, rows in halves.items()
    }
    downs: dict[str, Index] = {f"{n}.{down}.weight": (n,) for n in range(num_experts)}
    stacks = {GATE_UP: (gate_up_NGE, gate_up), DOWN: (down_NEF, downs)}
    slots: dict[str, WeightSlot] = {}
    for stack, parts in stacks.values():
        for name, index in parts.items():
            is_part = len(stack) < num_experts
            slots[name] = (
                _slot_of_part(stack, index, first) if is_part else TensorSlot(stack, index)
            )
    aliases = {
        name: WeightAlias(shape=torch.Size((num_experts, *stack.shape[1:])), parts=parts)
        for name, (stack, parts) in stacks.items()
    }
    return slots, aliases


def _slot_of_part(stack: Tensor, index: Index, first: int) -> WeightSlot:
    """Of the part of all experts' stack at `index`; `stack` has those from `first` on."""
    expert, *rows = index
    assert isinstance(expert, int)
    if first <= expert < first + len(stack):
        own = TensorSlot(stack, (expert - first, *rows))
        # All of it is here, and on no other rank.
        return CutSlot(own, Cut(shape=own.shape, dim=0, ranges=(Range(0, own.shape[0]),)))
    shape = part_of(torch.empty(stack.shape[1:], device="meta"), tuple(rows)).shape
    return AbsentSlot(shape, stack.dtype)


def slots_of_transposed_stacks(stacks: Mapping[str, Tensor]) -> dict[str, WeightSlot]:
    """The slots of stacks that directories and live modules have in one piece, transposed.

    Gates and ups alternate there: `gate_up_proj` is [N, E, G], `down_proj` [N, F, E], and of the
    biases `gate_up_proj_bias` [N, G], `down_proj_bias` [N, E].
    """
    slots: dict[str, WeightSlot] = {
        GATE_UP: ReorderedSlot(stacks[GATE_UP], alternate=True, is_transposed=True),
        DOWN: ReorderedSlot(stacks[DOWN], alternate=False, is_transposed=True),
    }
    if GATE_UP_BIAS in stacks:
        slots[GATE_UP_BIAS] = ReorderedSlot(
            stacks[GATE_UP_BIAS], alternate=True, is_transposed=False
        )
        slots[DOWN_BIAS] = TensorSlot(stacks[DOWN_BIAS])
    return slots
