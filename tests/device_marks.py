"""Which tests launch on a CUDA device, by rules over their marks and parameters.

A test is marked `device` if it is marked gpu, or if one of its parameters is "triton": kernels that
are interpreted on a CPU run on the device where there is one. A test that launches a kernel without
either carries the mark by itself; where kernels are interpreted, a launch without it is a failure.
Managed memory is left out: a program that asks for too much of it can hang a device. Its tests,
which have "unified" in their names, run by name alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

MANAGED_MEMORY = "unified"


def mark_device_tests(items: Iterable[pytest.Item]) -> None:
    """Mark `device` all that `runs_on_a_device`."""
    for item in items:
        if runs_on_a_device(item):
            item.add_marker(pytest.mark.device)


def runs_on_a_device(item: pytest.Item) -> bool:
    """Return whether the test launches on a device. False for tests of managed memory."""
    if MANAGED_MEMORY in item.nodeid.lower():
        return False
    marks = ("gpu", "device")
    return any(map(item.get_closest_marker, marks)) or "triton" in names_in_parameters(item)


def names_in_parameters(item: pytest.Item) -> set[str]:
    """Return the strings among the values of the test's parameters, fixtures' included."""
    call = getattr(item, "callspec", None)
    values = () if call is None else call.params.values()
    return {value for value in values if isinstance(value, str)}
