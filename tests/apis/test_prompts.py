"""as_batch: which values are one prompt, a batch of prompts, or neither."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from rollout import InvalidRequestError
from rollout.apis.arguments import as_batch


@pytest.mark.parametrize(
    "prompt",
    [[4, 5], (4, 5), range(4, 6), array("i", [4, 5]), np.array([4, 5]), torch.arange(4, 6)],
)
def test_as_batch_of_a_flat_list_of_ids_is_one_prompt(prompt: Any) -> None:
    assert as_batch(prompt) == ([[4, 5]], True)


def test_as_batch_of_texts_and_lists_is_a_batch() -> None:
    ids = np.array([4, 5])
    batch = ["text", [1], (2, 3), ids, []]
    assert as_batch(batch) == (batch, False)
    assert as_batch(iter(batch)) == (batch, False)
    assert as_batch(torch.tensor([[1, 2], [3, 4]])) == ([[1, 2], [3, 4]], False)
    assert as_batch("text") == (["text"], True)
    assert as_batch([]) == ([], False)


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        None,
        b"ab",
        bytearray(b"ab"),
        memoryview(b"ab"),
        {"prompt": [1]},
        {1, 2},
        frozenset({1}),
        {1: 2}.keys(),
        np.array(5),
        torch.tensor(5),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_as_batch_refuses_values_without_order_or_ids(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompts="):
        as_batch(wrong)
    for batch in (["text", wrong], [[1], wrong]):
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]="):
            as_batch(batch)


@pytest.mark.parametrize("wrong", [b"ab", {"prompt": [1]}, {1, 2}, torch.tensor(5)], ids=str)
def test_as_batch_refuses_a_batch_that_begins_with_none(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]="):
        as_batch([wrong, [1]])
