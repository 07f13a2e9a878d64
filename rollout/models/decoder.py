"""Decoder: token embedding, layers of residual branches and final norm, common to all families.

`rollout.models.causal_lm` builds and calls the Decoder, and passes its `parts` to a fused decoder.
`rollout.models.weight_names` imports Embedding. Attributes are named as in Hugging Face
checkpoints, because module paths give the names of weights. Shape letters: T tokens, L kept tokens,
E hidden size, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from rollout.backends.base import RepackedWeight
from rollout.backends.forward_batch import ForwardBatch
from rollout.backends.fused_decoder import DecoderLayerParts, DecoderParts, DecoderShare
from rollout.layers.attention import Angles, Attention, AttentionLayer, AttentionSpec
from rollout.layers.base import BackendLayer
from rollout.layers.experts import MixtureOfExperts, MoeSpec
from rollout.layers.latent_attention import LatentAttention, LatentAttentionSpec
from rollout.layers.mlp import GatedMLP
from rollout.layers.norm import LayerNorm, RMSNorm
from rollout.layers.shard import cut_to
from rollout.layers.weight_slot import RowsSlot, WeightSlot
from rollout.models.family import BranchNames
from rollout.models.layout import BranchSpec, MixerSpec, layers_of
from rollout.models.spec import ModelSpec

Norm: TypeAlias = RMSNorm | LayerNorm
Mixer: TypeAlias = Attention | LatentAttention | GatedMLP | MixtureOfExperts


class Embedding(BackendLayer):
    """One learned vector per token id, times a multiplier in the dtype of the weights. Under tensor
    parallelism each rank keeps the vectors of a range of ids."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        shape = (spec.vocab_size, spec.hidden_size)
        self.kept = spec.shard.range_of(spec.vocab_size)
        self.weight = self.parameter_of(
            "weight", shape, cut_to([self.kept], shape), dtype=spec.dtype, device=device
        )
        self.multiplier = torch.tensor(spec.embedding_multiplier, dtype=spec.dtype).item()
        self.is_part = spec.shard.size > 1
        self.repacked: RepackedWeight | None = None  # set if the tied head has repacked the weight

    def forward(self, token_ids_T: Tensor) -> Tensor:
        x_TE = self._of_all(token_ids_T) if self.is_part else self._vectors(token_ids_T)
        return x_TE if self.multiplier == 1.0 else x_TE * self.multiplier

    def _vectors(self, rows_T: Tensor) -> Tensor:
        if self.repacked is not None:
            return self.repacked.gather(rows_T)
        return nn.functional.embedding(rows_T, self.weight)

    def _of_all(self, token_ids_T: Tensor) -> Tensor:
        """Return the vectors of all token ids, including ids of other ranks. A collective."""
        # Each rank uses zeros for ids that it lacks, and the ranks sum.
        rows_T = token_ids_T - self.kept.start
        is_absent_T1 = ((rows_T < 0) | (rows_T >= self.kept.length)).unsqueeze(1)
        x_TE = self._vectors(rows_T.clamp(0, self.kept.length - 1))
        return self.collectives.all_reduce_(x_TE.masked_fill(is_absent_T1, 0.0))

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the slot of this rank's rows under the name "weight"."""
        return {"weight": RowsSlot(self, 0, self.kept.length)}


class Branch(NamedTuple):
    """A residual branch of a layer. Its modules are also attributes of the layer. `sums` says what
    tensor-parallel ranks sum after the mixer. "own" means the mixer's output. "total" means the
    outputs of this branch and of the branch before. None means that the next branch sums both."""

    norm_before: Norm | None
    mixer: Mixer
    norm_after: Norm | None
    is_parallel: bool
    sums: str | None


