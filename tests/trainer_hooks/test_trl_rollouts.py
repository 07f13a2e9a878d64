"""Seeds of TRLRollouts, with a trainer that has a process index and a step as TRL's."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import torch

from rollout import LLM
from tests.apis.fleets import CONFIG, directory, weights
from tests.tiny_models import prompt_of
from trainer_hooks.trl_rollouts import TRLRollouts

# Two samples of the first one.
PROMPTS = [" ".join(map(str, prompt_of(length))) for length in (5, 5, 7)]


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def completions(
    rank: int, steps: list[int], seed: int | None, num_calls: int = 1
) -> list[tuple[int, ...]]:
    """Return the completions that process `rank` of a trainer generates in its `steps`."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(process_index=rank, unwrap_model=lambda model: model),
        model=weights(),
        processing_class=Tokenizer(),
        state=SimpleNamespace(global_step=0),
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0},
        max_completion_length=12,
        eos_token_ids=[],
        args=SimpleNamespace(generation_kwargs=None),
    )
    generated: list[tuple[int, ...]] = []
    with LLM(directory(), None, CONFIG, seed=seed) as llm, torch.no_grad():
        rollouts = TRLRollouts(llm)
        for step in steps:
            trainer.state.global_step = step
            for _ in range(num_calls):
                rows = rollouts(PROMPTS, trainer)["completion_ids"]
                generated += [tuple(row) for row in rows]
    return generated


def test_trl_rollouts_of_ranks_with_one_seed_or_none_differ() -> None:
    for seed in (None, 7):
        drawn = list(chain(*(completions(rank, [0, 2], seed) for rank in range(2))))
        assert len(set(drawn)) == len(drawn) == 12


def test_trl_rollouts_repeat_a_run_by_its_seed_and_continue_it_after_a_resume() -> None:
    whole = completions(0, [0, 2, 4], seed=7, num_calls=2)
    assert len(set(whole)) == len(whole) == 18
    assert completions(0, [0, 2, 4], seed=7, num_calls=2) == whole
    assert completions(0, [2, 4], seed=7, num_calls=2) == whole[6:]
