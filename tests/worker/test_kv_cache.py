"""KVCache over both CPU memory kinds: release, restore, offload, onload and discard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import CacheSpec
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.memory import MappedHostArena
from rollout.worker import kv_cache
from rollout.worker.kv_cache import KVCache
from tests.contracts.residency import process_resident_bytes

KINDS = ["device", "reserved"]
SPEC = CacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32, block_size=16)


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest) -> KVCache:
    return filled(KVCache(cpu_backend(request.param), SPEC, num_blocks=9))


def filled(cache: KVCache) -> KVCache:
    for index, layer in enumerate(cache.layers):
        generator = torch.Generator().manual_seed(index)
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def snapshot(cache: KVCache) -> list[Tensor]:
    return [layer.clone() for layer in cache.layers]


def test_kv_cache_num_bytes_counts_the_scratch_block_once(cache: KVCache) -> None:
    assert cache.bytes_per_block == 3 * 16 * 2 * 2 * 8 * 4
    assert cache.num_bytes == 10 * cache.bytes_per_block
    assert [layer.shape[0] for layer in cache.layers] == [10, 10, 10]


def test_kv_cache_layers_share_no_memory(cache: KVCache) -> None:
    cache.layers[1].zero_()
    assert cache.layers[0].all()
    assert cache.layers[2].all()


@pytest.mark.parametrize("kind", KINDS)
def test_kv_cache_onload_restores_offloaded_blocks(kind: str) -> None:
    cache = filled(KVCache(cpu_backend(kind), SPEC, num_blocks=9))
    before = snapshot(cache)
    live = [7, 2, 3, 9]
    assert cache.offload(live) == 4 * cache.bytes_per_block
    assert cache.num_offloaded_bytes == 4 * cache.bytes_per_block
    assert cache.release() == cache.num_bytes
    assert not cache.is_resident
    assert cache.data_ptrs() == {}
    assert cache.restore() == cache.num_bytes
    assert cache.onload(live) == 4 * cache.bytes_per_block
    assert cache.num_offloaded_bytes == 0
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[live], old[live])


@given(
    live=st.lists(st.integers(1, 9), unique=True, min_size=1),
    aborted=st.sets(st.integers(1, 9)),
    shuffle=st.randoms(use_true_random=False),
)
def test_kv_cache_discard_drops_offloaded_blocks(
    live: list[int], aborted: set[int], shuffle
) -> None:  # type: ignore[no-untyped-def]
    cache = filled(KVCache(cpu_backend("reserved"), SPEC, num_blocks=9))
    before = snapshot(cache)
    gone = [block for block in live if block in aborted]
    rest = [block for block in live if block not in aborted]
    cache.offload(live)
    cache.release()
    cache.discard(gone)
    cache.restore()
    shuffle.shuffle(rest)
    assert cache.onload(rest) == len(rest) * cache.bytes_per_block
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[rest], old[rest])


def test_kv_cache_discard_of_the_last_block_frees_the_arena(cache: KVCache) -> None:
    arena = MappedHostArena()
    backend = replace(cpu_backend("reserved"), create_host_arena=lambda: arena)
    cache = filled(KVCache(backend, SPEC, num_blocks=9))
    cache.offload([1, 2])
    cache.discard([2])
    assert arena.num_bytes > 0
    cache.discard([1])
    assert arena.num_bytes == 0


def test_kv_cache_release_frees_memory_and_restore_takes_no_page() -> None:
    spec = CacheSpec(num_layers=4, num_kv_heads=4, head_dim=64, dtype=torch.float32, block_size=64)
    for kind in KINDS:
        before = process_resident_bytes()
        cache = KVCache(cpu_backend(kind), spec, num_blocks=63)
        for layer in cache.layers:
            layer.fill_(1)
        del layer
        assert process_resident_bytes() - before > cache.num_bytes - (2 << 20)
        cache.release()
        assert process_resident_bytes() - before < 2 << 20
        cache.restore()
        assert process_resident_bytes() - before < 2 << 20
        del cache


def test_kv_cache_restore_keeps_addresses_in_reserved_memory() -> None:
    cache = KVCache(cpu_backend("reserved"), SPEC, num_blocks=9)
    before = cache.data_ptrs()
    assert len(before) == len(set(before.values())) == 3
    cache.release()
    cache.restore()
    assert cache.data_ptrs() == before


def test_kv_cache_second_release_and_restore_do_nothing(cache: KVCache) -> None:
    assert cache.restore() == 0
    cache.release()
    assert cache.release() == 0
    cache.restore()
    assert cache.is_resident


@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
def test_copy_tokens_copies_every_layer(
    cache: KVCache, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "MAX_COPIED_BYTES", max_bytes)
    before = snapshot(cache)
    cache.copy_tokens([3, 7, 3], [5, 4, 9], [2, 16, 7])
    for layer, old in zip(cache.layers, before, strict=True):
        for source, target, length in ((3, 5, 2), (7, 4, 16), (3, 9, 7)):
            assert torch.equal(layer[target, :length], old[source, :length])
        untouched = [block for block in range(10) if block not in (5, 4, 9)]
        assert torch.equal(layer[untouched], old[untouched])


def test_kv_cache_offload_of_no_block_moves_nothing(cache: KVCache) -> None:
    assert cache.offload([]) == 0
    assert cache.onload([]) == 0


def test_strips_of_a_block_lie_in_one_piece(cache: KVCache) -> None:
    first, last = (cache.layers[index][4].data_ptr() for index in (0, -1))
    assert last - first == 2 * cache.bytes_per_block // 3
    assert all(layer[4].is_contiguous() for layer in cache.layers)
