"""Mixture-of-experts layers by the compiled CPU kernel, for float32 or bfloat16 weights.

Used by `rollout.backends.cpu.ops`. The kernel computes in float32. A token's result does not depend
on other tokens of the batch or on the number of threads. Shape letters: T tokens, K experts of a
token, A = T * K assignments of a token to an expert, N experts, E hidden size, F expert size, G = 2
F.
"""

from __future__ import annotations

from ctypes import addressof

import torch
from torch import Tensor

from rollout.backends.base import ExpertWeights
from rollout.backends.cpu.kernels import TYPES, ExpertsArgs, Kernels

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}  # enum activation of experts.c
WIDEST = 0  # value of `lanes` for the machine's widest vectors

_ROWS = 8  # rows of a weight matrix that the kernel multiplies at once
_MIN_WEIGHTS_PER_THREAD = 1 << 17


def can_run(experts: ExpertWeights) -> bool:
    """Return whether the kernel supports these weights. The kernel needs contiguous CPU tensors of
    one dtype, float32 or bfloat16, sizes that are multiples of 8, and an activation in
    ACTIVATIONS."""
    dtype = experts.down_NEF.dtype
    _, hidden_size, expert_size = experts.down_NEF.shape
    return (
        dtype in TYPES
        and hidden_size % _ROWS == 0
        and expert_size % _ROWS == 0
        and experts.activation.kind in ACTIVATIONS
        and all(
            t is None or (t.is_cpu and t.dtype == dtype and t.is_contiguous())
            for t in _tensors(experts)
        )
    )


def run_experts(
    kernels: Kernels,
    x_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    *,
    lanes: int = WIDEST,
) -> Tensor:
    """Return each token's weighted sum over its experts, as `Ops.experts` does. `can_run` must
    accept the weights. `lanes` is 8 for vectors of 256 bits, or WIDEST."""
    num_experts, hidden_size, expert_size = experts.down_NEF.shape
    (num_tokens, per_token), num_assignments = ids_TK.shape, ids_TK.numel()
    x_f32_TE, ids_TK = x_TE.float().contiguous(), ids_TK.contiguous()
    weights_TK = weights_TK.float().contiguous()
    out_TE = torch.zeros(num_tokens, hidden_size, dtype=torch.float32)
    places = torch.empty(num_experts + 1 + num_assignments, dtype=torch.int64)
    active_AF = torch.empty(num_assignments, expert_size, dtype=torch.float32)
    args = ExpertsArgs(
        *(out_TE.data_ptr(), x_f32_TE.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr()),
        *(None if tensor is None else tensor.data_ptr() for tensor in _tensors(experts)),
        *(places.data_ptr(), places.data_ptr() + 8 * (num_experts + 1), active_AF.data_ptr()),
        *(num_tokens, per_token, num_experts, hidden_size, expert_size),
        *(TYPES[experts.down_NEF.dtype], lanes, ACTIVATIONS[experts.activation.kind]),
        *(experts.activation.alpha, experts.activation.limit),
    )
    kernels.sort_experts(addressof(args))
    num_in_use = max(1, min(num_experts, num_assignments))
    for part, num_rows, row_size in (
        (kernels.experts_gate_up_part, expert_size, 2 * hidden_size),
        (kernels.experts_down_part, hidden_size, expert_size),
    ):
        smallest = _MIN_WEIGHTS_PER_THREAD // (_ROWS * row_size * num_in_use) + 1
        kernels.run(part, args, num_rows // _ROWS, smallest=smallest)
    return out_TE.to(x_TE.dtype)


def _tensors(experts: ExpertWeights) -> tuple[Tensor | None, ...]:
    """Return weights and biases in the order of `ExpertsArgs`."""
    return experts.gate_up_NGE, experts.down_NEF, experts.gate_up_bias_NG, experts.down_bias_NE
