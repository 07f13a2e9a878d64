"""Hashes of a prompt's KV blocks.

`rollout.coordinator.core.dispatcher` uses them to route requests to engines that have the prefix in
cache. `rollout.requests.dynamic_request` stores them as `precomputed_block_hashes`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollout.errors import ConfigError

HASH_PRIME = 2**61 - 1
HASH_BASE = 31


def compute_block_hashes_batched(prompt_tokens: npt.ArrayLike, block_size: int) -> list[int]:
    """Return one hash in [1, HASH_PRIME] per complete block of `prompt_tokens` [num_tokens].

    `prompt_tokens` is a list, an array, or a tensor on any device. Each hash covers its block and
    all blocks before it. A trailing partial block is ignored. Equal hashes do not prove equal
    tokens, so use the hash only for routing. Raises ConfigError unless block_size >= 1.
    """
    if block_size < 1:
        raise ConfigError(f"block_size={block_size} must be at least 1 token")
    on_host = prompt_tokens.cpu() if hasattr(prompt_tokens, "cpu") else prompt_tokens
    tokens = np.asarray(on_host, dtype=np.int64)
    num_blocks = len(tokens) // block_size
    tokens_BS = tokens[: num_blocks * block_size].reshape(num_blocks, block_size)
    hashes: list[int] = []
    parent = 0
    for block_hash in _token_hashes(tokens_BS):
        parent = (parent * HASH_BASE + block_hash) % HASH_PRIME + 1
        hashes.append(parent)
    return hashes


def _token_hashes(tokens_BS: np.ndarray) -> list[int]:
    """Return the hash of each of B blocks of S tokens, independent of the blocks before it. The
    hash is in [0, HASH_PRIME). It is a polynomial in HASH_BASE over int64, whose products, sums and
    powers wrap around in two's complement."""
    bases = np.full(tokens_BS.shape[1], HASH_BASE, dtype=np.int64)
    bases[0] = 1
    powers_S = np.cumprod(bases) % HASH_PRIME
    sums_B = (tokens_BS * powers_S).sum(axis=1)
    hashes: list[int] = (sums_B % HASH_PRIME).tolist()
    return hashes
