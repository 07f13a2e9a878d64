"""How the tokens of KV blocks are copied: where they lie in a block, and who copies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """A block of the KV cache as bytes: in each of its strips, one after the other, a part of each
    of its tokens. A strip is all that one layer has of a head, or more, and begins with token 0.
    """

    num_strips: int
    num_tokens: int
    bytes_per_token: int


class CopyTokens(Protocol):
    """Copies the first tokens of some blocks of a KV cache to others."""

    def __call__(
        self, pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
    ) -> None:
        """`pool_BN`: bytes of B blocks. Copy `length_K` tokens of blocks `source_K` to `target_K`,
        int64 on its device; no block is both."""
        ...
