"""Decoder: token embedding, pre-norm layers and final norm, common to all families.

Shape letters: T tokens, L kept tokens, E hidden size, D head dim. Attributes are named as in
Hugging Face checkpoints, because the paths of modules are the names of their weights.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from rollout.backends.base import DecoderLayerParts, DecoderParts, RepackedWeight
from rollout.backends.forward_batch import ForwardBatch
from rollout.layers.attention import Attention
from rollout.layers.base import empty_parameter
from rollout.layers.mlp import GatedMLP
from rollout.layers.norm import RMSNorm
from rollout.layers.weight_slot import WeightSlot, rows_slot
from rollout.models.spec import ModelSpec


class Embedding(nn.Module):
    """One learned vector per token id."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        shape = (spec.vocab_size, spec.hidden_size)
        self.weight = empty_parameter(*shape, dtype=spec.dtype, device=device)
        self.num_tokens = spec.vocab_size
        self.repacked: RepackedWeight | None = None  # as the head to which the weight is tied

    def forward(self, token_ids_T: Tensor) -> Tensor:
        if self.repacked is not None:
            return self.repacked.gather(token_ids_T)
        return nn.functional.embedding(token_ids_T, self.weight)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The only weight, by name."""
        return {"weight": rows_slot(self.weight, self.repacked, 0, self.num_tokens)}


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before and added to the residual stream after."""

    def __init__(self, spec: ModelSpec, layer_index: int, device: torch.device) -> None:
        super().__init__()
        eps, dtype, width = spec.rms_norm_eps, spec.dtype, spec.hidden_size
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.self_attn = Attention(
            layer_index,
            hidden_size=width,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bias=spec.attention_bias,
            output_bias=spec.attention_output_bias,
            qk_norm_eps=eps if spec.qk_norm else None,
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            width, spec.intermediate_size, bias=spec.mlp_bias, dtype=dtype, device=device
        )

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        cos_TD: Tensor,
        sin_TD: Tensor,
        batch: ForwardBatch,
        kept_L: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(MLP output, residual) of all tokens or of the kept ones; the next norm adds the two."""
        x_TE, residual_TE = self.input_layernorm.add(x_TE, residual_TE)
        x_TE = self.self_attn(x_TE, cos_TD, sin_TD, batch, kept_L)
        if kept_L is not None:
            residual_TE = residual_TE.index_select(0, kept_L)
        x_TE, residual_TE = self.post_attention_layernorm.add(x_TE, residual_TE)
        return self.mlp(x_TE), residual_TE

    def parts(self) -> DecoderLayerParts:
        """What a fused decoder needs of this layer."""
        attention = self.self_attn
        return DecoderLayerParts(
            input_norm_E=self.input_layernorm.weight,
            post_norm_E=self.post_attention_layernorm.weight,
            q_norm_D=None if attention.q_norm is None else attention.q_norm.weight,
            k_norm_D=None if attention.k_norm is None else attention.k_norm.weight,
            qkv=attention.qkv.handle,
            output=attention.output.handle,
            gate_up=self.mlp.gate_up.handle,
            down=self.mlp.down.handle,
        )


class Decoder(nn.Module):
    """Token ids to final-normed hidden states."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec, device)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, index, device) for index in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=spec.dtype, device=device)

    def forward(self, cos_TD: Tensor, sin_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states [L, E] of `batch.logit_indices_L`; the others end at the last attention."""
        x_TE, residual_TE = self.embed_tokens(batch.token_ids_T), None
        *layers, last_layer = self.layers
        for layer in layers:
            x_TE, residual_TE = layer(x_TE, residual_TE, cos_TD, sin_TD, batch)
        kept_L = batch.logit_indices_L
        x_LE, residual_LE = last_layer(x_TE, residual_TE, cos_TD, sin_TD, batch, kept_L)
        return self.norm.add(x_LE, residual_LE)[0]

    def parts(self) -> DecoderParts:
        """What a fused decoder needs; the layers must be bound to a backend."""
        return DecoderParts(
            embedding=self.embed_tokens.weight,
            layers=[cast(DecoderLayer, layer).parts() for layer in self.layers],
            final_norm_E=self.norm.weight,
            eps=self.spec.rms_norm_eps,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
        )
