"""Rotary frequencies against transformers', and the table that grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rollout.errors import ModelError
from rollout.layers.rope import RopeSpec, RotaryTable, inverse_frequencies

HEAD_DIM = 64
CPU = torch.device("cpu")
LLAMA3 = RopeSpec(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192)
YARN = RopeSpec(kind="yarn", factor=4.0, original_max_positions=4096, attention_factor=1.2)

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
    ],
)
def test_impossible_specs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeSpec(**fields)
