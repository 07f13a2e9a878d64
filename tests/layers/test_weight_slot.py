"""Contract of a weight slot, over every form in which a model keeps a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rollout.backends.ops.reference import ReferenceOps
from rollout.layers.linear import Linear
from rollout.layers.weight_slot import TensorSlot, WeightSlot

ROWS, INPUTS = 24, 40
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A slot of ROWS rows, and everything beside it that a write must leave alone."""

    slot: WeightSlot
    neighbours: Callable[[], list[Tensor]]


def own_tensor(dtype: torch.dtype) -> Case:
    around = torch.zeros(ROWS + 16, INPUTS, dtype=dtype)
    slot = TensorSlot(around[8:-8])
    return Case(slot=slot, neighbours=lambda: [around[:8], around[-8:]])


def rows_of_a_fused_weight(dtype: torch.dtype) -> Case:
    parts = {"q": 8, "k": ROWS, "v": 32}
    linear = Linear(INPUTS, parts, bias=False, dtype=dtype, device=CPU)
    slots = linear.weight_slots()
    for slot in slots.values():
        slot.write(torch.zeros(slot.shape))
    return Case(
        slot=slots["k.weight"],
        neighbours=lambda: [slots["q.weight"].read(), slots["v.weight"].read()],
    )


all_forms = pytest.mark.parametrize("form", [own_tensor, rows_of_a_fused_weight])
all_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
Form = Callable[[torch.dtype], Case]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@all_forms
@all_dtypes
def test_a_write_is_read_again_and_touches_nothing_beside_it(
    form: Form, dtype: torch.dtype
) -> None:
    case, values = form(dtype), randn(ROWS, INPUTS)
    assert (case.slot.shape, case.slot.dtype) == (values.shape, dtype)
    address = case.slot.address
    case.slot.write(values)
    assert torch.equal(case.slot.read(), values.to(dtype))
    assert case.slot.address == address
    assert not any(neighbour.any() for neighbour in case.neighbours())


@all_forms
@all_dtypes
def test_rows_are_written_where_they_belong(form: Form, dtype: torch.dtype) -> None:
    case, values = form(dtype), randn(ROWS, INPUTS)
    for first, end in ((19, ROWS), (0, 5), (5, 19)):
        case.slot.write(values[first:end], first)
    assert torch.equal(case.slot.read(), values.to(dtype))
    assert not any(neighbour.any() for neighbour in case.neighbours())


@all_forms
@all_dtypes
def test_its_fingerprint_is_that_of_its_values(form: Form, dtype: torch.dtype) -> None:
    case, values, ops = form(dtype), randn(ROWS, INPUTS), ReferenceOps()
    case.slot.write(values)
    assert torch.equal(case.slot.fingerprint(ops), ops.fingerprint(values, dtype))


@all_forms
def test_values_with_gaps_and_in_another_order_are_taken_as_they_read(form: Form) -> None:
    case, values = form(torch.float32), randn(INPUTS, 2 * ROWS)[:, ::2].T
    case.slot.write(values)
    assert torch.equal(case.slot.read(), values)


def test_a_number_alone_is_a_weight_as_well() -> None:
    number = torch.zeros(())
    TensorSlot(number).write(torch.tensor(2.5))
    assert number.item() == 2.5
