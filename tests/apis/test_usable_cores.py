"""Engines share the cores that their process may use, which can be fewer than the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rollout.apis.fleet_processes import num_usable_cores


@pytest.fixture
def one_core() -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def test_cores_that_the_process_may_not_use_are_not_counted(one_core: None) -> None:
    assert num_usable_cores() == 1
