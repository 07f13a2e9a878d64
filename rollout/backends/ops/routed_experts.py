"""A mixture's experts in torch: tokens sorted by expert, one product for each expert's tokens.

Used by TorchOps in `rollout.backends.ops.reference`. Shape letters: T tokens, K experts of a token,
A = T * K assignments of a token to an expert, N experts, E hidden size, F expert size, G = 2 F.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.base import ExpertWeights, GatedActivation

# product(x_AE, weight_NFE, bias_NF) multiplies each row by its expert's weight, [A, F].
Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
TOKENS_AT_ONCE = 1024  # bounds the memory of assignments at little cost in time
_GROUP_ALIGNMENT = 16  # bytes between rows that torch's grouped product asks for


def routed_experts(
    x_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    gate: Callable[[GatedActivation, Tensor], Tensor],
) -> Tensor:
    """Return each token's weighted sum over its experts, [T, E], as `Ops.experts` does.

    `gate` is the activation between the two products. If `can_group` returns True, torch's grouped
    product is used, and the host does not wait. Otherwise a loop runs over the experts in use, or
    over all experts while a CUDA graph is captured.
    """
    if can_group(x_TE, experts):
        return _sum(x_TE, ids_TK, weights_TK, experts, grouped, gate)
    if x_TE.is_cuda and torch.cuda.is_current_stream_capturing():
        return every_expert(x_TE, ids_TK, weights_TK, experts, gate)
    parts = (part_TX.split(TOKENS_AT_ONCE) for part_TX in (x_TE, ids_TK, weights_TK))
    sums = [_sum(x, ids, w, experts, looped, gate) for x, ids, w in zip(*parts, strict=True)]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def every_expert(
    x_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    gate: Callable[[GatedActivation, Tensor], Tensor],
) -> Tensor:
    """Return the same as `routed_experts`, but compute all experts for all tokens, so that the host
    need not know the ids."""
    out_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    num_experts = len(experts.down_NEF)
    weights_TN = out_TE.new_zeros(len(x_TE), num_experts + experts.is_part)
    weights_TN.scatter_(1, ids_TK, weights_TK)
    for expert, weight_T1 in enumerate(weights_TN[:, :num_experts, None].unbind(1)):
        biases = [experts.gate_up_bias_NG, experts.down_bias_NE]
        gate_up_bias_G, down_bias_E = (None if bias is None else bias[expert] for bias in biases)
        gate_up_TG = F.linear(x_TE, experts.gate_up_NGE[expert], gate_up_bias_G)
        hidden_TF = gate(experts.activation, gate_up_TG)
        own_TE = F.linear(hidden_TF, experts.down_NEF[expert], down_bias_E).float()
        # Experts that were not chosen may overflow, and 0 times infinity is NaN.
        out_TE += torch.where(weight_T1 == 0, 0.0, weight_T1 * own_TE)
    return out_TE.to(x_TE.dtype)


def can_group(x_TE: Tensor, experts: ExpertWeights) -> bool:
    """Return whether torch's grouped product has a fast kernel: on CUDA, in bfloat16, with aligned
    rows."""
    rows = experts.gate_up_NGE.stride(1), experts.down_NEF.stride(1), x_TE.shape[1]
    is_aligned = all(row * x_TE.itemsize % _GROUP_ALIGNMENT == 0 for row in rows)
    return x_TE.is_cuda and x_TE.dtype == torch.bfloat16 and is_aligned


def clamped_swiglu(activation: GatedActivation, gate_up: Tensor) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of clamped values. Source: GPT-OSS."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)


def _sum(
    x_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    product_of: Callable[[Tensor, int], Product],
    gate: Callable[[GatedActivation, Tensor], Tensor],
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, [T, E]. `product_of(ids_A, N)`
    returns the Product for sorted ids."""
    ids_A, order_A = ids_TK.flatten().sort(stable=True)
    product = product_of(ids_A, len(experts.down_NEF))
    x_AE = x_TE.index_select(0, order_A // ids_TK.shape[1])
    gate_up_AG = product(x_AE, experts.gate_up_NGE, experts.gate_up_bias_NG)
    hidden_AF = gate(experts.activation, gate_up_AG)
    sorted_AE = product(hidden_AF, experts.down_NEF, experts.down_bias_NE)
    out_AE = torch.empty_like(sorted_AE, dtype=torch.float32)
    out_AE[order_A] = sorted_AE.float()
    if experts.is_part:
        # The rows of other ranks' experts are undefined, and 0 times infinity is NaN.
        out_AE.masked_fill_((ids_TK == len(experts.down_NEF)).reshape(-1, 1), 0.0)
    out_TKE = out_AE.view(*ids_TK.shape, x_TE.shape[1])
    return out_TKE.mul_(weights_TK[:, :, None]).sum(1).to(x_TE.dtype)


def looped(ids_A: Tensor, num_experts: int) -> Product:
    """Return a Product that loops over the experts in `ids_A`, which are sorted. The host waits for
    the ids."""
    ids, counts = (x.tolist() for x in torch.unique_consecutive(ids_A, return_counts=True))

    def product(x_AE: Tensor, weight_NFE: Tensor, bias_NF: Tensor | None) -> Tensor:
        out_AF = x_AE.new_empty(len(x_AE), weight_NFE.shape[1])
        for expert, rows, out in zip(ids, x_AE.split(counts), out_AF.split(counts), strict=True):
            if expert == num_experts:
                out.zero_()  # another rank's expert
            elif bias_NF is None:
                torch.mm(rows, weight_NFE[expert].t(), out=out)
            else:
                torch.addmm(bias_NF[expert], rows, weight_NFE[expert].t(), out=out)
        return out_AF

    return product


def grouped(ids_A: Tensor, num_experts: int) -> Product:
    """Return a Product that is one launch for all experts, which a graph can capture. `ids_A` are
    sorted."""
    experts_N = torch.arange(num_experts, device=ids_A.device)
    ends_N = torch.searchsorted(ids_A, experts_N, right=True, out_int32=True)

    def product(x_AE: Tensor, weight_NFE: Tensor, bias_NF: Tensor | None) -> Tensor:
        out_AF: Tensor = F.grouped_mm(x_AE, weight_NFE.transpose(-2, -1), offs=ends_N)
        if bias_NF is None:
            return out_AF
        return out_AF + bias_NF.index_select(0, ids_A.clamp(max=num_experts - 1))

    return product
