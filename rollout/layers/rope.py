"""Rotary position embedding: RopeSpec, its frequencies, and RotaryTable of cosines and sines.

Used by CausalLM, which owns the tables, by the attention layers, which reorder heads, and by
`rollout.models`, which reads a RopeSpec from configs. Shape letters: T tokens, P positions, D head
dim, F frequencies (half of the rotated dims). Sources: Su et al. 2021, "RoFormer"; Peng et al.
2023, "YaRN"; Ding et al. 2024, "LongRoPE"; the Llama 3.1 release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout.errors import ModelError

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions become angles. Fields that `kind` does not use keep their defaults.

    `factor` is the ratio of the stretched context to the original one. `partial` is the share of a
    head's dims that is rotated, from its first dim on. R rotated dims form pairs (i, i + R / 2), or
    (2i, 2i + 1) if `is_interleaved`. Raises ModelError for values that give no angles.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    partial: float = 1.0
    is_interleaved: bool = False
    original_max_positions: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ends of the ramp to whole indices
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosine and sine
    mscale_all_dim: float = 0.0  # yarn: weight of `yarn_scale` in scores of latent attention
    short_factors: tuple[float, ...] = ()  # longrope: per frequency, within the original context
    long_factors: tuple[float, ...] = ()  # longrope: beyond it; checked, but not supported
    query_growth: float = 0.0  # b: queries times 1 + b ln(1 + floor(position / original))

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(f"rope type {self.kind!r} is not supported; supported: {ROPE_KINDS}")
        if self.theta <= 1 or self.factor <= 0:
            raise ModelError(
                f"rope: theta={self.theta} must exceed 1, and factor={self.factor} must exceed 0"
            )
        if not 0 < self.partial <= 1:
            raise ModelError(f"partial_rotary_factor={self.partial} must be in (0, 1]")
        needs_original = self.kind in ("llama3", "yarn", "longrope") or self.query_growth
        if needs_original and self.original_max_positions <= 0:
            raise ModelError(f"rope type {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "yarn" and not (self.beta_fast > 0 and self.beta_slow > 0):
            raise ModelError(
                f"yarn rope: beta_fast={self.beta_fast} and beta_slow={self.beta_slow} must be "
                "positive"
            )
        if min((1.0, *self.short_factors, *self.long_factors)) <= 0:
            raise ModelError("longrope: short_factor and long_factor must be positive")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ModelError(
                f"llama3 rope: high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}, and low_freq_factor must exceed 0"
            )


def yarn_scale(factor: float, weight: float) -> float:
    """Return the factor of queries and keys, 0.1 weight ln(factor) + 1, or 1 if `factor` <= 1.
    Source: YaRN, sec. 3.4."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_dim(rope: RopeSpec, head_dim: int) -> int:
    return int(head_dim * rope.partial)


def head_order(rope: RopeSpec | None, head_dim: int, device: torch.device) -> Tensor | None:
    """Return the order of a head's dims, [D] int64, in which pairs (i, i + D / 2) are rotated.
    Returns None if the dims have this order already, and without a rope. Dims that are not rotated
    come at the end of each half. Reordering queries and keys alike does not change their scores."""
    if rope is None:
        return None
    dims_D, num_turning = torch.arange(head_dim), rotary_dim(rope, head_dim)
    turning, resting = dims_D[:num_turning], dims_D[num_turning:]
    half, half_resting = num_turning // 2, len(resting) // 2
    low, high = turning[:half], turning[half:]
    if rope.is_interleaved:
        low, high = turning[::2], turning[1::2]
    order_D = torch.cat((low, resting[:half_resting], high, resting[half_resting:]))
    return None if torch.equal(order_D, dims_D) else order_D.to(device)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return radians per position, [F] float32 on the CPU: theta^(-2i / R) for R rotated dims,
    scaled as the rope's kind says."""
    num_dims = rotary_dim(rope, head_dim)
    exponents_F = torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims
    if rope.kind == "longrope":
        factors_F = torch.tensor(rope.short_factors, dtype=torch.float32)
        return 1.0 / (factors_F * rope.theta**exponents_F)
    frequencies_F = 1.0 / (rope.theta**exponents_F)
    if rope.kind == "default":
        return frequencies_F
    if rope.kind == "linear":
        return frequencies_F / rope.factor
    if rope.kind == "llama3":
        unscaled_F = _llama3_unscaled_share(rope, frequencies_F)
    else:
        unscaled_F = _yarn_unscaled_share(rope, num_dims)
    return (1 - unscaled_F) * frequencies_F / rope.factor + unscaled_F * frequencies_F


