"""Contract of HostArena: one reusable buffer that grows, gives back parts and goes."""

from __future__ import annotations

import pytest

from rollout.backends.base import HostArena
from tests.contracts.implementations import HOST_ARENAS
from tests.contracts.residency import process_resident_bytes

SIZE = 24 << 20
SLACK = 2 << 20


@pytest.fixture(params=HOST_ARENAS)
def arena(request: pytest.FixtureRequest) -> HostArena:
    return HOST_ARENAS[request.param]()


def test_an_arena_is_empty_until_it_is_asked(arena: HostArena) -> None:
    assert arena.num_bytes == 0
    assert arena.release() == 0
    assert arena.discard(0, 0) == 0


def test_a_view_has_exactly_the_bytes_asked_for(arena: HostArena) -> None:
    assert arena.reserve(5000).numel() == 5000
    assert arena.reserve(0).numel() == 0


def test_a_smaller_reservation_reuses_the_same_memory(arena: HostArena) -> None:
    first = arena.reserve(10_000)
    first.fill_(5)
    again = arena.reserve(400)
    assert again.data_ptr() == first.data_ptr()
    assert bool((again == 5).all())
    assert arena.num_bytes >= 10_000


def test_an_arena_grows(arena: HostArena) -> None:
    arena.reserve(100)
    arena.reserve(1 << 20).fill_(1)
    assert arena.num_bytes >= 1 << 20


def test_a_released_arena_holds_no_memory(arena: HostArena) -> None:
    before = process_resident_bytes()
    arena.reserve(SIZE).fill_(1)
    assert process_resident_bytes() - before > SIZE - SLACK
    assert arena.release() >= SIZE
    assert arena.num_bytes == 0
    assert process_resident_bytes() - before < SLACK


def test_discarded_bytes_go_back_and_their_neighbours_stay(arena: HostArena) -> None:
    view = arena.reserve(SIZE)
    view.fill_(1)
    before = process_resident_bytes()
    start, end = 1000, SIZE // 2 + 1000
    freed = arena.discard(start, end)
    assert before - process_resident_bytes() > freed - SLACK
    assert bool((view[:start] == 1).all())
    assert bool((view[end:] == 1).all())
