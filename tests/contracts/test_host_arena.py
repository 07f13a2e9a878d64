"""Contract of HostArena: one reusable buffer that grows, and frees parts or all of its memory."""

from __future__ import annotations

import pytest

from rollout.backends.buffers import HostArena
from tests.contracts.implementations import GPU_HOST_ARENAS, HOST_ARENAS, marked
from tests.contracts.residency import Meter, host_meter, host_meter_beside_a_device

pytestmark = pytest.mark.meters_memory


@pytest.fixture(params=marked(HOST_ARENAS, on_gpu=GPU_HOST_ARENAS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def arena(kind: str) -> HostArena:
    return HOST_ARENAS[kind]()


@pytest.fixture
def meter(kind: str) -> Meter:
    return host_meter_beside_a_device() if kind in GPU_HOST_ARENAS else host_meter()


def test_host_arena_is_empty_before_reserve(arena: HostArena) -> None:
    assert arena.num_bytes == 0
    assert arena.release() == 0
    assert arena.discard(0, 0) == 0


def test_host_arena_reserve_returns_exactly_num_bytes(arena: HostArena) -> None:
    assert arena.reserve(5000).numel() == 5000
    assert arena.reserve(0).numel() == 0


def test_host_arena_reuses_its_memory_for_a_smaller_reserve(arena: HostArena) -> None:
    first = arena.reserve(10_000)
    first.fill_(5)
    again = arena.reserve(400)
    assert again.data_ptr() == first.data_ptr()
    assert bool((again == 5).all())
    assert arena.num_bytes >= 10_000


def test_host_arena_grows(arena: HostArena) -> None:
    arena.reserve(100)
    arena.reserve(1 << 20).fill_(1)
    assert arena.num_bytes >= 1 << 20


def test_host_arena_release_frees_its_memory(arena: HostArena, meter: Meter) -> None:
    before = meter.read()
    arena.reserve(meter.size).fill_(1)
    assert meter.read() - before > meter.size - meter.slack
    assert arena.release() >= meter.size
    assert arena.num_bytes == 0
    assert meter.read() - before < meter.slack


def test_host_arena_can_reserve_after_release(arena: HostArena) -> None:
    for _ in range(2):
        view = arena.reserve(70_000)
        view.fill_(6)
        assert bool((view == 6).all())
        del view
        arena.release()


def test_host_arena_discard_frees_bytes_and_keeps_their_neighbours(
    arena: HostArena, meter: Meter
) -> None:
    view = arena.reserve(meter.size)
    view.fill_(1)
    before = meter.read()
    start, end = 1000, meter.size // 2 + 1000
    freed = arena.discard(start, end)
    assert before - meter.read() > freed - meter.slack
    assert bool((view[:start] == 1).all())
    assert bool((view[end:] == 1).all())
