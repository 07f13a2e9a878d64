"""Contract of a weight slot, over every form in which a model keeps a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from rollout.backends.cpu.native_weight import NativeWeight
from rollout.layers.expert_slots import slots_of_transposed_stacks
from rollout.layers.linear import Linear
from rollout.layers.weight_slot import ReorderedSlot, RepackedSlot, TensorSlot, WeightSlot
from tests.contracts.implementations import kernels

ROWS, INPUTS = 24, 40
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A slot of ROWS rows, and the neighbouring memory that a write must not change."""

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


def part_of_a_stack(dtype: torch.dtype) -> Case:
    stack = torch.zeros(3, ROWS + 7, INPUTS, dtype=dtype)
    slot = TensorSlot(stack, (1, slice(7, None)))
    return Case(slot=slot, neighbours=lambda: [stack[0], stack[1, :7], stack[2]])


def vectors_whose_halves_alternate(dtype: torch.dtype) -> Case:
    around = torch.zeros(ROWS + 2, INPUTS, dtype=dtype)
    slot = ReorderedSlot(around[1:-1], alternate=True, is_transposed=False)
    return Case(slot=slot, neighbours=lambda: [around[:1], around[-1:]])


def repacked(first_rows: int, lanes: int) -> Callable[[torch.dtype], Case]:
    """Return a case of rows in panels that begin at a panel's first output, or within a panel."""

    def form(dtype: torch.dtype) -> Case:
        num_outputs = 8 * lanes
        weight = torch.zeros(num_outputs, INPUTS, dtype=dtype)
        packed = NativeWeight.in_place_of(kernels(), weight, lanes)
        slot = RepackedSlot(packed, first_rows, first_rows + ROWS)
        return Case(
            slot=slot,
            neighbours=lambda: [
                packed.read(0, first_rows),
                packed.read(first_rows + ROWS, num_outputs),
            ],
        )

    return form


FORMS = {
    "own tensor": own_tensor,
    "rows of a fused weight": rows_of_a_fused_weight,
    "part of a stack": part_of_a_stack,
    "halves that alternate": vectors_whose_halves_alternate,
    "panels of 16, from a first output": repacked(16, 8),
    "panels of 16, from within one": repacked(13, 8),
    "panels of 32, across two": repacked(30, 16),
    "panels of 32, inside one": repacked(35, 16),
}
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
all_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
Form = Callable[[torch.dtype], Case]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@all_forms
@all_dtypes
def test_slot_write_is_read_again_and_touches_nothing_else(form: Form, dtype: torch.dtype) -> None:
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
def test_slot_write_takes_strided_values(form: Form) -> None:
    case, values = form(torch.float32), randn(INPUTS, 2 * ROWS)[:, ::2].T
    case.slot.write(values)
    assert torch.equal(case.slot.read(), values)


def test_slot_takes_a_scalar_weight() -> None:
    number = torch.zeros(())
    TensorSlot(number).write(torch.tensor(2.5))
    assert number.item() == 2.5


@all_forms
def test_slot_is_repacked_if_a_backend_packed_the_weight(form: Form) -> None:
    slot = form(torch.float32).slot
    assert slot.is_repacked == isinstance(slot, RepackedSlot)


def test_a_slot_follows_its_parameter_to_other_memory_and_out_of_it() -> None:
    stack = nn.Parameter(torch.zeros(3, ROWS, INPUTS), requires_grad=False)
    slot, values = TensorSlot(stack, (2, slice(4, 9))), randn(3, ROWS, INPUTS)
    stack.data = values
    assert torch.equal(slot.read(), values[2, 4:9])
    assert slot.address == values[2, 4:9].data_ptr()
    stack.data = stack.data.new_empty(0)
    assert (slot.address, slot.shape) == (0, (5, INPUTS))
    stack.data = values.clone()
    slot.write(torch.ones(5, INPUTS))
    assert torch.equal(stack[2, 4:9], torch.ones(5, INPUTS))
    assert torch.equal(stack[2, 9:], values[2, 9:])


def test_stacks_that_are_transposed_on_disk_keep_gates_before_ups() -> None:
    """transformers' gpt_oss reads gates and ups as every other column."""
    saved = {
        "gate_up_proj": randn(3, 4, 10, seed=1),
        "gate_up_proj_bias": randn(3, 10, seed=2),
        "down_proj": randn(3, 5, 4, seed=3),
        "down_proj_bias": randn(3, 4, seed=4),
    }
    kept = {
        "gate_up_proj": torch.zeros(3, 10, 4),
        "gate_up_proj_bias": torch.zeros(3, 10),
        "down_proj": torch.zeros(3, 4, 5),
        "down_proj_bias": torch.zeros(3, 4),
    }
    for name, slot in slots_of_transposed_stacks(kept).items():
        slot.write(saved[name])
        assert torch.equal(slot.read(), saved[name]), name
        slot.write(torch.zeros(saved[name][:2].shape), 1)
        assert torch.equal(slot.read()[:1], saved[name][:1])
        slot.write(saved[name][1:], 1)
    columns = saved["gate_up_proj"]
    gates, ups = columns[..., ::2].mT, columns[..., 1::2].mT
    assert torch.equal(kept["gate_up_proj"], torch.cat([gates, ups], 1))
    bias = saved["gate_up_proj_bias"]
    assert torch.equal(kept["gate_up_proj_bias"], torch.cat([bias[:, ::2], bias[:, 1::2]], 1))
    assert torch.equal(kept["down_proj"], saved["down_proj"].mT)
    assert torch.equal(kept["down_proj_bias"], saved["down_proj_bias"])
