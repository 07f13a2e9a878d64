"""DenseModel: a decoder without paging and batches, in float64, as a reference for KV and logits.

Shape letters: C context positions, T new tokens, H heads, G KV heads, D head dim, E hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """The KV of one position: its token, the version that wrote it, one (key, value) per layer."""

    token: int
    version: int
    keys: tuple[Array, ...]
    values: tuple[Array, ...]


class DenseModel:
    """The weights of a transformers llama or qwen3 model, frozen as they are now."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._num_layers = config.num_hidden_layers
        self._head_dim = config.head_dim
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._epsilon = config.rms_norm_eps
        self._weights: dict[str, Array] = {
            name: parameter.detach().double().numpy().copy()
            for name, parameter in model.named_parameters()
        }

    def extend(
        self, context: Sequence[Position], tokens: Sequence[int], version: int
    ) -> tuple[list[Position], Array]:
        """Compute `tokens` behind a context that any version may have written.

        Returns their positions, stamped with `version`, and their logits [T, V].
        """
        x_TE = self._weights["model.embed_tokens.weight"][list(tokens)]
        start = len(context)
        angles = self._angles(np.arange(start, start + len(tokens)))
        layers = []
        for layer in range(self._num_layers):
            keys = [position.keys[layer] for position in context]
            values = [position.values[layer] for position in context]
            x_TE, k_TGD, v_TGD = self._layer(layer, x_TE, keys, values, angles)
            layers.append((k_TGD, v_TGD))
        positions = [
            Position(
                token=token,
                version=version,
                keys=tuple(k_TGD[i] for k_TGD, _ in layers),
                values=tuple(v_TGD[i] for _, v_TGD in layers),
            )
            for i, token in enumerate(tokens)
        ]
        hidden_TE = self._norm("model.norm", x_TE)
        return positions, hidden_TE @ self._weights["lm_head.weight"].T

    def _layer(
        self, layer: int, x_TE: Array, keys: list[Array], values: list[Array], angles: Array
    ) -> tuple[Array, Array, Array]:
        name = f"model.layers.{layer}"
        h_TE = self._norm(f"{name}.input_layernorm", x_TE)
        q_THD, k_TGD, v_TGD = (
            self._linear(f"{name}.self_attn.{part}_proj", h_TE).reshape(
                len(h_TE), -1, self._head_dim
            )
            for part in "qkv"
        )
        if f"{name}.self_attn.q_norm.weight" in self._weights:
            q_THD = self._norm(f"{name}.self_attn.q_norm", q_THD)
            k_TGD = self._norm(f"{name}.self_attn.k_norm", k_TGD)
        q_THD, k_TGD = _rotate(q_THD, angles), _rotate(k_TGD, angles)
        k_CGD, v_CGD = np.stack([*keys, *k_TGD]), np.stack([*values, *v_TGD])
        attended_TE = self._attend(q_THD, k_CGD, v_CGD)
        x_TE = x_TE + self._linear(f"{name}.self_attn.o_proj", attended_TE)
        h_TE = self._norm(f"{name}.post_attention_layernorm", x_TE)
        gate = self._linear(f"{name}.mlp.gate_proj", h_TE)
        up = self._linear(f"{name}.mlp.up_proj", h_TE)
        down = self._linear(f"{name}.mlp.down_proj", gate / (1.0 + np.exp(-gate)) * up)
        return x_TE + down, k_TGD, v_TGD

    def _attend(self, q_THD: Array, k_CGD: Array, v_CGD: Array) -> Array:
        num_new, num_all = len(q_THD), len(k_CGD)
        k_CHD, v_CHD = k_CGD.repeat(self._groups, axis=1), v_CGD.repeat(self._groups, axis=1)
        scores_HTC = np.einsum("thd,chd->htc", q_THD, k_CHD) / np.sqrt(self._head_dim)
        is_future = np.arange(num_all) > np.arange(num_all - num_new, num_all)[:, None]
        scores_HTC = np.where(is_future, -np.inf, scores_HTC)
        weights_HTC = np.exp(scores_HTC - scores_HTC.max(axis=-1, keepdims=True))
        weights_HTC /= weights_HTC.sum(axis=-1, keepdims=True)
        return np.einsum("htc,chd->thd", weights_HTC, v_CHD).reshape(num_new, -1)

    def _angles(self, positions: NDArray[np.int64]) -> Array:
        exponents = np.arange(0, self._head_dim, 2) / self._head_dim
        return positions[:, None] * ROPE_BASE**-exponents

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self._weights[f"{name}.weight"].T

    def _norm(self, name: str, x: Array) -> Array:
        scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self._epsilon)
        return x / scale * self._weights[f"{name}.weight"]


def _rotate(x_THD: Array, angles: Array) -> Array:
    """Rotary positions: pairs are (i, i + D / 2)."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = np.split(x_THD, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
