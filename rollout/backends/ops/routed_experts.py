"""A mixture's experts in torch: tokens sorted by expert, one product for each expert's tokens.

Shape letters: T tokens, K experts of a token, A = T * K assignments of a token to an expert, N
experts, E hidden size, F expert size, G = 2 F.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.base import ExpertWeights, GatedActivation

TOKENS_AT_ONCE = 1024  # of the loop: bounds the memory of assignments at little cost in time
_GROUP_ALIGNMENT = 16  # bytes between rows that torch's grouped product asks for


def routed_experts(
    x_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    gate: Callable[[GatedActivation, Tensor], Tensor],
) -> Tensor:
    """Each token's weighted sum over its experts, [T, E]; see `Ops.experts`.

    `gate` is the activation between the two products. On a GPU torch's grouped product, for which
    the host does not wait; elsewhere, and where that has no kernel, a loop over the experts in use.
    """
    if can_group(x_TE, experts):
        return _sum(x_TE, ids_TK, weights_TK, experts, _grouped, gate)
    parts = (part_TX.split(TOKENS_AT_ONCE) for part_TX in (x_TE, ids_TK, weights_TK))
    sums = [_sum(x, ids, w, experts, _looped, gate) for x, ids, w in zip(*parts, strict=True)]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def can_group(x_TE: Tensor, experts: ExpertWeights) -> bool:
    """Whether torch's grouped product has a kernel for these. On a CPU it is a loop as well."""
    rows = experts.gate_up_NGE.stride(1), experts.down_NEF.stride(1), x_TE.shape[1]
    is_aligned = all(row * x_TE.itemsize % _GROUP_ALIGNMENT == 0 for row in rows)
    return x_TE.is_cuda and x_TE.dtype == torch.bfloat16 and is_aligned


def clamped_swiglu(activation: GatedActivation, gate_up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of values clamped to `limit`: GPT-OSS's release."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)


def _sum(
    x_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    gate: Callable[[GatedActivation, Tensor], Tensor],
) -> Tensor:
    """The experts' weighted sum; `product(x_AE, ids_A, weight_NFE, bias_NF)` of rows in the order
    of their experts.
    """
    num_experts_per_token = ids_TK.shape[1]
    ids_A, order_A = ids_TK.flatten().sort(stable=True)
    x_AE = x_TE.index_select(0, order_A // num_experts_per_token)
    gate_up_AG = product(x_AE, ids_A, experts.gate_up_NGE, experts.gate_up_bias_NG)
    hidden_AF = gate(experts.activation, gate_up_AG)
    sorted_AE = product(hidden_AF, ids_A, experts.down_NEF, experts.down_bias_NE)
    out_AE = torch.empty_like(sorted_AE, dtype=torch.float32)
    out_AE[order_A] = sorted_AE.float()
    out_TKE = out_AE.view(*ids_TK.shape, x_TE.shape[1])
    return out_TKE.mul_(weights_TK[:, :, None]).sum(1).to(x_TE.dtype)


def _looped(x_AE: Tensor, ids_A: Tensor, weight_NFE: Tensor, bias_NF: Tensor | None) -> Tensor:
    """One product for each expert in use. The host waits for the ids."""
    out_AF = x_AE.new_empty(len(x_AE), weight_NFE.shape[1])
    ids, counts = torch.unique_consecutive(ids_A, return_counts=True)
    start = 0
    for expert, count in zip(ids.tolist(), counts.tolist(), strict=True):
        end = start + count
        bias_F = None if bias_NF is None else bias_NF[expert]
        out_AF[start:end] = F.linear(x_AE[start:end], weight_NFE[expert], bias_F)
        start = end
    return out_AF


def _grouped(x_AE: Tensor, ids_A: Tensor, weight_NFE: Tensor, bias_NF: Tensor | None) -> Tensor:
    """One launch for all experts, which a graph can capture."""
    experts_N = torch.arange(len(weight_NFE), device=ids_A.device)
    ends_N = torch.searchsorted(ids_A, experts_N, right=True, out_int32=True)
    out_AF: Tensor = F.grouped_mm(x_AE, weight_NFE.transpose(-2, -1), offs=ends_N)
    return out_AF if bias_NF is None else out_AF + bias_NF.index_select(0, ids_A)
