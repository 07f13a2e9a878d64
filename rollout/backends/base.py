"""The protocols a device fulfils, and Backend, their frozen bundle.

Shape letters: T tokens, H query heads, G key/value heads, D head dim, K in features, N out
features, V vocabulary, S sample rows, P scored tokens; of a mixture: N experts, E hidden size, F
expert size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rollout.backends.buffers import CopyTokens, HostArena, MemoryBackend
from rollout.backends.forward_batch import (
    PLAIN,
    AttentionTraits,
    ForwardBatch,
    RotaryRounding,
    Rotation,
    SamplingBatch,
)
from rollout.backends.fused_decoder import DecoderParts, FusedDecoder
from rollout.backends.ops.fingerprint import Places
from rollout.backends.step_tensors import Fetch, HostArray, Program, StepInputs
from rollout.parallel.collectives import ONE_RANK, Collectives
from rollout.step.output import SampleResult, ScoreResult

Handle = TypeVar("Handle")  # of a linear layer, an implementation's own


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What a model's KV cache must hold: one K and one V vector per token, layer and KV head.

    With `value_dim` it holds K alone, and V is the first `value_dim` dims of K, as in latent
    attention.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    value_dim: int | None = None


class RepackedWeight(Protocol):
    """A weight, [N, K], that is packed in its own memory: no plain one exists."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def address(self, row: int) -> int:
        """Where this row begins, 0 while the memory is released."""
        ...

    def read(self, start: int, end: int) -> Tensor:
        """A copy of rows [start, end)."""
        ...

    def write(self, values_RK: Tensor, start: int = 0) -> None:
        """Replace the rows from `start` on, casting them."""
        ...

    def gather(self, rows_T: Tensor) -> Tensor:
        """A copy of these rows, [T, K]."""
        ...

    def undo(self, staged: Any) -> None:
        """Go back to the weight from before `Ops.refresh` took `staged`, if it did."""
        ...

    def unpack(self) -> None:
        """Give the memory the order of rows again, and the tensor its shape."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivation:
    """What a gated feed-forward network makes of gate and up.

    `kind` is "silu" or "gelu_tanh", which multiply act(gate) by up, or "clamped_swiglu": (up + 1) *
    gate * sigmoid(alpha * gate), gate at most `limit` and up within ±`limit`.
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The gated feed-forward networks of a layer's N experts; G = 2 F, all gates, then all ups.

    `is_part`: tokens may be sent to id N, too, which stands for another rank's experts.
    """

    gate_up_NGE: Tensor
    down_NEF: Tensor
    gate_up_bias_NG: Tensor | None = None
    down_bias_NE: Tensor | None = None
    activation: GatedActivation = GatedActivation()
    is_part: bool = False


class Ops(Protocol[Handle]):
    """Device operations used by the layers, the sampler and weight updates.

    `rounds_like_trainers`: norms and the rotary embedding are to be rounded as the modules of the
    family's trainers are, see docs/kernels.md; otherwise once. In float32 nothing differs.
    """

    rounds_like_trainers: bool

    def prepare_linear(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, may_repack: bool = False
    ) -> Handle:
        """A handle for `linear`, which refers to the weight. Nothing is packed before
        `choose_products`, which with `may_repack` may pack the weight in its own memory: see
        `repacked`.
        """
        ...

    def choose_products(
        self,
        handles: Iterable[Handle],
        experts: Iterable[ExpertWeights] = (),
        fused: FusedDecoder | None = None,
    ) -> None:
        """Choose how `linear` computes with these handles, all of a model.

        Handles may then hold packed copies of their weights, which `refresh` brings up to date.
        Handles without a choice work as well. The choice never changes afterwards. `experts` and
        `fused`, what may run a pass in one call, are named in the log and in `explain`.
        """
        ...

    def explain(self) -> str:
        """Describe the chosen products, a line for each shape; "" where nothing is chosen."""
        ...

    def linear(self, x_TK: Tensor, handle: Handle) -> Tensor:
        """x @ weight.T + bias, [T, N]."""
        ...

    def linear_float32(self, x_TK: Tensor, handle: Handle) -> Tensor:
        """`linear` in float32, where the device can without rounding to x's dtype before."""
        ...

    def stage(self, handle: Handle, parts: Sequence[Tensor]) -> Any:
        """What `refresh` will want for a weight whose rows are `parts`; the handle is unchanged.

        Packing happens here, while the old weight still serves.
        """
        ...

    def refresh(self, handle: Handle, staged: Any = None) -> None:
        """Follow an in-place change of the handle's weight; `staged` is what `stage` returned.

        A repacked weight takes its new values from `staged` and leaves its old ones there.
        """
        ...

    def repacked(self, handle: Handle) -> RepackedWeight | None:
        """The handle's weight, if it is packed in its own memory."""
        ...

    def release(self, handle: Handle) -> None:
        """Drop packed copies, until `refresh`."""
        ...

    def packed(self, handle: Handle) -> Any:
        """The handle's packed copy, as `refresh` takes it; it never changes. None if there is none
        that `unpack` could turn back into the weight's very bytes."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """The weight that a copy from `packed` was made of, [N, K]."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = False
    ) -> Tensor:
        """Root-mean-square normalisation over the last dim, computed in float32.

        `rounds_first`: rounded to x's dtype before the product with the weight, too.
        """
        ...

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        rounds_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def rotary(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        rounding: RotaryRounding = "once",
    ) -> tuple[Tensor, Tensor]:
        """Rotary embedding in the half-split (GPT-NeoX) layout; cos and sin are per token."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight over the last dim, computed in float32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half of the last dim) * second half."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(first half of the last dim) * second half, by the tanh approximation."""
        ...

    def experts(
        self, x_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """sum over k of weights_TK[:, k] * expert ids_TK[:, k] of x, [T, E] in x's dtype.

        `ids_TK` is int64, `weights_TK` float32; the sum is in float32. Of experts that are a part,
        id N adds nothing.
        """
        ...

    def sample(self, logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
        """Draw one token per row, with its log-prob from these very logits."""
        ...

    def score(self, logits_PV: Tensor, targets_P: Tensor, top_n: int) -> ScoreResult[Tensor]:
        """Raw log-probs of the targets, and the top-n of their rows. Ranks are not computed."""
        ...

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
        """(64-bit hash of the values x.to(dtype) and their places, number of non-finite ones),
        int64 [2] on x's device, whatever device that is; the host need not wait for it.

        `places`: those of the elements of `x` in the tensor whose part it is; None if it is none.
        Equal bits give equal numbers on every device. Source: `ops.fingerprint`.
        """
        ...

    def copy_with_fingerprint(self, out: Tensor, x: Tensor) -> Tensor:
        """Copy `x` to `out`, of the same shape and dtype, on any devices. Returns its fingerprint
        as `hashed_dtype`. Raises ValueError if they differ.
        """
        ...


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache. It alone knows the layout within a block."""

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor, K and V together; dim 0 counts blocks.

        The blocks it is then given are contiguous each, but may lie apart. Raises ConfigError for
        heads that the backend cannot attend with.
        """
        ...

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """Called once per forward pass, before its layers: the batch that they hand to `attend`,
        whose `plan` is what all of them share.
        """
        ...

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
        """Norm and rotate Q and K as `rotation` says, write K and V at `slots_T` of
        `batch.kv[layer]`, then attend causally as `traits` say. [T, H, D].

        `batch` is what `begin` returned. Q, K and V may be views of one projection: only their last
        dim is sure to have unit stride. Where the cache holds K alone, V is only read for its
        shape, [T, G, value_dim], and so is the last dim of the result.
        """
        ...


class Executor(Protocol):
    """Runs a step's program on the device: as it is, or by replaying a captured graph.

    `overlaps`: `launch` returns while the device still works, so the host can prepare what comes
    next. `num_captures` counts graphs captured so far, 0 where there are none.
    """

    overlaps: bool
    num_captures: int

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Bytes of the device that it keeps, by what they are."""
        ...

    def prepare(self, max_blocks: int, vocab_size: int) -> None:
        """Called once, before the first launch: no row's block table ever has more blocks, and
        logits are of `vocab_size` ids."""
        ...

    def warm_up(self, program: Program) -> int:
        """Capture ahead what steps would capture when they first need it. Returns how many."""
        ...

    def launch(self, program: Program, inputs: StepInputs[HostArray]) -> Fetch:
        """Start the program on the device; the function returned waits for its result.

        Results must be fetched in the order of their launches, with at most two outstanding.
        """
        ...

    def after_resume(self, *, has_moved: bool) -> int:
        """The memory of KV or weights was given back and is here again, elsewhere if `has_moved`:
        whatever was captured must be made anew then, and be checked otherwise.

        Returns how many graphs are to be made anew.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Everything that differs between devices."""

    device: torch.device
    memory_bytes: int  # all that the device has, or that this process may use of it
    ops: Ops[Any]
    attention: AttentionBackend
    executor: Executor
    memory: MemoryBackend
    create_host_arena: Callable[[], HostArena]
    # Of a model that has no such parts, and of one that cannot be fused: None.
    fuse_decoder: Callable[[DecoderParts | None], FusedDecoder | None] | None = None
    copy_tokens: CopyTokens | None = None  # None: torch copies whole blocks
    # While entered, the device is the one that a thread's launches are for.
    as_current: Callable[[], AbstractContextManager[object]] = nullcontext
    collectives: Collectives = ONE_RANK  # of the ranks that share the model
