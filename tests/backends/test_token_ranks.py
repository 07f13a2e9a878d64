"""Ranks of tokens by their logits."""

from __future__ import annotations

import pytest
import torch

from rollout.backends.ops.sampling import token_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_is_one_more_than_the_number_of_larger_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.5, 3.0, -1.0, 3.0, 2.0]] * 5, dtype=dtype)
    ranks = token_ranks(logits, torch.arange(5))
    assert ranks.tolist() == [4, 1, 5, 1, 3]
    assert ranks.dtype == torch.int32


def test_masked_tokens_come_last() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert token_ranks(logits, torch.tensor([2])).tolist() == [2]


def test_no_tokens_have_no_ranks() -> None:
    assert token_ranks(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64)).shape == (0,)
