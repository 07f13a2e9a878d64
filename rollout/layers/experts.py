"""MixtureOfExperts: a router that chooses each token's experts, and the experts' weighted sum.

Used by `rollout.models.decoder`, which runs it, by `rollout.models.layout`, `rollout.models.family`
and the families, which make its specs and names, and by `rollout.models.weight_names` and
`rollout.models.causal_lm`, which find its weights. A forward pass writes only the batch's record of
chosen experts.

Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024, "Mixtral of
Experts"; DeepSeek-AI 2024, "DeepSeek-V3", sec. 2.1.2 (sigmoid, correction, groups). Shape letters:
T tokens, N experts, K experts of a token, P groups of M experts, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout.backends.base import Backend, ExpertWeights, GatedActivation
from rollout.backends.forward_batch import ForwardBatch
from rollout.layers.base import BackendLayer, empty_parameter
from rollout.layers.expert_slots import slots_of_experts, slots_of_transposed_stacks
from rollout.layers.linear import Linear
from rollout.layers.mlp import GatedMLP, MlpSpec
from rollout.layers.shard import ALONE, Shard, cut_to
from rollout.layers.weight_slot import WeightAlias, WeightSlot, slot_of

CORRECTION = "e_score_correction_bias"
_BEST_OF_GROUP = 2  # a group's score is the sum of its two best experts
_SMALLEST_SUM = 1e-20  # added to sums of weights: sigmoids may all be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token's experts are chosen and weighted.

    `scores` is "softmax" over all experts, "softmax_chosen" over the chosen experts alone, or
    "sigmoid". `normalizes` says whether a token's weights are scaled to sum 1 before they are
    multiplied by `scale`. `has_correction` says whether a buffer is added to the scores for the
    choice, but not for the weights. Only experts of the best `num_chosen_groups` of `num_groups`
    groups are chosen. `has_bias` says whether the router has a bias. `is_float32` says whether
    logits are computed in float32. With "softmax_chosen", only `has_bias` and `is_float32` of the
    fields after `scores` have an effect.
    """

    num_experts: int
    experts_per_token: int
    scores: str
    normalizes: bool
    scale: float
    has_correction: bool
    num_groups: int
    num_chosen_groups: int
    has_bias: bool
    is_float32: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """Names of a mixture's modules in checkpoints.

    `shared` is the expert that all tokens use. `shared_gate` is the projection whose sigmoid
    multiplies the shared expert's output; None if there is none. `gate`, `up` and `down` are the
    matrices of an expert in saved directories. If `is_transposed`, saved directories have stacks
    instead, as live modules do. The stacks have in features before out features, and gates and ups
    alternate.
    """

    router: str = "gate"
    experts: str = "experts"
    shared: str = "shared_experts"
    shared_gate: str | None = None
    is_correction_of_router: bool = True  # else the correction is a buffer of the whole mixture
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Sizes and variants of a MixtureOfExperts. `moe_index` is the index among the model's
    mixtures. `shared` describes the expert that all tokens use; None if there is none."""

    moe_index: int
    router: RouterSpec
    expert_size: int
    activation: GatedActivation
    has_expert_bias: bool
    shared: MlpSpec | None
    names: MoeNames


class Router(nn.Module):
    """A projection that scores all experts for each token, and chooses the token's experts."""

    def __init__(
        self, hidden_size: int, spec: RouterSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self.weight = empty_parameter(spec.num_experts, hidden_size, dtype=dtype, device=device)
        has_bias, num_experts = spec.has_bias, spec.num_experts
        self.bias = empty_parameter(num_experts, dtype=dtype, device=device) if has_bias else None

    def forward(self, x_TE: Tensor, correction_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ids [T, K] int64 and weights [T, K] float32 of each token's experts.
        `correction_N` is added to the scores for the choice only; None means no correction."""
        spec = self.spec
        logits_TN = self._logits(x_TE)
        if spec.scores == "softmax_chosen":
            best_TK = logits_TN.topk(spec.experts_per_token)
            return best_TK.indices, best_TK.values.softmax(-1)
        scores_TN = logits_TN.softmax(-1) if spec.scores == "softmax" else logits_TN.sigmoid()
        choice_TN = scores_TN if correction_N is None else scores_TN + correction_N
        if spec.num_groups > 1:
            choice_TN = self._in_best_groups(choice_TN)
        weights_TK, ids_TK = choice_TN.topk(spec.experts_per_token)
        if choice_TN is not scores_TN:
            weights_TK = scores_TN.gather(1, ids_TK)
        if spec.normalizes:
            weights_TK /= weights_TK.sum(-1, keepdim=True).add_(_SMALLEST_SUM)
        return ids_TK, weights_TK if spec.scale == 1.0 else weights_TK * spec.scale

    def _logits(self, x_TE: Tensor) -> Tensor:
        if not self.spec.is_float32:
            return F.linear(x_TE, self.weight, self.bias).float()
        bias_N = None if self.bias is None else self.bias.float()
        return F.linear(x_TE.float(), self.weight.float(), bias_N)

    def _in_best_groups(self, choice_TN: Tensor) -> Tensor:
        """Return the scores with -inf outside the best groups. A group's rating is the sum of its
        two best scores."""
        choice_TPM: Tensor = choice_TN.unflatten(1, (self.spec.num_groups, -1))
        ratings_TP = choice_TPM.topk(_BEST_OF_GROUP).values.sum(-1)
        chosen = ratings_TP.topk(self.spec.num_chosen_groups).indices
        is_out_TP = torch.ones_like(ratings_TP, dtype=torch.bool).scatter_(1, chosen, False)
        return choice_TPM.masked_fill(is_out_TP[:, :, None], -torch.inf).flatten(1)


class Experts(nn.Module):
    """The weights of this rank's experts, stacked. Gate and up are one matrix."""

    def __init__(
        self,
        hidden_size: int,
        spec: MoeSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        super().__init__()
        self.num_experts, size = spec.router.num_experts, spec.expert_size
        self.kept = shard.range_of(self.num_experts)
        num_experts = self.kept.length
        self.activation, self.names = spec.activation, spec.names
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (num_experts, 2 * size, hidden_size),
            "down_proj": (num_experts, hidden_size, size),
        }
        if spec.has_expert_bias:
            shapes["gate_up_proj_bias"] = num_experts, 2 * size
            shapes["down_proj_bias"] = num_experts, hidden_size
        for name, shape in shapes.items():
            parameter = empty_parameter(*shape, dtype=dtype, device=device)
            self.register_parameter(name, parameter)

    def slots_and_aliases(self) -> tuple[dict[str, WeightSlot], dict[str, WeightAlias]]:
        """Return slots by the names in saved directories, and aliases by live modules' names."""
        weights, names = self.weights, self.names
        if names.is_transposed:
            stacks = slots_of_transposed_stacks(dict(self.named_parameters()))
            shapes = {name: (self.num_experts, *slot.shape[1:]) for name, slot in stacks.items()}
            return {
                name: slot_of(slot, cut_to([self.kept], shapes[name]))
                for name, slot in stacks.items()
            }, {}
        return slots_of_experts(
            *(weights.gate_up_NGE, weights.down_NEF, self.kept.start, self.num_experts),
            gate=names.gate,
            up=names.up,
            down=names.down,
        )

    def own_ids(self, ids_TK: Tensor) -> Tensor:
        """Return each expert's index in this rank's stacks. An expert of another rank gets the
        number of experts in the stacks."""
        start, length, _ = self.kept
        if length == self.num_experts:
            return ids_TK
        ids_TK = ids_TK - start
        return ids_TK.masked_fill_((ids_TK < 0) | (ids_TK > length), length)

    @property
    def weights(self) -> ExpertWeights:
        """The parameters, as `Ops.experts` takes them."""
        parameters = dict(self.named_parameters())
        return ExpertWeights(
            gate_up_NGE=parameters["gate_up_proj"],
            down_NEF=parameters["down_proj"],
            gate_up_bias_NG=parameters.get("gate_up_proj_bias"),
            down_bias_NE=parameters.get("down_proj_bias"),
            activation=self.activation,
            is_part=self.kept.length < self.num_experts,
        )


class MoeParts(NamedTuple):
    """The submodules of a mixture. Each is also an attribute under its name in checkpoints."""

    router: Router
    experts: Experts
    shared: GatedMLP | None
    shared_gate: Linear | None


class MixtureOfExperts(BackendLayer):
    """Each token's chosen experts, weighted and summed, plus the shared expert of all tokens. Under
    tensor parallelism each rank has the whole router and some experts, and the caller must sum the
    outputs over the ranks."""

    weights: ExpertWeights

    def __init__(
        self,
        hidden_size: int,
        spec: MoeSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        super().__init__()
        self.spec, names = spec, spec.names
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        router = Router(hidden_size, spec.router, **kind)
        experts, shared, shared_gate = Experts(hidden_size, spec, shard=shard, **kind), None, None
        self.add_module(names.router, router)
        self.add_module(names.experts, experts)
        if spec.shared is not None:
            shared = GatedMLP(hidden_size, spec.shared, shard=shard, **kind)
            self.add_module(names.shared, shared)
        if spec.shared is not None and names.shared_gate is not None:
            shared_gate = Linear(hidden_size, {names.shared_gate: 1}, bias=False, **kind)
            self.add_module(names.shared_gate, shared_gate)
        self.parts = MoeParts(router, experts, shared, shared_gate)
        if spec.router.has_correction:
            zeros_N = torch.zeros(spec.router.num_experts, dtype=torch.float32, device=device)
            self._corrected.register_buffer(CORRECTION, zeros_N)

    @property
    def _corrected(self) -> nn.Module:
        """The module under whose name checkpoints keep the correction."""
        return self.parts.router if self.spec.names.is_correction_of_router else self

    def bind(self, backend: Backend) -> None:
        super().bind(backend)
        self.weights = self.parts.experts.weights

    def forward(self, x_TE: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the output, [T, E]. Writes the chosen experts' ids to `batch.routing_TLK` if it is
        not None."""
        router, experts, shared, shared_gate = self.parts
        correction_N = getattr(self._corrected, CORRECTION, None)
        ids_TK, weights_TK = router(x_TE, correction_N)
        if batch.routing_TLK is not None:
            batch.routing_TLK[:, self.spec.moe_index].copy_(ids_TK)
        out_TE = self.ops.experts(x_TE, experts.own_ids(ids_TK), weights_TK, self.weights)
        if shared is None:
            return out_TE
        shared_TE: Tensor = shared(x_TE)
        if shared_gate is not None:
            shared_TE = shared_gate(x_TE).sigmoid() * shared_TE
        return out_TE + shared_TE
