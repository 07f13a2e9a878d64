"""Weight slots of stacked experts, by the experts' names in checkpoints.

Used by Experts in `rollout.layers.experts`. A live transformers module has each stack as one
parameter, as Experts does. Saved directories have one matrix for each part (gate, up, down) of each
expert. Shape letters: N experts, G = 2 F rows of gates and then ups, F expert size, E hidden size.
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

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # names of stacks in live modules
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
    """Return slots by the names of each expert's matrices, and aliases by the stacks' names. The
    two stacks hold this rank's experts, from expert `first` of all `num_experts` on. `gate`, `up`
    and `down` are an expert's names in directories, such as "gate_proj" in `3.gate_proj.weight`."""
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
    """Return the slot of the part at `index` of the stack of all experts, or an AbsentSlot if
    another rank has that expert. `stack` holds this rank's experts, from `first` on."""
    expert, *rows = index
    assert isinstance(expert, int)
    if first <= expert < first + len(stack):
        own = TensorSlot(stack, (expert - first, *rows))
        # This rank alone has this expert, and all of it.
        return CutSlot(own, Cut(shape=own.shape, dim=0, ranges=(Range(0, own.shape[0]),)))
    shape = part_of(torch.empty(stack.shape[1:], device="meta"), tuple(rows)).shape
    return AbsentSlot(shape, stack.dtype)


def slots_of_transposed_stacks(stacks: Mapping[str, Tensor]) -> dict[str, WeightSlot]:
    """Return slots of stacks that directories and live modules keep whole and transposed. There,
    `gate_up_proj` is [N, E, G] and its bias [N, G], with gates and ups alternating. `down_proj` is
    [N, F, E] and its bias [N, E]."""
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
