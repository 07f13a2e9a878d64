"""PinnedHostArena against a fake runtime: locked memory is mapped, and unlocked before unmapping.

The contract suites run it on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.backends.cuda.pinned_host import PinnedHostArena
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.errors import ConfigError
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_driver import OUT_OF_MEMORY


def test_an_arena_has_whole_chunks_and_locks_each_page_once(runtime: FakeRuntime) -> None:
    arena = PinnedHostArena(runtime, chunk_bytes=4096)
    first = arena.reserve(9000).fill_(3)
    address = first.data_ptr()
    assert runtime.library.registered == {address: 12288}
    again = arena.reserve(12288)
    assert (again.data_ptr(), bool((again[:9000] == 3).all())) == (address, True)
    assert runtime.library.names() == ["cudaHostRegister"]
    assert arena.num_bytes == 12288


def test_pinned_arena_that_grows_is_locked_again_as_one_range(runtime: FakeRuntime) -> None:
    """CUDA refuses a copy that reaches from one locked range into the next with
    cudaErrorInvalidValue, however close they lie.
    """
    arena = PinnedHostArena(runtime, chunk_bytes=4096)
    first = arena.reserve(9000).data_ptr()
    second = arena.reserve(12289).data_ptr()
    assert [call[:2] for call in runtime.library.calls] == [
        ("cudaHostRegister", first),
        ("synchronize",),
        ("cudaHostUnregister", first),
        ("cudaHostRegister", second),
    ]
    assert runtime.library.registered == {second: 16384}


def test_pinned_arena_that_grows_often_is_locked_again_rarely(
    runtime: FakeRuntime,
) -> None:
    arena = PinnedHostArena(runtime, chunk_bytes=4096)
    for size in range(4096, 1000 * 4096, 4096):
        arena.reserve(size)
    locked = [call[2] for call in runtime.library.calls if call[0] == "cudaHostRegister"]
    assert len(locked) < 40
    assert max(locked) < 1.25 * 1000 * 4096


def test_an_arena_without_bytes_locks_none(runtime: FakeRuntime) -> None:
    assert PinnedHostArena(runtime).reserve(0).numel() == 0
    assert runtime.library.calls == []


def test_a_part_of_a_locked_arena_is_not_freed(runtime: FakeRuntime) -> None:
    arena = PinnedHostArena(runtime)
    arena.reserve(1 << 20).fill_(3)
    assert arena.discard(4096, 1 << 20) == 0
    assert bool((arena.reserve(1 << 20) == 3).all())
    assert arena.discard(0, 1 << 20) >= 1 << 20
    assert arena.num_bytes == 0
    assert runtime.library.registered == {}


def test_views_outlive_the_arena(runtime: FakeRuntime) -> None:
    arena = PinnedHostArena(runtime)
    view = arena.reserve(5000).fill_(3)
    arena.release()
    assert bool((view == 3).all())


def test_a_dropped_arena_unlocks_its_pages(runtime: FakeRuntime) -> None:
    arena = PinnedHostArena(runtime)
    arena.reserve(5000)
    del arena
    assert runtime.library.registered == {}
    assert runtime.library.names()[-1] == "cudaHostUnregister"


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, 700])
def test_pinned_arena_raises_config_error_and_frees_pages_that_cannot_be_locked(
    runtime: FakeRuntime, code: int
) -> None:
    arena = PinnedHostArena(runtime)
    runtime.library.fails["cudaHostRegister"] = code
    with pytest.raises(ConfigError, match=r"\d+ bytes.*cudaHostRegister.*buffer_size_gb"):
        arena.reserve(5000)
    assert arena.num_bytes == arena.release() == 0
    runtime.library.fails.clear()
    assert arena.reserve(5000).numel() == 5000


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("reserve"), st.integers(0, 20_000)),
            st.tuples(st.just("release"), st.just(0)),
            st.tuples(st.just("discard"), st.integers(0, 20_000)),
        )
    )
)
def test_exactly_the_arenas_own_bytes_are_locked(steps: list[tuple[str, int]]) -> None:
    runtime = FakeRuntime()
    arena = PinnedHostArena(runtime, chunk_bytes=4096)
    for step, size in steps:
        if step == "reserve":
            assert arena.reserve(size).fill_(1).numel() == size
        elif step == "release":
            held = arena.num_bytes
            assert arena.release() == held
        else:
            arena.discard(0, size)
        locked = list(runtime.library.registered.values())
        assert locked == ([arena.num_bytes] if arena.num_bytes else [])  # in one range
    arena.release()
    assert runtime.library.registered == {}


@pytest.mark.gpu
def test_torch_sees_the_arena_as_pinned() -> None:
    arena = PinnedHostArena(CudaRuntime(torch.device("cuda")))
    view = arena.reserve(1 << 20)
    assert view.is_pinned()
    assert view[4097:].is_pinned()
    arena.release()
    assert not view.is_pinned()


@pytest.mark.gpu
def test_a_device_copies_to_and_from_the_pinned_arena() -> None:
    arena = PinnedHostArena(CudaRuntime(torch.device("cuda")))
    arena.reserve(100 << 20)  # then it grows, over what was the edge of the locked range
    source = torch.randint(0, 256, (200 << 20,), dtype=torch.uint8, device="cuda")
    view = arena.reserve(source.numel())
    view.copy_(source, non_blocking=True)
    back = torch.empty_like(source).copy_(view, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(view, source.cpu())
    assert torch.equal(back, source)
