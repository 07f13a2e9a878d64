"""NativeOps: CpuOps with norms, rotary, activation, experts, sampling and hashing in C.

Created by `rollout.backends.cpu.backend`, if there are compiled kernels. Layers' operations support
float32 and bfloat16. silu supports float32 alone. Other dtypes, sizes that are not multiples of 8,
and tensors with unexpected strides use the inherited torch path. Sampling and scoring cast logits
to float32. Shape letters: T tokens, H query heads, G key/value heads, D head dim, V vocabulary, S
sample rows, P scored tokens, N top-n, E hidden size, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rollout.backends.base import ExpertWeights
from rollout.backends.cpu.experts import can_run, run_experts
from rollout.backends.cpu.kernels import TYPES, Kernels, SamplingArgs, ScoringArgs
from rollout.backends.cpu.linear_ops import CpuOps, rule_of_environment
from rollout.backends.cpu.products import BUCKETS, PLAIN, LinearHandle, ProductRule
from rollout.backends.forward_batch import RotaryRounding, SamplingBatch
from rollout.backends.fused_decoder import FusedDecoder
from rollout.backends.ops.fingerprint import EXPONENT_BITS, Places, check_copy, chunks
from rollout.step.output import SampleResult, ScoreResult

_LANES = 8
_HASHED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HASHED_CHUNK = 1 << 20  # values that are cast at once: bounds the memory of casts
_MIN_HASHED_PER_THREAD = 1 << 17
_COPIED_ROW = 1 << 10  # values: threads start at multiples of the kernel's vectors


class NativeOps(CpuOps):
    """`Ops` on CPU with compiled kernels."""

    def __init__(self, kernels: Kernels, rule: ProductRule | None = None) -> None:
        super().__init__(rule_of_environment(kernels) if rule is None else rule)
        self._kernels = kernels

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = False
    ) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dim of [T, D] or [T, H, D]."""
        if not _is_heads(x) or not _is_weight(weight, x) or _rounds(rounds_first, x):
            return super().rms_norm(x, weight, eps, rounds_first=rounds_first)
        out = torch.empty(x.shape, dtype=x.dtype)
        heads = x.shape[1] if x.dim() == 3 else 1
        self._kernels.rms_norm(
            *(out.data_ptr(), x.data_ptr(), weight.data_ptr()),
            *(x.shape[0], heads, x.shape[-1], x.stride(0)),
            *(eps, TYPES[weight.dtype], TYPES[x.dtype]),
        )
        return out

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
        are_rows = _is_rows(x) and _is_rows(residual) and x.dtype == residual.dtype
        if not are_rows or not _is_weight(weight, x) or _rounds(rounds_first, x):
            return super().add_rms_norm(x, residual, weight, eps, rounds_first=rounds_first)
        dim = x.shape[-1]
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._kernels.add_rms_norm(
            *(out.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr()),
            *(weight.data_ptr(), x.numel() // dim, dim),
            *(eps, TYPES[weight.dtype], TYPES[x.dtype]),
        )
        return out, total

    def rotary(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        rounding: RotaryRounding = "once",
    ) -> tuple[Tensor, Tensor]:
        """Return heads whose pairs (i, i + D / 2) are rotated by the token's angles."""
        has_angles = (
            _is_plain(cos_TD) and _is_plain(sin_TD) and cos_TD.shape[-1] % (2 * _LANES) == 0
        )
        are_heads = _is_heads(q_THD) and _is_heads(k_TGD)
        if not (has_angles and are_heads) or _rounds(rounding != "once", q_THD):
            return super().rotary(q_THD, k_TGD, cos_TD, sin_TD, rounding)
        return self._rotate(q_THD, cos_TD, sin_TD), self._rotate(k_TGD, cos_TD, sin_TD)

    def _rotate(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
        self._kernels.rotary(
            *(out_THD.data_ptr(), x_THD.data_ptr(), cos_TD.data_ptr(), sin_TD.data_ptr()),
            *(*x_THD.shape, x_THD.stride(0), TYPES[x_THD.dtype]),
        )
        return out_THD

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return (x - mean) / sqrt(variance + eps) * weight over the last dim."""
        if not _is_rows(x) or not _is_weight(weight, x):
            return super().layer_norm(x, weight, eps)
        out, dim = torch.empty_like(x), x.shape[-1]
        self._kernels.layer_norm(
            *(out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // dim, dim),
            *(eps, TYPES[weight.dtype], TYPES[x.dtype]),
        )
        return out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(first half of the last dim) * second half, by the tanh approximation."""
        if not _is_pair(gate_up):
            return super().gelu_mul(gate_up)
        return _gated(self._kernels.gelu_mul, gate_up, TYPES[gate_up.dtype])

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half of the last dim) * second half."""
        if gate_up.dtype != torch.float32 or not _is_pair(gate_up):
            return super().silu_mul(gate_up)
        return _gated(self._kernels.silu_mul, gate_up)

    def choose_products(
        self,
        handles: Iterable[LinearHandle],
        experts: Iterable[ExpertWeights] = (),
        fused: FusedDecoder | None = None,
    ) -> None:
        """Choose each linear layer's matmul kernels by the rule. Log them and the experts'
        kernels."""
        for weights in filter(can_run, experts):
            names = [self._experts_by(weights, num_tokens) for num_tokens in BUCKETS]
            self._explain(weights.down_NEF, " experts", names)
        super().choose_products(handles, experts, fused)

    def experts(
        self, x_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """Return each token's weighted sum over its experts, as `Ops.experts` does. The rule
        chooses the kernel or torch by the mean number of tokens per expert in use."""
        if not ids_TK.numel() or not can_run(experts):
            return super().experts(x_TE, ids_TK, weights_TK, experts)
        num_in_use = min(ids_TK.numel(), len(experts.down_NEF))
        if self._experts_by(experts, -(-ids_TK.numel() // num_in_use)) == PLAIN.name:
            return super().experts(x_TE, ids_TK, weights_TK, experts)
        return run_experts(self._kernels, x_TE, ids_TK, weights_TK, experts)

    def _experts_by(self, experts: ExpertWeights, num_tokens: int) -> str:
        is_native = self._rule.experts_by_kernel(experts.down_NEF.dtype, num_tokens)
        return "native" if is_native else PLAIN.name

    def sample(self, logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
        """Draw one token per row, with the results of `rollout.backends.ops.sampling`."""
        num_rows, vocabulary = logits_SV.shape
        if not _is_plain(logits_SV):
            logits_SV = logits_SV.float().contiguous()
        result = _empty_result(num_rows, vocabulary, sampling)
        args = SamplingArgs(
            logits=logits_SV.data_ptr(),
            uniforms=sampling.uniforms_S.data_ptr(),
            temperature=sampling.temperature_S.data_ptr(),
            top_k=sampling.top_k_S.data_ptr(),
            top_p=sampling.top_p_S.data_ptr(),
            min_p=sampling.min_p_S.data_ptr(),
            mode=sampling.mode_S.data_ptr(),
            tokens=result.token_ids_S.data_ptr(),
            is_finite=result.is_finite_S.data_ptr(),
            logprobs=_pointer(result.logprobs_S),
            top_ids=_pointer(result.top_ids_SN),
            top_logprobs=_pointer(result.top_logprobs_SN),
            vocabulary=vocabulary,
            top_n=sampling.top_n,
        )
        num_bytes = self._kernels.sampling_scratch_bytes(vocabulary)
        self._kernels.run(self._kernels.sample_rows, args, num_rows, scratch_bytes=num_bytes)
        return result

    def score(self, logits_PV: Tensor, targets_P: Tensor, top_n: int) -> ScoreResult[Tensor]:
        """Return raw log-probs of the targets, and the top-n of each row unless `top_n` is 0."""
        num_rows, vocabulary = logits_PV.shape
        logits_PV, targets_P = logits_PV.float().contiguous(), targets_P.contiguous()
        logprobs_P = torch.empty(num_rows, dtype=torch.float32)
        top_ids_PN, top_logprobs_PN = _empty_top(num_rows, vocabulary, top_n)
        args = ScoringArgs(
            logits=logits_PV.data_ptr(),
            targets=targets_P.data_ptr(),
            logprobs=logprobs_P.data_ptr(),
            top_ids=_pointer(top_ids_PN),
            top_logprobs=_pointer(top_logprobs_PN),
            vocabulary=vocabulary,
            top_n=top_n,
        )
        num_bytes = self._kernels.sampling_scratch_bytes(vocabulary)
        self._kernels.run(self._kernels.score_rows, args, num_rows, scratch_bytes=num_bytes)
        return ScoreResult(
            logprobs_P=logprobs_P, top_ids_PN=top_ids_PN, top_logprobs_PN=top_logprobs_PN
        )

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
        """Return (hash, number of non-finite values) of x.to(dtype), int64 [2]. If a cast is
        needed, it is done in chunks."""
        if x.device.type != "cpu" or dtype not in _HASHED_DTYPES:
            return super().fingerprint(x, dtype, places)
        sums = [torch.zeros(2, dtype=torch.int64)]
        for position, values in chunks(x, dtype, _HASHED_CHUNK):
            self._append_fingerprints(sums, values, position, places or Places(0, x.numel(), 0))
        return torch.stack(sums).sum(0)

    def _append_fingerprints(
        self, sums: list[Tensor], values: Tensor, position: int, places: Places
    ) -> None:
        args = values.data_ptr(), values.itemsize, EXPONENT_BITS[values.dtype], position, *places

        def work(first: int, last: int) -> None:
            part = torch.zeros(2, dtype=torch.int64)
            self._kernels.fingerprint(part.data_ptr(), *args, first, last)
            sums.append(part)

        self._kernels.split(values.numel(), work, _MIN_HASHED_PER_THREAD)

    def copy_with_fingerprint(self, out: Tensor, x: Tensor) -> Tensor:
        """Copy `x` to `out` and return the fingerprint of `x`, in one pass if both are contiguous.
        Raises ValueError if shapes or dtypes differ."""
        are_plain = all(t.device.type == "cpu" and t.is_contiguous() for t in (out, x))
        if not are_plain or x.dtype not in _HASHED_DTYPES:
            return super().copy_with_fingerprint(out, x)
        check_copy(out, x)
        args = out.data_ptr(), x.data_ptr(), x.itemsize, EXPONENT_BITS[x.dtype]
        sums = [torch.zeros(2, dtype=torch.int64)]

        def work(first: int, last: int) -> None:
            part = torch.zeros(2, dtype=torch.int64)
            end = min(last * _COPIED_ROW, x.numel())
            self._kernels.copy_fingerprint(part.data_ptr(), *args, first * _COPIED_ROW, end)
            sums.append(part)

        num_rows = -(-x.numel() // _COPIED_ROW)
        self._kernels.split(num_rows, work, _MIN_HASHED_PER_THREAD // _COPIED_ROW)
        return torch.stack(sums).sum(0)


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


def _is_rows(x: Tensor, lanes: int = _LANES) -> bool:
    return x.dtype in TYPES and x.shape[-1] % lanes == 0 and x.is_contiguous()


def _is_pair(gate_up: Tensor) -> bool:
    return _is_rows(gate_up, 2 * _LANES)


def _is_weight(weight: Tensor, x: Tensor) -> bool:
    """Return whether the kernels support this norm weight: contiguous, in float32 or x's dtype."""
    return weight.dtype in (torch.float32, x.dtype) and weight.is_contiguous()


def _rounds(like_trainers: bool, x: Tensor) -> bool:
    """Return whether intermediate numbers must be rounded, which only the torch path does."""
    return like_trainers and x.dtype != torch.float32


def _gated(kernel: Callable[..., None], gate_up: Tensor, *types: int) -> Tensor:
    """Return the result of `kernel` on both halves of the last dim."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    kernel(out.data_ptr(), gate_up.data_ptr(), out.numel() // size, size, *types)
    return out


def _is_heads(x: Tensor) -> bool:
    """Return whether `x` is [T, D] or [T, H, D] with gaps only between tokens."""
    if x.dtype not in TYPES or x.shape[-1] % _LANES or x.stride(-1) != 1:
        return False
    return x.dim() == 2 or (x.dim() == 3 and x.stride(1) == x.shape[2])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _empty_top(num_rows: int, vocabulary: int, top_n: int) -> tuple[Tensor | None, Tensor | None]:
    assert top_n <= vocabulary, f"top_n={top_n} of {vocabulary}"
    if not top_n:
        return None, None
    ids_N = torch.empty(num_rows, top_n, dtype=torch.int64)
    return ids_N, torch.empty(num_rows, top_n, dtype=torch.float32)


def _empty_result(num_rows: int, vocabulary: int, sampling: SamplingBatch) -> SampleResult[Tensor]:
    top_ids_SN, top_logprobs_SN = _empty_top(num_rows, vocabulary, sampling.top_n)
    return SampleResult(
        token_ids_S=torch.empty(num_rows, dtype=torch.int64),
        is_finite_S=torch.empty(num_rows, dtype=torch.bool),
        logprobs_S=torch.empty(num_rows, dtype=torch.float32) if sampling.any_logprobs else None,
        top_ids_SN=top_ids_SN,
        top_logprobs_SN=top_logprobs_SN,
    )
