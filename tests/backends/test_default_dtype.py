"""An engine in a trainer's process does not depend on torch's defaults, which the
trainer may set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rollout import SamplingParams
from rollout.models import CausalLM
from tests.tiny_models import drain, prompt_of, tiny_engine, tiny_model

PARAMS = SamplingParams(
    num_tokens_to_generate=6,
    seed=1,
    return_log_probs=True,
    top_n_logprobs=2,
    skip_prompt_log_probs=False,
)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def generated(model: CausalLM) -> list[tuple[list[int], list[float], list[float]]]:
    engine = tiny_engine(model, num_blocks=64, materialize_only_last_token_logits=False)
    for length in (3, 9, 20):
        engine.add_group(prompt_of(length), [PARAMS] * 2)
    return [
        (r.generated_tokens, list(r.generated_log_probs), list(r.prompt_log_probs))
        for _, r in sorted(drain(engine).items())
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 12], ids=["in one call", "layer by layer"])
def test_torchs_default_dtype_changes_no_token_and_no_log_prob(
    head_dim: int, dtype: torch.dtype
) -> None:
    model, same = (tiny_model("qwen3", seed=1, head_dim=head_dim) for _ in range(2))
    expected = generated(model)
    with default(dtype):
        assert generated(same) == expected