def _llama3_unscaled_share(rope: RopeSpec, frequencies_F: Tensor) -> Tensor:
    """Return the share of each frequency that stays unscaled, [F]: 1 for frequencies with many
    turns within the original context, 0 for few turns, and linear in the frequency between."""
    turns_F = rope.original_max_positions * frequencies_F / (2 * math.pi)
    share_F = (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return share_F.clamp(0, 1)


def _yarn_unscaled_share(rope: RopeSpec, num_dims: int) -> Tensor:
    """Return the share of each frequency that stays unscaled, [F], as `_llama3_unscaled_share`
    does, but linear in the frequency's index. Source: YaRN, sec. 3.2 and appendix A.2."""

    def index_of_turns(turns: float) -> float:
        stretch = rope.original_max_positions / (turns * 2 * math.pi)
        return num_dims * math.log(stretch) / (2 * math.log(rope.theta))

    start, end = index_of_turns(rope.beta_fast), index_of_turns(rope.beta_slow)
    if rope.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, num_dims - 1)
    # 0.001 keeps a ramp of no width finite, as in the reference code of the paper.
    width = end - start if end != start else 0.001
    indices_F = torch.arange(num_dims // 2, dtype=torch.float32)
    return 1 - ((indices_F - start) / width).clamp(0, 1)


class RotaryTable(nn.Module):
    """Cosine and sine of every position up to a length that grows on demand, in float32.

    Rows have the values of both halves of a head, [P, D], as `Ops.rotary` takes them. Dims that are
    not rotated have cosine 1 and sine 0. Heads must have the dim order of `head_order`. Growing
    replaces the buffers, so reserve the longest sequence before capturing a graph that reads them.
    """

    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, rope: RopeSpec, head_dim: int, *, device: torch.device) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        empty = torch.empty(0, head_dim, dtype=torch.float32, device=device)
        self.register_buffer("cos_PD", empty, persistent=False)
        self.register_buffer("sin_PD", empty, persistent=False)

    @property
    def num_positions(self) -> int:
        return self.cos_PD.shape[0]

    def reserve(self, num_positions: int) -> None:
        """Make the table cover `num_positions`. A table that must grow at least doubles."""
        if num_positions <= self.num_positions:
            return
        num_positions = max(num_positions, 2 * self.num_positions)
        # float32 angles made on the CPU have the same values as in a trainer's transformers model.
        positions_P = torch.arange(num_positions, dtype=torch.float32)
        angles_PF = torch.outer(positions_P, inverse_frequencies(self.rope, self.head_dim))
        num_resting = self.head_dim // 2 - angles_PF.shape[1]
        cos_PF = angles_PF.cos() * self.rope.attention_factor
        sin_PF = angles_PF.sin() * self.rope.attention_factor
        cos_PH, sin_PH = F.pad(cos_PF, (0, num_resting), value=1.0), F.pad(sin_PF, (0, num_resting))
        device = self.cos_PD.device
        self.cos_PD = torch.cat((cos_PH, cos_PH), dim=1).to(device)
        self.sin_PD = torch.cat((sin_PH, sin_PH), dim=1).to(device)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos_TD and sin_TD of `positions_T`, which must be reserved."""
        return self.cos_PD.index_select(0, positions_T), self.sin_PD.index_select(0, positions_T)
