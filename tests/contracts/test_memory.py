"""Contract of MemoryBackend: bytes are really given back, and come again."""

from __future__ import annotations

import pytest
import torch

from rollout.backends.base import MemoryBackend
from rollout.errors import ConfigError
from tests.contracts.implementations import MEMORY
from tests.contracts.residency import process_resident_bytes, resident_bytes

SIZE = 24 << 20
SLACK = 2 << 20  # what else the process may take meanwhile


@pytest.fixture(params=MEMORY)
def memory(request: pytest.FixtureRequest) -> MemoryBackend:
    return MEMORY[request.param]()


def test_a_new_buffer_is_flat_bytes_of_zero(memory: MemoryBackend) -> None:
    buffer = memory.allocate("a", 10_001)
    assert buffer.shape == (10_001,)
    assert buffer.dtype == torch.uint8
    assert not buffer.any()


def test_a_large_buffer_costs_nothing_until_it_is_touched(memory: MemoryBackend) -> None:
    before = process_resident_bytes()
    buffer = memory.allocate("a", 1 << 30)
    assert process_resident_bytes() - before < SLACK
    buffer[:SIZE].fill_(1)
    assert SIZE - SLACK < process_resident_bytes() - before < SIZE + 2 * SLACK


def test_released_bytes_go_back_to_the_system(memory: MemoryBackend) -> None:
    before = process_resident_bytes()
    buffer = memory.allocate("a", SIZE)
    buffer.fill_(7)
    assert process_resident_bytes() - before > SIZE - SLACK
    del buffer
    assert memory.release("a") == SIZE
    assert process_resident_bytes() - before < SLACK


def test_a_restored_buffer_is_usable(memory: MemoryBackend) -> None:
    address = memory.allocate("a", SIZE).data_ptr()
    memory.release("a")
    buffer = memory.restore("a")
    assert buffer.numel() == SIZE
    if memory.has_stable_addresses:
        assert buffer.data_ptr() == address
    buffer.fill_(3)
    assert int(buffer[-1]) == 3


def test_buffers_are_released_apart(memory: MemoryBackend) -> None:
    kept, gone = memory.allocate("kept", 5000), memory.allocate("gone", 5000)
    kept.fill_(1)
    gone.fill_(2)
    del gone
    memory.release("gone")
    assert bool((kept == 1).all())


def test_restoring_what_was_not_released_keeps_its_contents(memory: MemoryBackend) -> None:
    memory.allocate("a", 100).fill_(9)
    assert bool((memory.restore("a") == 9).all())


def test_memory_that_is_not_to_be_had_is_a_config_error(memory: MemoryBackend) -> None:
    with pytest.raises(ConfigError, match="'huge'"):
        memory.allocate("huge", 1 << 60)


def test_stable_addresses_hold_no_pages_while_released() -> None:
    memory = MEMORY["reserved"]()
    assert memory.has_stable_addresses
    buffer = memory.allocate("a", SIZE)
    buffer.fill_(7)
    assert resident_bytes(buffer) >= SIZE
    memory.release("a")
    assert resident_bytes(buffer) == 0
    assert memory.restore("a").data_ptr() == buffer.data_ptr()
