"""AdmissionGate: no schedule of a trainer can make a batch too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_hooks.producer.admission import AdmissionGate


def admissible(gate: AdmissionGate, version: int) -> list[int]:
    """Admit as many batches as allowed. Returns their numbers."""
    admitted = []
    while gate.may_admit(version):
        admitted.append(gate.admit(version))
    return admitted


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_admission_gate_admits_at_most_v_plus_s_plus_1_batches_by_version_v(bound: int) -> None:
    gate = AdmissionGate(bound)
    assert admissible(gate, 0) == list(range(bound + 1))
    for version in range(1, 20):
        gate.deliver()
        assert not gate.may_admit(version - 1), "a place is freed by the new version alone"
        assert admissible(gate, version) == [version + bound]


def test_admission_gate_without_staleness_admits_a_batch_after_the_previous_update() -> None:
    gate = AdmissionGate(0)
    assert admissible(gate, 0) == [0]
    gate.deliver()
    assert admissible(gate, 0) == []
    assert admissible(gate, 1) == [1]


@given(bound=st.integers(0, 4), schedule=st.lists(st.sampled_from(["admit", "take", "push"])))
def test_admission_gate_keeps_the_bound_at_any_timing(bound: int, schedule: list[str]) -> None:
    # "push" is the version of the batch taken last; it may come late, and more than once.
    gate, version, waiting, held = AdmissionGate(bound), 0, [], None
    for act in schedule * 3:
        if act == "admit" and gate.may_admit(version):
            waiting.append((gate.admit(version), version))
        elif act == "take" and waiting and held is None:
            held = waiting.pop(0)
            gate.deliver()
            number, admitted_at = held
            assert admitted_at >= number - bound
            assert version - admitted_at <= bound, "batch k is trained at version k"
            assert version == number
        elif act == "push" and held is not None:
            version, held = version + 1, None
        assert gate.num_admitted <= version + bound + 1


@given(bound=st.integers(0, 4), steps=st.lists(st.integers(0, 5), max_size=40))
def test_admission_gate_limits_waiting_batches_whatever_versions_are_made(
    bound: int, steps: list[int]
) -> None:
    gate, version = AdmissionGate(bound), 0
    for num_versions in steps:
        version += num_versions
        admissible(gate, version)
        assert gate.num_admitted - gate.num_delivered <= bound + 1
        if gate.num_delivered < gate.num_admitted:
            gate.deliver()