class DecoderLayer(BackendLayer):
    """Residual branches in sequence, each with one mixer (attention, MLP or experts).

    A layer takes and returns the residual stream as two tensors. `delta` is the last branch's
    output, which is not yet added to `residual`. The next norm adds and norms in one pass.
    `residual` is None before the first layer.
    """

    def __init__(
        self, spec: ModelSpec, index: int, branches: Sequence[BranchSpec], device: torch.device
    ) -> None:
        super().__init__()
        self.multiplier = spec.residual_multiplier
        self.is_part = spec.shard.size > 1
        all_sums = _sums_of([branch.names for branch in branches])
        self.branches = [
            self._add(spec, index, branch, sums, device)
            for branch, sums in zip(branches, all_sums, strict=True)
        ]

    def _add(
        self,
        spec: ModelSpec,
        index: int,
        branch: BranchSpec,
        sums: str | None,
        device: torch.device,
    ) -> Branch:
        """Return the branch. Add its modules to this layer under the checkpoint's names."""
        names = branch.names
        mixer = make_mixer(spec, index, branch.mixer, device)
        norms: list[Norm | None] = []
        for name in (names.norm_before, names.norm_after):
            norms.append(None if name is None else make_norm(spec, device))
            if name is not None:
                self.add_module(name, norms[-1])
        self.add_module(names.mixer, mixer)
        return Branch(norms[0], mixer, norms[1], names.is_parallel, sums)

    def forward(
        self,
        delta_TE: Tensor,
        residual_TE: Tensor | None,
        angles: Angles,
        batch: ForwardBatch,
        kept_L: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `(delta, residual)` after this layer, for all tokens or only for the tokens
        `kept_L`. The attention writes the KV cache for all tokens in both cases."""
        x_TE = delta_TE
        for norm_before, mixer, norm_after, is_parallel, sums in self.branches:
            if not is_parallel:
                x_TE, residual_TE = _enter(norm_before, delta_TE, residual_TE)
            assert residual_TE is not None
            if isinstance(mixer, AttentionLayer):
                out_TE = mixer(x_TE, angles, batch, kept_L)
                if kept_L is not None:
                    x_TE = x_TE.index_select(0, kept_L)
                    residual_TE = residual_TE.index_select(0, kept_L)
            elif isinstance(mixer, MixtureOfExperts):
                out_TE = mixer(x_TE, batch)
            else:
                out_TE = mixer(x_TE)
            if self.is_part and sums == "own":
                self.collectives.all_reduce_(out_TE)
            if norm_after is not None:
                out_TE = norm_after(out_TE)
            if self.multiplier != 1.0:
                out_TE = out_TE * self.multiplier
            delta_TE = delta_TE + out_TE if is_parallel else out_TE
            if self.is_part and sums == "total":
                self.collectives.all_reduce_(delta_TE)
        assert residual_TE is not None
        return delta_TE, residual_TE

    def parts(self) -> DecoderLayerParts | None:
        """Return this layer's weights for a fused decoder. Returns None unless the layer is a
        grouped-query attention followed by a gated MLP."""
        if len(self.branches) != 2:
            return None
        first, second = self.branches
        attention, mlp = first.mixer, second.mixer
        if not (isinstance(attention, Attention) and isinstance(mlp, GatedMLP)):
            return None
        return DecoderLayerParts(
            attention_norms_E=(_weight(first.norm_before), _weight(first.norm_after)),
            mlp_norms_E=(_weight(second.norm_before), _weight(second.norm_after)),
            head_norms=(_weight(attention.q_norm), _weight(attention.k_norm)),
            has_whole_norms=attention.spec.has_projection_norms,
            rope=attention.spec.rope_index,
            order_D=attention.order_D,
            traits=attention.traits,
            is_parallel=second.is_parallel,
            qkv=attention.qkv.handle,
            output=attention.output.handle,
            gate_up=mlp.gate_up.handle,
            down=mlp.down.handle,
        )


class Decoder(nn.Module):
    """Embedding, layers and final norm: turns token ids into hidden states."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec, device)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, index, branches, device)
            for index, branches in enumerate(layers_of(spec))
        )
        self.norm = make_norm(spec, device)

    def forward(self, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of `batch.logit_indices_L` after the final norm, [L, E]."""
        delta_TE, residual_TE = self.embed_tokens(batch.token_ids_T), None
        *layers, last_layer = self.layers
        for layer in layers:
            delta_TE, residual_TE = layer(delta_TE, residual_TE, angles, batch)
        kept_L = batch.logit_indices_L
        # The last layer drops other tokens after its attention, unless their experts are recorded.
        if batch.routing_TLK is None:
            delta_LE, residual_LE = last_layer(delta_TE, residual_TE, angles, batch, kept_L)
        else:
            stream = last_layer(delta_TE, residual_TE, angles, batch)
            delta_LE, residual_LE = (x_TE.index_select(0, kept_L) for x_TE in stream)
        return self.norm.add(delta_LE, residual_LE)[0]

    def parts(self) -> DecoderParts | None:
        """Return all weights and constants for a fused decoder, or None if a layer's `parts` is
        None. The layers must be bound to a backend."""
        layers = [layer.parts() for layer in self.layers if isinstance(layer, DecoderLayer)]
        parts = [layer for layer in layers if layer is not None]
        spec = self.spec
        if len(parts) < len(layers):
            return None
        return DecoderParts(
            embedding=self.embed_tokens.weight,
            layers=parts,
            final_norm_E=self.norm.weight,
            is_layer_norm=spec.norm == "layer",
            norm_offset=spec.norm_offset,
            is_gelu=spec.activation == "gelu_tanh",
            embedding_multiplier=self.embed_tokens.multiplier,
            residual_multiplier=spec.residual_multiplier,
            query_growth=spec.rope.query_growth,
            growth_positions=spec.rope.original_max_positions,
            eps=spec.rms_norm_eps,
            num_heads=spec.num_kept_heads,
            num_kv_heads=spec.num_kept_kv_heads,
            head_dim=spec.head_dim,
            share=self._share() if spec.shard.size > 1 else None,
        )

    def _share(self) -> DecoderShare:
        """Return this rank's range of token ids and the sizes of whole projections, for `parts`."""
        spec, ids = self.spec, self.embed_tokens.kept
        return DecoderShare(
            collectives=self.embed_tokens.collectives,
            first_id=ids.start,
            num_ids=ids.length,
            q_size=spec.num_heads * spec.head_dim,
            k_size=spec.num_kv_heads * spec.head_dim,
            counts_k=spec.shard.kv_heads_of(spec.num_kv_heads).is_counted,
        )


def make_mixer(spec: ModelSpec, layer_index: int, mixer: MixerSpec, device: torch.device) -> Mixer:
    """Return the attention, MLP or mixture of experts that `mixer` describes."""
    kind: dict[str, Any] = {"dtype": spec.dtype, "device": device, "shard": spec.shard}
    if isinstance(mixer, AttentionSpec):
        return Attention(layer_index, spec.hidden_size, mixer, **kind)
    if isinstance(mixer, LatentAttentionSpec):
        return LatentAttention(layer_index, spec.hidden_size, mixer, **kind)
    if isinstance(mixer, MoeSpec):
        return MixtureOfExperts(spec.hidden_size, mixer, **kind)
    return GatedMLP(spec.hidden_size, mixer, **kind)


def make_norm(spec: ModelSpec, device: torch.device) -> Norm:
    """Return a norm over the hidden size, a LayerNorm or RMSNorm as the spec says."""
    dim, eps = spec.hidden_size, spec.rms_norm_eps
    if spec.norm == "layer":
        return LayerNorm(dim, eps, dtype=spec.dtype, device=device)
    return RMSNorm(
        dim,
        eps,
        offset=spec.norm_offset,
        rounds_first=spec.norm_rounds_first,
        dtype=spec.dtype,
        device=device,
    )


def _sums_of(branches: Sequence[BranchNames]) -> list[str | None]:
    """Return `Branch.sums` for each branch. Parallel branches without a norm after them are summed
    together."""
    sums: list[str | None] = ["own"] * len(branches)
    for index, branch in enumerate(branches[1:], start=1):
        before = branches[index - 1]
        if (
            branch.is_parallel
            and sums[index - 1] == "own"
            and not (before.norm_after or branch.norm_after)
        ):
            sums[index - 1 : index + 1] = [None, "total"]
    return sums


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _enter(
    norm: Norm | None, delta_TE: Tensor, residual_TE: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the input of a branch, and the residual stream with `delta_TE` added."""
    if norm is not None:
        return norm.add(delta_TE, residual_TE)
    total_TE = delta_TE if residual_TE is None else residual_TE + delta_TE
    return total_TE, total_TE
