"""Contract of MemoryBackend: memory is really returned to the system, and restored."""

from __future__ import annotations

import pytest
import torch

from rollout.backends.buffers import MemoryBackend
from rollout.backends.cpu import residency
from rollout.errors import ConfigError
from tests.contracts.implementations import GPU_MEMORY, MEMORY, marked
from tests.contracts.residency import Meter, device_meter, host_meter, resident_bytes

pytestmark = pytest.mark.meters_memory
ON_HOST = [kind for kind in MEMORY if kind not in GPU_MEMORY]


@pytest.fixture(params=marked(MEMORY, on_gpu=GPU_MEMORY))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def memory(kind: str) -> MemoryBackend:
    return MEMORY[kind]()


@pytest.fixture
def meter(kind: str) -> Meter:
    return device_meter() if kind in GPU_MEMORY else host_meter()


def test_a_new_buffer_is_flat_bytes_of_zero(memory: MemoryBackend) -> None:
    buffer = memory.allocate("a", 10_001)
    assert buffer.shape == (10_001,)
    assert buffer.dtype == torch.uint8
    assert not buffer.any()


@pytest.mark.parametrize("kind", ON_HOST)
def test_a_large_buffer_costs_nothing_until_it_is_touched(
    memory: MemoryBackend, meter: Meter
) -> None:
    before = meter.read()
    buffer = memory.allocate("a", 1 << 30)
    assert meter.read() - before < meter.slack
    buffer[: meter.size].fill_(1)
    assert meter.size - meter.slack < meter.read() - before < meter.size + 2 * meter.slack


@pytest.mark.parametrize("kind", ON_HOST)
def test_resident_bytes_counts_written_pages(memory: MemoryBackend, meter: Meter) -> None:
    buffer = memory.allocate("a", 4 * meter.size + 10)
    assert residency.resident_bytes(buffer) == resident_bytes(buffer) == 0
    buffer[: meter.size].fill_(1)
    found = residency.resident_bytes(buffer)
    assert found == resident_bytes(buffer)
    assert meter.size <= found < 2 * meter.size
    buffer.fill_(1)
    assert residency.resident_bytes(buffer) == buffer.numel()


def test_release_returns_memory_to_the_system(memory: MemoryBackend, meter: Meter) -> None:
    before = meter.read()
    buffer = memory.allocate("a", meter.size)
    buffer.fill_(7)
    assert meter.read() - before > meter.size - meter.slack
    del buffer
    assert memory.release("a") == meter.size
    memory.trim()
    assert meter.read() - before < meter.slack


def test_a_restored_buffer_holds_its_bytes_again(memory: MemoryBackend, meter: Meter) -> None:
    memory.allocate("a", meter.size)
    memory.release("a")
    memory.trim()
    before = meter.read()
    memory.restore("a").fill_(1)
    assert meter.read() - before > meter.size - meter.slack


def test_a_restored_buffer_is_usable(memory: MemoryBackend, meter: Meter) -> None:
    address = memory.allocate("a", meter.size).data_ptr()
    memory.release("a")
    buffer = memory.restore("a")
    assert buffer.numel() == meter.size
    if memory.has_stable_addresses:
        assert buffer.data_ptr() == address
    buffer.fill_(3)
    assert int(buffer[-1]) == 3


def test_release_affects_one_buffer(memory: MemoryBackend) -> None:
    kept, gone = memory.allocate("kept", 5000), memory.allocate("gone", 5000)
    kept.fill_(1)
    gone.fill_(2)
    del gone
    memory.release("gone")
    assert bool((kept == 1).all())


def test_restore_without_release_keeps_contents(memory: MemoryBackend) -> None:
    memory.allocate("a", 100).fill_(9)
    assert bool((memory.restore("a") == 9).all())


def test_a_buffer_may_be_released_and_restored_twice(memory: MemoryBackend) -> None:
    memory.allocate("a", 5000)
    for _ in range(2):
        memory.release("a")
        memory.release("a")
        memory.restore("a")
        buffer = memory.restore("a")
        buffer.fill_(4)
        assert bool((buffer == 4).all())
        del buffer


def test_allocate_raises_config_error_if_memory_is_short(memory: MemoryBackend) -> None:
    with pytest.raises(ConfigError, match="'huge'"):
        memory.allocate("huge", 1 << 60)


def test_stable_addresses_hold_no_pages_while_released() -> None:
    memory, size = MEMORY["reserved"](), host_meter().size
    assert memory.has_stable_addresses
    buffer = memory.allocate("a", size)
    buffer.fill_(7)
    assert resident_bytes(buffer) >= size
    memory.release("a")
    assert resident_bytes(buffer) == 0
    assert memory.restore("a").data_ptr() == buffer.data_ptr()
