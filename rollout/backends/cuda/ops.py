"""TritonOps: ReferenceOps with norms, activation, sampling, scoring and hashing in Triton.

Created by `rollout.backends.cuda.backend` as the operations of the CUDA backend. Products are
torch's (cuBLAS). Rotation is inherited, because `rollout.backends.cuda.append` rotates in its own
kernel. Shape letters: P scored tokens, S sample rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.backends.cuda import fingerprint as triton_fingerprint
from rollout.backends.cuda import layers as triton_layers
from rollout.backends.cuda import sampling as triton_sampling
from rollout.backends.forward_batch import SamplingBatch
from rollout.backends.ops.fingerprint import Places
from rollout.backends.ops.float32_product import float32_product
from rollout.backends.ops.reference import DenseLinear, ReferenceOps
from rollout.step.output import SampleResult, ScoreResult


class TritonOps(ReferenceOps):
    """`Ops` on a GPU. Sampling and scoring without top-n do not make the host wait."""

    rounds_like_trainers = True

    def linear_float32(self, x_TK: Tensor, handle: DenseLinear) -> Tensor:
        """Return x @ weight.T + bias, float32 [T, N], by `float32_product`."""
        return float32_product(x_TK, handle.weight_NK, handle.bias_N)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = False
    ) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dim of [T, D] or [T, H, D]."""
        return triton_layers.rms_norm(x, weight, eps, rounds_first=rounds_first)

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
        return triton_layers.add_rms_norm(x, residual, weight, eps, rounds_first=rounds_first)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half of the last dim) * second half."""
        return triton_layers.silu_mul(gate_up)

    def sample(self, logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
        """Draw one token per row. A batch with top-n is sampled in torch."""
        if sampling.top_n:
            return super().sample(logits_SV, sampling)
        return triton_sampling.sample(logits_SV, sampling)

    def score(self, logits_PV: Tensor, targets_P: Tensor, top_n: int) -> ScoreResult[Tensor]:
        """Return raw log-probs of the targets. If top-n is asked for, everything is computed in
        torch."""
        if top_n:
            return super().score(logits_PV, targets_P, top_n)
        return ScoreResult(logprobs_P=triton_sampling.score(logits_PV, targets_P))

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
        """Return (hash, number of non-finite values) of x.to(dtype). A tensor on the host is copied
        to the GPU first, if there is one. The result is then on the GPU."""
        if not x.is_cuda and torch.cuda.is_available():
            x = x.to("cuda")  # faster than hashing on the host
        if not triton_fingerprint.can_fingerprint(x, dtype):
            return super().fingerprint(x, dtype, places)
        return triton_fingerprint.fingerprint(x, dtype, places)
