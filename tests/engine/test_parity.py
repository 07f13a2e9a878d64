"""Greedy tokens equal those of transformers' generate, for every head layout and mixed lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout import SamplingParams
from tests.tiny_models import IS_LONG, Margins, generate_all, prompt_of, tiny_engine, tiny_model

NUM_NEW = 64
PROMPT_LENGTHS = (1, 2, 7, 8, 9, 33, 128, 300)
MORE_LENGTHS = (3, 15, 16, 17, 64, 65, 100, 127, 129, 200, 255, 256, 257, 299)
LAYOUTS = {
    "MHA": {"num_key_value_heads": 4},
    "GQA": {"num_key_value_heads": 2},
    "MQA": {"num_key_value_heads": 1},
}


def transformers_tokens(model: Any, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """What transformers generates greedily, in one batch padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    generated = model.generate(
        padded, attention_mask=mask, max_new_tokens=num_new, do_sample=False, pad_token_id=0
    )
    return generated[:, width:].tolist()


def greedy(num_new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_tokens_to_generate=num_new)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_transformers_generate(
    family: str, layout: str, is_tied: bool
) -> None:
    model = tiny_model(family, tie_word_embeddings=is_tied, **LAYOUTS[layout])
    prompts = [prompt_of(n) for n in PROMPT_LENGTHS + (MORE_LENGTHS if IS_LONG else ())]
    requests = generate_all(tiny_engine(model), [(prompt, greedy(NUM_NEW)) for prompt in prompts])
    margins, expected = Margins(), transformers_tokens(model, prompts, NUM_NEW)
    for request, tokens in zip(requests, expected, strict=True):
        margins.compare(model, request, tokens)
    margins.check()
    assert margins.num_tokens >= 0.9 * len(prompts) * NUM_NEW


def test_an_unpadded_prompt_gives_transformers_tokens_too() -> None:
    model, margins = tiny_model("llama", seed=7), Margins()
    (request,) = generate_all(tiny_engine(model), [(prompt_of(50), greedy(NUM_NEW))])
    margins.compare(model, request, transformers_tokens(model, [prompt_of(50)], NUM_NEW)[0])
    margins.check()


@pytest.mark.parametrize(("block_size", "max_tokens"), [(1, 7), (256, 64), (16, 1)])
def test_parity_holds_for_chunked_prefill_with_any_block_size(
    block_size: int, max_tokens: int
) -> None:
    model, margins = tiny_model("llama"), Margins()
    prompts = [prompt_of(n) for n in (1, 40, 41, 100)]
    engine = tiny_engine(
        model,
        block_size_tokens=block_size,
        num_blocks=2048 // block_size,
        enable_chunked_prefill=True,
        max_tokens=max_tokens,
    )
    requests = generate_all(engine, [(prompt, greedy(16)) for prompt in prompts])
    for request, tokens in zip(requests, transformers_tokens(model, prompts, 16), strict=True):
        margins.compare(model, request, tokens)
    margins.check()
