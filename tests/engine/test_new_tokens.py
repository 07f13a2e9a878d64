"""What running requests have generated since, in columns, is what their records say."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rollout import SamplingParams
from rollout.requests.generated_tokens import GeneratedTokens
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


def taken_apart(columns: Any) -> dict[int, dict[str, Any]]:
    """By request id: its row and its part of each column."""
    parts, at, log_probs, top_n = {}, 0, columns.log_probs.tolist(), list(columns.top_n)
    ranks = columns.ranks.tolist()
    for row, request_id in enumerate(columns.request_ids.tolist()):
        count = int(columns.counts[row])
        part = {
            "offset": int(columns.offsets[row]),
            "entry_version": int(columns.entry_versions[row]),
            "log_probs": None,
            "ranks": None,
            "top_n": None,
        }
        for name in ("token_ids", "policy_versions", "context_kv_version_min"):
            part[name] = getattr(columns, name)[at : at + count].tolist()
        part["context_kv_version_mean"] = columns.context_kv_version_mean[at : at + count].tolist()
        if columns.has_log_probs[row]:
            part["log_probs"], log_probs = log_probs[:count], log_probs[count:]
        if columns.has_ranks[row]:
            part["ranks"], ranks = ranks[:count], ranks[count:]
        if columns.has_top_n[row]:
            part["top_n"], top_n = top_n[:count], top_n[count:]
        parts[request_id] = part
        at += count
    assert at == len(columns.token_ids)
    assert not log_probs
    assert not ranks
    assert not top_n
    return parts


def expected(engine: Any, request_id: int, offset: int) -> dict[str, Any] | None:
    """The same out of a copy of the record."""
    tokens = GeneratedTokens.of(engine.get_record(request_id), offset)
    if tokens is None:
        return None
    names = [*GeneratedTokens.__dataclass_fields__]
    values = {name: getattr(tokens, name) for name in names}
    return {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}


@pytest.mark.parametrize("seed", range(4))
def test_columns_are_those_of_the_records_whatever_happens_between_two_reports(seed: int) -> None:
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
        records = {i: found for i, at in wanted if (found := expected(engine, i, at)) is not None}
        columns = taken_apart(engine.new_tokens(wanted))
        assert columns == records
        for index, part in columns.items():
            offsets[index] += len(part["token_ids"])
    assert sum(offsets.values()) > 20


def test_requests_that_have_ended_or_are_unknown_have_no_new_tokens() -> None:
    engine = tiny_engine(MODEL, num_blocks=64)
    engine.add_request(prompt_of(5), SamplingParams(num_tokens_to_generate=1))
    assert not len(engine.new_tokens([(0, 0), (7, 0)]).request_ids)
    engine.step()
    assert not len(engine.new_tokens([(0, 0), (7, 0)]).token_ids)
