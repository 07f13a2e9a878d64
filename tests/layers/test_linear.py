"""Linear: the parts of a fused projection, and its handle after a change of the weight."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from rollout.layers.linear import Linear
from tests.models.oracle_backend import oracle_backend

CPU = torch.device("cpu")


def make_fused() -> Linear:
    fused = Linear(3, {"gate": 2, "up": 1}, bias=True, dtype=torch.float32, device=CPU)
    slots = fused.weight_slots()
    slots["gate.weight"].write(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
    slots["gate.bias"].write(torch.tensor([0.5, 0.0]))
    slots["up.weight"].write(torch.tensor([[1.0, 1.0, 1.0]]))
    slots["up.bias"].write(torch.tensor([-1.0]))
    return fused


def test_linear_parts_are_contiguous_rows_of_the_fused_weight() -> None:
    fused = make_fused()
    slots = fused.weight_slots()
    assert list(slots) == ["gate.weight", "gate.bias", "up.weight", "up.bias"]
    assert all(slot.read().is_contiguous() for slot in slots.values())
    assert fused.weight.tolist() == [[1, 0, 0], [0, 2, 0], [1, 1, 1]]


def test_linear_concatenates_the_parts_outputs() -> None:
    fused = make_fused()
    fused.bind(oracle_backend())
    assert_close(fused(torch.tensor([[1.0, 2.0, 3.0]])), torch.tensor([[1.5, 4.0, 5.0]]))


def test_linear_uses_a_changed_weight_after_refresh() -> None:
    fused = make_fused()
    fused.bind(oracle_backend())
    fused.weight_slots()["up.weight"].write(torch.zeros(1, 3))
    fused.refresh()
    assert_close(fused(torch.tensor([[1.0, 2.0, 3.0]])), torch.tensor([[1.5, 4.0, -1.0]]))


def test_linear_uses_a_tied_weight() -> None:
    table = torch.nn.Parameter(torch.ones(4, 3), requires_grad=False)
    head = Linear(3, {"head": 4}, bias=False, dtype=torch.float32, device=CPU, tied_weight=table)
    assert head.weight is table
