"""Sizes of KV blocks, and the number of blocks that a buffer holds."""

from __future__ import annotations

import pytest
import torch

from rollout.backends.base import CacheSpec
from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from rollout.errors import ConfigError
from rollout.worker.kv_cache import bytes_per_block, num_blocks_in

ATTENTION = TorchSdpaAttention()
SPEC = CacheSpec(num_layers=8, num_kv_heads=4, head_dim=64, dtype=torch.float32, block_size=16)


def test_bytes_per_block_counts_k_and_v_of_all_layers() -> None:
    assert bytes_per_block(ATTENTION, SPEC) == 8 * 2 * 4 * 64 * 16 * 4


def test_num_blocks_in_doubles_with_half_the_dtype() -> None:
    half = CacheSpec(num_layers=8, num_kv_heads=4, head_dim=64, dtype=torch.float16, block_size=16)
    assert num_blocks_in(ATTENTION, SPEC, 1) == 4096
    assert num_blocks_in(ATTENTION, half, 1) == 8192


def test_num_blocks_in_counts_whole_blocks() -> None:
    one = bytes_per_block(ATTENTION, SPEC) / 2**30
    assert num_blocks_in(ATTENTION, SPEC, 1.999 * one) == 1


def test_num_blocks_in_names_the_least_buffer_size() -> None:
    with pytest.raises(ConfigError, match=r"buffer_size_gb=1e-05 .* at least 0\.000244"):
        num_blocks_in(ATTENTION, SPEC, 1e-5)
