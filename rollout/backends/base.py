"""The protocols that every device implements, and Backend, which bundles them for one device.

`rollout.backends.select` creates a Backend. `rollout.worker`, `rollout.layers`, `rollout.models`
and `rollout.weights` call it, and `rollout.engine.build` keeps it. Implementations are in cpu/,
cuda/, ops/ and executors/ of this package.

Shape letters: T tokens, H query heads, G key/value heads, D head dim, K in features, N out
features, V vocabulary, S sample rows, P scored tokens. Of a mixture of experts: N experts, K
experts of a token, E hidden size, F expert size.
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

Handle = TypeVar("Handle")  # an implementation's own object for a linear layer's weight


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Sizes of a model's KV cache: one K and one V vector per token, layer and KV head. If
    `value_dim` is given, the cache holds K alone. V is then the first `value_dim` dims of K, as in
    latent attention."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    value_dim: int | None = None


class RepackedWeight(Protocol):
    """A weight, [N, K], whose own memory holds it in packed order, so that no plain copy exists."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def address(self, row: int) -> int:
        """Return the address of the row's first number; 0 while the memory is released."""
        ...

    def read(self, start: int, end: int) -> Tensor:
        """Return a copy of rows [start, end)."""
        ...

    def write(self, values_RK: Tensor, start: int = 0) -> None:
        """Replace the rows from `start` on by `values_RK`, cast to the weight's dtype."""
        ...

    def gather(self, rows_T: Tensor) -> Tensor:
        """Return a copy of the rows with indices `rows_T`, [T, K]."""
        ...

    def undo(self, staged: Any) -> None:
        """Restore the values from before `Ops.refresh(staged)`. No-op if that refresh did not
        run."""
        ...

    def unpack(self) -> None:
        """Rewrite the memory in plain row order, and restore the tensor's shape [N, K]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivation:
    """The function of gate and up in a gated feed-forward network. `kind` "silu" and "gelu_tanh"
    multiply act(gate) by up. `kind` "clamped_swiglu" is (up + 1) * gate * sigmoid(alpha * gate),
    with gate clamped to at most `limit` and up to ±`limit`."""

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The gated feed-forward networks of a layer's N experts. The G = 2 F rows are all gates, then
    all ups. If `is_part`, this rank has only a part of the experts, and id N means an expert of
    another rank."""

    gate_up_NGE: Tensor
    down_NEF: Tensor
    gate_up_bias_NG: Tensor | None = None
    down_bias_NE: Tensor | None = None
    activation: GatedActivation = GatedActivation()
    is_part: bool = False


