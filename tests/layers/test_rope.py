"""Rotary frequencies against transformers', and the table that grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rollout.backends.ops.reference import ReferenceOps
from rollout.errors import ModelError
from rollout.layers.rope import RopeSpec, RotaryTable, head_order, inverse_frequencies

HEAD_DIM = 64
CPU = torch.device("cpu")
LLAMA3 = RopeSpec(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192)
YARN = RopeSpec(kind="yarn", factor=4.0, original_max_positions=4096, attention_factor=1.2)

FACTORS = tuple(1.0 + 0.1 * index for index in range(HEAD_DIM // 2))
LONGROPE = RopeSpec(
    kind="longrope",
    factor=2.0,
    original_max_positions=16384,
    attention_factor=1.3,
    short_factors=FACTORS,
    long_factors=FACTORS,
)

SPECS: list[tuple[RopeSpec, dict[str, Any]]] = [
    (RopeSpec(theta=1e6), {"rope_type": "default", "rope_theta": 1e6}),
    (RopeSpec(kind="linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    (
        LLAMA3,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        YARN,
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.2,
            "original_max_position_embeddings": 4096,
        },
    ),
    (
        LONGROPE,
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "attention_factor": 1.3,
            "short_factor": list(FACTORS),
            "long_factor": [2 * factor for factor in FACTORS],
            "original_max_position_embeddings": 16384,
        },
    ),
    (
        RopeSpec(
            kind="yarn",
            factor=2.0,
            original_max_positions=512,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "attention_factor": 1.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), SPECS)
def test_cosines_and_sines_equal_those_of_transformers(
    rope: RopeSpec, parameters: dict[str, Any]
) -> None:
    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=16384, rope_parameters=parameters
    )
    reference = LlamaRotaryEmbedding(config)
    assert_close(inverse_frequencies(rope, HEAD_DIM), reference.inv_freq, rtol=1e-6, atol=0)
    positions_T = torch.tensor([0, 1, 511, 4096, 12001])
    cos_TD, sin_TD = reference(torch.zeros(1), positions_T[None])
    table = RotaryTable(rope, HEAD_DIM, device=CPU)
    table.reserve(12002)
    # At position 12,001 one unit in the last place of a frequency is 7e-4 radians.
    assert_close(table(positions_T)[0], cos_TD[0], rtol=0, atol=2e-3)
    assert_close(table(positions_T)[1], sin_TD[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_reordered_heads_have_the_scores_of_pairs_that_turn(
    partial: float, is_interleaved: bool
) -> None:
    """Pairs are rotated as complex numbers; dims beyond the partial ones are not."""
    rope = RopeSpec(partial=partial, is_interleaved=is_interleaved)
    head_dim, num_turning = 16, int(16 * partial)
    table = RotaryTable(rope, head_dim, device=CPU)
    table.reserve(9)
    positions_T, generator = torch.tensor([2, 8]), torch.Generator().manual_seed(0)
    heads_THD = torch.randn(2, 1, head_dim, generator=generator)
    pairs = heads_THD[..., :num_turning].unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    first, second = pairs.unbind(-1 if is_interleaved else -2)
    angles_T1F = positions_T[:, None, None] * inverse_frequencies(rope, head_dim)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles_T1F), angles_T1F)
    plain = torch.cat((turned.real, turned.imag, heads_THD[..., num_turning:]), dim=-1)
    order_D = head_order(rope, head_dim, torch.device("cpu"))
    assert (order_D is None) == (partial == 1.0 and not is_interleaved)
    ours = heads_THD if order_D is None else heads_THD[..., order_D]
    ours, _ = ReferenceOps().rotary(ours, ours, *table(positions_T))
    assert_close(ours[0] @ ours[1].T, plain[0] @ plain[1].T)


def test_a_grown_table_keeps_its_values_and_at_least_doubles() -> None:
    table = RotaryTable(YARN, HEAD_DIM, device=CPU)
    table.reserve(10)
    before_PD = table.cos_PD
    table.reserve(10)
    assert table.cos_PD is before_PD
    table.reserve(11)
    assert table.num_positions == 20
    assert torch.equal(table.cos_PD[:10], before_PD)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "dynamic"}, "'dynamic'.*yarn"),
        ({"theta": 1.0}, "theta=1.0"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"partial": 0.0}, "partial_rotary_factor=0.0"),
    ],
)
def test_impossible_specs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeSpec(**fields)
