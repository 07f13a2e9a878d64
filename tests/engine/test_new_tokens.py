"""`Engine.new_tokens` equals the tails of the requests' records."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.requests.token_runs import TokenRun
from tests.tiny_models import prompt_of, tiny_engine, tiny_model

MODEL: Any = tiny_model("qwen3", seed=20)


def params(index: int) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=40,
        ignore_eos=True,
        seed=index,
        return_log_probs=index % 3 != 2,
        return_ranks=index % 2 == 1,
        top_n_logprobs=2 if index % 3 == 1 else 0,
    )


@pytest.mark.parametrize("seed", range(4))
def test_new_tokens_equal_the_tails_of_the_records_at_any_time(seed: int) -> None:
    """Steps, new versions amid the tokens, requests sent back to the queue: in random order."""
    draw = random.Random(seed)
    engine = tiny_engine(MODEL, num_blocks=64, weights_version=2)
    offsets = dict.fromkeys(range(6), 0)
    for index in offsets:
        engine.add_request(prompt_of(5 + index, seed=index), params(index), request_id=index)
    for _ in range(25):
        what = draw.choice(["step", "step", "version", "recompute"])
        if what == "step":
            engine.step()
        else:
            engine.pause()
            if what == "recompute":
                engine.suspend("recompute")
                engine.resume()
            else:
                engine.set_generation_epoch(engine.weights_version + draw.choice([1, 3]))
            engine.unpause()
        asked = draw.sample(sorted(offsets), draw.randrange(7))
        wanted = [(index, offsets[index]) for index in asked]
        found = {i: TokenRun.of(engine.get_record(i), offset) for i, offset in wanted}
        runs = {request_id: run for request_id, _, run in engine.new_tokens(wanted).apart()}
        assert runs == {index: run for index, run in found.items() if run is not None}
        for index, run in runs.items():
            offsets[index] = run.end
    assert sum(offsets.values()) > 20


def test_new_tokens_leaves_out_ended_and_unknown_requests() -> None:
    engine = tiny_engine(MODEL, num_blocks=64)
    engine.add_request(prompt_of(5), SamplingParams(num_tokens_to_generate=1))
    assert not len(engine.new_tokens([(0, 0), (7, 0)]).request_ids)
    engine.step()
    assert not len(engine.new_tokens([(0, 0), (7, 0)]).token_ids)