class Ops(Protocol[Handle]):
    """Device operations used by the layers, the sampler and weight updates.

    If `rounds_like_trainers`, norms and the rotary embedding are rounded where the modules of the
    family's trainers round (docs/kernels.md). Otherwise they are rounded once, at the end. In
    float32 there is no difference.
    """

    rounds_like_trainers: bool

    def prepare_linear(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, may_repack: bool = False
    ) -> Handle:
        """Return a handle of this weight for `linear`. Packs nothing. `may_repack` allows
        `choose_products` to repack the weight in its memory (see `repacked`)."""
        ...

    def choose_products(
        self,
        handles: Iterable[Handle],
        experts: Iterable[ExpertWeights] = (),
        fused: FusedDecoder | None = None,
    ) -> None:
        """Choose the matrix product that `linear` uses for each of a model's handles.

        Handles can then hold packed copies of their weights, which `refresh` updates. Calling this
        is optional, and a choice never changes afterwards. `experts` has all mixtures of the model.
        The log and `explain` report their product. `fused` is the model's fused decoder; None if it
        has none. The log reports which steps it runs.
        """
        ...

    def explain(self) -> str:
        """Describe the chosen products, one line for each shape; "" if there was no choice to
        make."""
        ...

    def linear(self, x_TK: Tensor, handle: Handle) -> Tensor:
        """Return x @ weight.T + bias, [T, N]."""
        ...

    def linear_float32(self, x_TK: Tensor, handle: Handle) -> Tensor:
        """Return `linear` in float32, without rounding to x's dtype if the device can avoid it."""
        ...

    def stage(
        self, handle: Handle, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]
    ) -> Any:
        """Pack new values, the rows of `parts` in order. Return the packed values for `refresh`.
        The handle does not change, so the old weight stays in use. `stage` is the slow part of an
        update. `allocate` returns the given number of bytes, for a repacked weight's copy."""
        ...

    def refresh(self, handle: Handle, staged: Any = None) -> None:
        """Update the handle to its weight's new values. `staged` is the result of `stage` for these
        values. If it is None, the weight is packed now. The caller must have written the values to
        the weight before. A repacked weight instead swaps its values with `staged`."""
        ...

    def repacked(self, handle: Handle) -> RepackedWeight | None:
        """Return access to the handle's weight if it is repacked in its memory; else None."""
        ...

    def release(self, handle: Handle) -> None:
        """Drop the handle's packed copies. `refresh` makes them again."""
        ...

    def packed(self, handle: Handle) -> Any:
        """Return the handle's packed copy, whose values never change, for a later `refresh`.
        Returns None if nothing is packed, or if `unpack` could not restore the weight's exact
        bytes."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """Return the weight, [N, K], from its packed copy."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = False
    ) -> Tensor:
        """Return the root-mean-square norm over the last dim, computed in float32. `rounds_first`
        also rounds to x's dtype before the product with the weight."""
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
        """Return (rms_norm(x + residual), x + residual)."""
        ...

    def rotary(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        rounding: RotaryRounding = "once",
    ) -> tuple[Tensor, Tensor]:
        """Return rotated query and key heads, in the half-split layout of GPT-NeoX."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return (x - mean) / sqrt(variance + eps) * weight over the last dim, computed in
        float32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half of the last dim) * second half."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(first half of the last dim) * second half, by the tanh approximation."""
        ...

    def experts(
        self, x_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, [T, E] in x's dtype. The sum is
        in float32. `ids_TK` has the experts, int64, and `weights_TK` their weights, float32. Id N,
        which is legal if `experts.is_part`, adds nothing."""
        ...

    def sample(self, logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
        """Draw one token per row. The result has log-probs and top-n if the flags of `sampling` ask
        for them, but no ranks."""
        ...

    def score(self, logits_PV: Tensor, targets_P: Tensor, top_n: int) -> ScoreResult[Tensor]:
        """Return raw log-probs of the targets, and the top-n of each row unless `top_n` is 0. The
        result has no ranks."""
        ...

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
        """Return the fingerprint of x.to(dtype), int64 [2]. `rollout.backends.ops.fingerprint`
        defines it.

        The two numbers are a 64-bit hash of values and places, and the number of non-finite values.
        Equal bits give equal fingerprints on every device. `x` can be on any device. The result is
        there or on the backend's device, and the host need not wait for it. `places` has the
        positions of x's elements in a larger tensor; None if `x` is a whole tensor.
        """
        ...

    def copy_with_fingerprint(self, out: Tensor, x: Tensor) -> Tensor:
        """Copy `x` to `out` and return its fingerprint in `hashed_dtype(x.dtype)`. The tensors can
        be on any devices. Raises ValueError if shapes or dtypes differ."""
        ...


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache. Also defines the cache's layout within a block."""

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache tensor, K and V together. Dim 0 counts blocks. Each
        block of the tensor is contiguous, but there can be gaps between blocks. Raises ConfigError
        for heads that the backend does not support."""
        ...

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with its `plan` set, for the layers' calls of `attend`. Called once per
        forward pass. The plan has the values that all layers share."""
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
        """Norm and rotate Q and K as `rotation` says, write K and V to the cache, and attend
        causally as `traits` say. Return [T, H, D].

        `batch` is the result of `begin`. K and V are written to the slots `batch.slots_T` of
        `batch.kv[layer]`. Q, K and V can be views of one projection, so only their last dim must
        have stride 1. If the cache holds K alone, only the shape of V is used, [T, G, value_dim],
        and the result has `value_dim` dims per head.
        """
        ...


class BackendExecutor(Protocol):
    """Runs a step's program on the device, eagerly or by replaying a captured graph. `overlaps`
    says whether `launch` returns while the device still works, so that the host can prepare the
    next step. `num_captures` is the number of graphs captured so far."""

    overlaps: bool
    num_captures: int

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Device memory that the executor keeps, in bytes by purpose ("inputs", "graphs")."""
        ...

    def prepare(self, max_blocks: int, vocab_size: int) -> None:
        """Reserve memory. Called once, before the first launch. `max_blocks` is the length of the
        longest block table. `vocab_size` is the number of logits of a row."""
        ...

    def warm_up(self, program: Program) -> int:
        """Capture now the graphs that steps would capture at first use. Return their number."""
        ...

    def launch(self, program: Program, inputs: StepInputs[HostArray]) -> Fetch:
        """Start the program on the device and return a function that waits for its result. Results
        must be fetched in the order of their launches. At most two launches may be unfetched."""
        ...

    def after_resume(self, *, has_moved: bool) -> int:
        """Drop or check captured graphs after memory of KV or weights was released and restored.
        All graphs are dropped if the memory `has_moved` to other addresses. Otherwise the next step
        checks one graph. Returns the number of graphs dropped now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Everything that differs between devices. Immutable, but its parts hold the device's state."""

    device: torch.device
    memory_bytes: int  # the device's memory, or the part that this process may use
    ops: Ops[Any]
    attention: AttentionBackend
    executor: BackendExecutor
    memory: MemoryBackend
    create_host_arena: Callable[[], HostArena]
    # None if the device has no fused decoder. Takes None for a model without DecoderParts, and
    # returns None if it cannot fuse the model.
    fuse_decoder: Callable[[DecoderParts | None], FusedDecoder | None] | None = None
    copy_tokens: CopyTokens | None = None  # None: torch copies whole blocks
    # Returns a context manager that makes this device current in the thread.
    as_current: Callable[[], AbstractContextManager[object]] = nullcontext
    collectives: Collectives = ONE_RANK  # between the ranks that share the model
