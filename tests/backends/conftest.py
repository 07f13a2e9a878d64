"""Fixtures of the tests of backends."""

from __future__ import annotations

import pytest

from tests.backends.fake_cuda import FakeRuntime


@pytest.fixture
def runtime() -> FakeRuntime:
    """Return a CUDA runtime over a fake libcudart."""
    return FakeRuntime()
