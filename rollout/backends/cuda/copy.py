"""copy_tokens: copies the first tokens of KV blocks to other blocks, in one kernel.

`rollout.worker.kv_cache` calls it as `Backend.copy_tokens`, when samples that share a block of
their prompt need their own blocks. Writes the KV cache. Shape letters: B blocks, N bytes of a
block, K copies, C words (4 bytes) of a kernel's chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.backends.buffers import Strips

WORDS_PER_CHUNK = 1024  # 16-byte loads keep four warps busy
NUM_WARPS = 4
_WORD_BYTES = 4


def copy_tokens(
    pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
) -> None:
    """Copy the first `length_K` tokens of blocks `source_K` to blocks `target_K`, as `CopyTokens`
    says."""
    per_token = strips.bytes_per_token // _WORD_BYTES  # heads have an even number of dims
    copy_tokens_kernel[(strips.num_strips, len(source_K))](
        *(pool_BN.view(torch.int32), source_K, target_K, length_K),
        *(pool_BN.shape[1] // _WORD_BYTES, strips.num_tokens * per_token, per_token),
        BLOCK_C=WORDS_PER_CHUNK,
        num_warps=NUM_WARPS,
    )


@triton.jit
def copy_tokens_kernel(
    pool, sources, targets, lengths,
    words_per_block, words_per_strip, words_per_token,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy the first tokens of one strip (see `Strips`) of one block. The grid is (strips,
    copies)."""
    copy = tl.program_id(1)
    strip = tl.program_id(0).to(tl.int64) * words_per_strip
    source = pool + tl.load(sources + copy) * words_per_block + strip
    target = pool + tl.load(targets + copy) * words_per_block + strip
    num_words = tl.load(lengths + copy) * words_per_token
    for start in range(0, num_words, BLOCK_C):
        word_C = start + tl.arange(0, BLOCK_C)
        fits_C = word_C < num_words
        tl.store(target + word_C, tl.load(source + word_C, mask=fits_C), mask=fits_C)
