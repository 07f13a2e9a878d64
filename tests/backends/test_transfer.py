"""A step's arrays reach a device in one copy, whatever their types and sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.executors import transfer
from rollout.backends.executors.transfer import sent_together
from rollout.backends.step_tensors import INPUT_TYPES, LAYOUT_TYPES, HostArray, StepInputs
from tests.backends.test_graph_executor import steps

KINDS = ["int64", "int32", "int8", "float32", "float64", "bool"]
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple)


@given(arrays=st.lists(st.tuples(st.sampled_from(KINDS), shapes), max_size=8), seed=st.integers(0))
def test_arrays_of_all_types_arrive_in_one_copy(
    arrays: list[tuple[str, tuple[int, ...]]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    made = [(generator.standard_normal(shape) * 100).astype(kind) for kind, shape in arrays]
    sent: list[Tensor] = []

    def send(place: Tensor) -> Tensor:
        sent.append(place)
        return place.clone()

    views = sent_together(made, lambda n: torch.empty(n, dtype=torch.uint8), send)
    assert len(sent) == 1
    for array, view in zip(made, views, strict=True):
        np.testing.assert_array_equal(view.numpy(), array)
        assert view.numpy().dtype == array.dtype


@given(inputs=steps())
def test_a_step_and_its_layout_go_together_and_a_known_layout_stays(
    inputs: StepInputs[HostArray],
) -> None:
    copies: list[int] = []

    def in_one_copy(arrays: list[HostArray], device: torch.device) -> list[Tensor]:
        copies.append(len(arrays))
        return [torch.from_numpy(array.copy()) for array in arrays]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_in_one_copy", in_one_copy)
        first = transfer.upload(inputs, None, torch.device("cuda"))
        second = transfer.upload(inputs, first.layout, torch.device("cuda"))
    assert copies == [len(INPUT_TYPES) + len(LAYOUT_TYPES), len(INPUT_TYPES)]
    assert second.layout is first.layout
    for name in LAYOUT_TYPES:
        found = getattr(first.layout, name).numpy()
        np.testing.assert_array_equal(found, getattr(inputs.layout, name))
    for name in INPUT_TYPES:
        for step in (first, second):
            np.testing.assert_array_equal(getattr(step, name).numpy(), getattr(inputs, name))
    assert first.layout.flags == inputs.layout.flags
