"""TorchFlashAttention: torch's own FlashAttention over the paged cache, one call per layer.

A second opinion on the Triton kernels: none of them is in it, neither for attention nor for the
write of K and V. Chosen by name, never by default. Like the Triton backend it looks at shapes
alone on the host, so that its steps may be captured in a graph. Shape letters: T tokens, R rows,
E = R + 1, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollout.backends.base import CacheSpec, Ops
from rollout.backends.cpu.token_major import (
    Places,
    TokenMajorCache,
    places_of,
    write_tokens,
)
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation
from rollout.errors import ConfigError

NAME = "torch_flash"
_KEYWORDS = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits")
# Splits of the context leave rows unwritten or not a number where K and V are paged: torch issue
# 194167, flash-attention pull request 2550. Torch chooses splits by itself unless told not to.
_NUM_SPLITS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedVarlen:
    """A function that is called as torch.nn.attention.varlen.varlen_attn is, and what it takes:
    heads of a multiple of 8 dims, pages of a multiple of `page_tokens`.
    """

    attend: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]
    page_tokens: int
    max_head_dim: int


def torch_varlen() -> PagedVarlen:
    """Torch's, by FlashAttention 2. Raises ConfigError where torch has none with a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        missing = "torch.nn.attention.varlen"
    else:
        known = inspect.signature(varlen_attn).parameters
        missing = ", ".join(name for name in _KEYWORDS if name not in known)
    if missing:
        raise ConfigError(
            f"attention_backend={NAME!r} needs torch 2.13: torch {torch.__version__} lacks "
            f"{missing}; install a newer one, or use attention_backend='auto'"
        )
    return PagedVarlen(
        attend=varlen_attn,
        dtypes=(torch.bfloat16, torch.float16),
        page_tokens=256,
        max_head_dim=256,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPlan:
    """What all layers share: where tokens are written, and the running sum of the contexts [E].

    Torch wants the sum, though `seqused_k` and the block table decide what is read.
    """

    places: Places
    context_starts_E: Tensor


class TorchFlashAttention(TokenMajorCache):
    """Implements `AttentionBackend` with torch's `varlen_attn`."""

    def __init__(self, ops: Ops[Any] | None = None, varlen: PagedVarlen | None = None) -> None:
        """`varlen`: what attends; None for torch's own."""
        super().__init__(ops)
        self._varlen = varlen or torch_varlen()

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, 2, G, D]. Raises ConfigError for what torch does not take."""
        varlen = self._varlen
        if spec.value_dim is not None or spec.head_dim > varlen.max_head_dim or spec.head_dim % 8:
            raise _refused(
                f"head_dim={spec.head_dim}, value_dim={spec.value_dim}",
                f"it takes V of its own, and a multiple of 8 dims up to {varlen.max_head_dim}; "
                "device='cpu' has latent attention and wider heads",
            )
        if spec.dtype not in varlen.dtypes:
            raise _refused(f"dtype={_name(spec.dtype)!r}", f"use {_names(varlen.dtypes)}")
        if spec.block_size % varlen.page_tokens:
            raise _refused(
                f"block_size_tokens={spec.block_size}", f"use a multiple of {varlen.page_tokens}"
            )
        return super().cache_shape(spec, num_blocks)

    def check(self, traits: AttentionTraits) -> None:
        """Raise ConfigError for scores that are capped and for sinks."""
        if traits.softcap is not None:
            raise _refused(f"softcap={traits.softcap}", "torch's function has none")
        if traits.sinks_H is not None:
            raise _refused("attention sinks", "torch's function has none")

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with a FlashPlan."""
        starts_E = torch.zeros_like(batch.query_starts_E)
        torch.cumsum(batch.context_lens_R, 0, dtype=starts_E.dtype, out=starts_E[1:])
        plan = FlashPlan(places=places_of(batch), context_starts_E=starts_E)
        return replace(batch, plan=plan)

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        traits: AttentionTraits = PLAIN,
    ) -> Tensor:
        """Write K and V at their slots, then attend causally; [T, H, D].

        Reads no host array of the batch. The output of tokens beyond the last row is undefined.
        """
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache, plan = batch.kv[layer], batch.plan
        write_tokens(cache, k_TGD, v_TGD, plan.places)
        num_tokens, num_rows = q_THD.shape[0], batch.context_lens_R.shape[0]
        only_decodes = num_tokens == num_rows == batch.num_decode_rows
        out_THD: Tensor = self._varlen.attend(
            *(q_THD, cache[:, :, 0], cache[:, :, 1]),
            *(batch.query_starts_E, plan.context_starts_E),
            # No row is longer, whatever lengths a captured step is replayed for.
            max(1, num_tokens - batch.num_decode_rows),
            batch.block_tables_RM.shape[1] * batch.block_size,
            scale=traits.scale_of(q_THD.shape[2]),
            window_size=_window(traits.window, only_decodes=only_decodes),
            enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
            seqused_k=batch.context_lens_R,
            block_table=batch.block_tables_RM,
            num_splits=_NUM_SPLITS,
        )
        return out_THD


def _window(window: int | None, *, only_decodes: bool) -> tuple[int, int]:
    """(positions before a token, positions after it) that it sees; -1 is no bound.

    The one token of a decode row is its last and sees all of it: without a bound torch reads K and
    V once for all query heads that share them.
    """
    if window is not None:
        return window - 1, 0
    return -1, -1 if only_decodes else 0


def _refused(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"attention_backend={NAME!r} cannot attend with {what}: {remedy}; or use "
        "attention_backend='auto'"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(_name, dtypes))
