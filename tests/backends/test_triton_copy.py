"""copy_tokens copies written tokens alone, and changes nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import Backend, CacheSpec
from rollout.backends.buffers import Strips
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from rollout.worker.kv_cache import MAX_COPIED_BYTES, KVCache, strips_of
from tests.backends.triton_references import copy_tokens_reference
from tests.device_bytes import DeviceBytes

pytest.importorskip("triton")

from rollout.backends.cuda.attention import TritonPagedAttention
from rollout.backends.cuda.copy import copy_tokens
from tests.run_kind import scaled

HOME = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 7
QWEN3_8B = CacheSpec(
    num_layers=36, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, block_size=256
)


@pytest.mark.device
@settings(max_examples=scaled(30))
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 96, 128]),
    block_size=st.sampled_from([1, 16, 64]),
    lengths=st.lists(st.integers(0, 64), max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_the_kernel_copies_what_the_reference_copies(
    layers: int, heads: int, head_dim: int, block_size: int, lengths: list[int], dtype: torch.dtype
) -> None:
    spec = CacheSpec(
        num_layers=layers, num_kv_heads=heads, head_dim=head_dim, dtype=dtype, block_size=block_size
    )
    strips = strips_of(TritonPagedAttention(num_multiprocessors=1), spec)
    assert strips == Strips(
        num_strips=layers * 2 * heads,
        num_tokens=block_size,
        bytes_per_token=head_dim * dtype.itemsize,
    )
    num_bytes = strips.num_strips * strips.num_tokens * strips.bytes_per_token
    pool_BN = torch.randint(0, 256, (NUM_BLOCKS, num_bytes), dtype=torch.uint8)
    expected_BN = pool_BN.clone()
    source_K, target_K = torch.tensor([1, 1, 2, 1])[: len(lengths)], torch.tensor([3, 6, 5, 4])
    length_K = torch.tensor([min(length, block_size) for length in lengths], dtype=torch.int64)
    columns = source_K, target_K[: len(lengths)], length_K
    copy_tokens_reference(expected_BN, *columns, strips)
    if lengths:
        on_device_BN = pool_BN.to(HOME)
        copy_tokens(on_device_BN, *(column.to(HOME) for column in columns), strips)
        pool_BN = on_device_BN.cpu()
    assert torch.equal(pool_BN, expected_BN)


def test_token_major_blocks_have_a_strip_in_each_layer() -> None:
    strips = strips_of(TorchSdpaAttention(cpu_backend("device").ops), QWEN3_8B)
    assert strips == Strips(num_strips=36, num_tokens=256, bytes_per_token=2 * 8 * 128 * 2)


class MetaMemory:
    """Buffers without memory."""

    has_stable_addresses = True

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def meta_backend(**parts: Any) -> Backend:
    memory: Any = MetaMemory()
    attention = TritonPagedAttention(num_multiprocessors=1)
    return replace(cpu_backend("device"), memory=memory, attention=attention, **parts)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_forking_64_prompts_of_200_tokens_8_times_takes_no_memory_but_a_bounded_piece(
    has_kernel: bool,
) -> None:
    """An 8B model's 448 copies were 15.8 GiB of whole blocks through one temporary."""
    copied: list[int] = []

    def count_bytes(
        pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
    ) -> None:
        assert pool_BN.device.type == source_K.device.type == target_K.device.type == "meta"
        copied.append(len(length_K) * strips.num_strips * strips.bytes_per_token)

    cache = KVCache(
        meta_backend(copy_tokens=count_bytes if has_kernel else None), QWEN3_8B, num_blocks=600
    )
    sources = [1 + prompt for prompt in range(64) for _ in range(7)]
    targets = list(range(65, 65 + len(sources)))
    with DeviceBytes() as device:
        cache.copy_tokens(sources, targets, [200] * len(sources))
    whole_blocks = len(sources) * cache.bytes_per_block
    assert whole_blocks > 15 * 2**30
    num_index_bytes = 3 * 8 * len(sources)
    assert device.peak <= num_index_bytes + (0 if has_kernel else MAX_COPIED_BYTES)
    if has_kernel:
        assert copied == [whole_blocks // 256]
