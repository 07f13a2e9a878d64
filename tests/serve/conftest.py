"""A server for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.served import Served, served_directory


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = served_directory()
    try:
        yield server
    finally:
        server.close()
