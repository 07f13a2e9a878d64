"""ReferenceOps: every operation of `Ops` in plain torch, on any device.

ReferenceOps defines the results, and tests compare all backends with it. TritonOps
(`rollout.backends.cuda.ops`) extends ReferenceOps, and CpuOps (`rollout.backends.cpu.linear_ops`)
extends TorchOps. Both override operations that they compute faster.
`rollout.backends.cpu.torch_sdpa` uses ReferenceOps by default.

Shape letters: T tokens, H query heads, G key/value heads, D head dim, K in features, N out
features, V vocabulary, S sample rows, P scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.base import ExpertWeights, GatedActivation, RepackedWeight
from rollout.backends.forward_batch import RotaryRounding, SamplingBatch
from rollout.backends.fused_decoder import FusedDecoder
from rollout.backends.ops import fingerprint as hasher
from rollout.backends.ops import sampling as sampler
from rollout.backends.ops.fingerprint import Places
from rollout.backends.ops.routed_experts import clamped_swiglu, routed_experts
from rollout.step.output import SampleResult, ScoreResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLinear:
    """Handle of a linear layer whose weight is used as it is stored."""

    weight_NK: Tensor
    bias_N: Tensor | None


class TorchOps:
    """All operations of `Ops` except the matrix products, which subclasses define with their own
    handles."""

    rounds_like_trainers = False

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = False
    ) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, in x's dtype. Computed in
        float32. `rounds_first` also rounds to x's dtype before the product with the weight. Source:
        Zhang and Sennrich 2019, "Root mean square layer normalization", eq. 4."""
        x_f32 = x.float()
        normed = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
        if rounds_first:
            normed = normed.to(x.dtype).float()
        return (normed * weight.float()).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return (x - mean) / sqrt(variance + eps) * weight over the last dim, in x's dtype.
        Computed in float32. Source: Ba et al. 2016, "Layer normalization", eq. 4, without a
        bias."""
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), eps=eps).to(x.dtype)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        rounds_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual). The arguments are not changed."""
        total = x + residual
        return self.rms_norm(total, weight, eps, rounds_first=rounds_first), total

    def rotary(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        rounding: RotaryRounding = "once",
    ) -> tuple[Tensor, Tensor]:
        """Return heads whose pairs (i, i + D/2) are rotated by the token's angles. `cos_TD` and
        `sin_TD` span the whole head dim. Source: Su et al. 2021, "RoFormer", eq. 34, with the pairs
        of GPT-NeoX."""
        if rounding != "once":
            cos_TD, sin_TD = (angles.to(q_THD.dtype) for angles in (cos_TD, sin_TD))
        if rounding == "angles":
            cos_TD, sin_TD = cos_TD.float(), sin_TD.float()
        return _rotate(q_THD, cos_TD, sin_TD), _rotate(k_TGD, cos_TD, sin_TD)

    def linear(self, x_TK: Tensor, handle: Any) -> Tensor:
        """Return x @ weight.T + bias, [T, N]. Subclasses must define this method."""
        raise NotImplementedError

    def linear_float32(self, x_TK: Tensor, handle: Any) -> Tensor:
        """Return `linear` cast to float32."""
        return self.linear(x_TK, handle).float()

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half of the last dim) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(first half of the last dim) * second half, by the tanh approximation. Source:
        Hendrycks and Gimpel 2016, "Gaussian error linear units", sec. 2."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def experts(
        self, x_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """Return each token's weighted sum over its experts, by `routed_experts`."""
        return routed_experts(x_TE, ids_TK, weights_TK, experts, self._gated)

    def _gated(self, activation: GatedActivation, gate_up: Tensor) -> Tensor:
        if activation.kind == "clamped_swiglu":
            return clamped_swiglu(activation, gate_up)
        return self.silu_mul(gate_up) if activation.kind == "silu" else self.gelu_mul(gate_up)

    def sample(self, logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
        """Draw one token per row by inverse CDF, by `sampling.sample`."""
        return sampler.sample(logits_SV, sampling)

    def score(self, logits_PV: Tensor, targets_P: Tensor, top_n: int) -> ScoreResult[Tensor]:
        """Return raw log-probs of the targets and the top-n, by `sampling.score`."""
        return sampler.score(logits_PV, targets_P, top_n)

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
        """Return (hash, number of non-finite values) of x.to(dtype), by `fingerprint`."""
        return hasher.fingerprint(x, dtype, places)

    def copy_with_fingerprint(self, out: Tensor, x: Tensor) -> Tensor:
        """Copy `x` to `out`, and return the fingerprint of `x`. Raises ValueError if shapes or
        dtypes differ."""
        hasher.check_copy(out, x)
        out.copy_(x)
        return self.fingerprint(x, hasher.hashed_dtype(x.dtype))


def _rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    low, high = x_THD.chunk(2, dim=-1)
    cos_low, cos_high = cos_TD.unsqueeze(1).chunk(2, dim=-1)
    sin_low, sin_high = sin_TD.unsqueeze(1).chunk(2, dim=-1)
    rotated = torch.cat((low * cos_low - high * sin_low, high * cos_high + low * sin_high), dim=-1)
    return rotated.to(x_THD.dtype)


class ReferenceOps(TorchOps):
    """`Ops` in plain torch."""

    def prepare_linear(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, may_repack: bool = False
    ) -> DenseLinear:
        """Return a handle that refers to the weight, without a copy."""
        return DenseLinear(weight_NK=weight_NK, bias_N=bias_N)

    def choose_products(
        self,
        handles: Iterable[DenseLinear],
        experts: Iterable[ExpertWeights] = (),
        fused: FusedDecoder | None = None,
    ) -> None:
        """No-op: there is one product."""

    def explain(self) -> str:
        """Return "": there is one product."""
        return ""

    def linear(self, x_TK: Tensor, handle: DenseLinear) -> Tensor:
        """Return x @ weight.T + bias, [T, N]."""
        return F.linear(x_TK, handle.weight_NK, handle.bias_N)

    def stage(
        self, handle: DenseLinear, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]
    ) -> None:
        """Return None: nothing is packed."""

    def refresh(self, handle: DenseLinear, staged: None = None) -> None:
        """No-op: the handle refers to the weight itself."""

    def repacked(self, handle: DenseLinear) -> RepackedWeight | None:
        """Return None: nothing is packed."""
        return None

    def release(self, handle: DenseLinear) -> None:
        """No-op: there is no packed copy."""

    def packed(self, handle: DenseLinear) -> Any:
        """Return None: there is no packed copy."""
        return None

    def unpack(self, packed: Any) -> Tensor:
        """Raise AssertionError: `packed` never returns a copy to unpack."""
        raise AssertionError("no packed copies are made")
