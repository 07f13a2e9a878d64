"""POST /v1/completions: the tokens and log-probs of generation in process, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rollout import LLM, DynamicInferenceRequest, SamplingParams
from tests.apis.fleets import directory
from tests.serve.served import CONFIG, Served
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed

PROMPT = prompt_of(9)
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def in_process() -> Iterator[LLM]:
    with LLM(directory(), None, CONFIG) as llm:
        yield llm


def in_order(llm: LLM, prompts: Any, n: int = 1, **fields: Any) -> list[DynamicInferenceRequest]:
    params = SamplingParams(return_log_probs=True, top_n_logprobs=3, **fields)
    given = llm.generate(prompts, params, n)
    return given if isinstance(given, list) else [given]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("stream", [False, True])
def test_completions_return_the_tokens_and_log_probs_of_generate(
    served: Served, in_process: LLM, temperature: float, stream: bool
) -> None:
    prompts = [PROMPT, prompt_of(5)]
    expected = in_order(
        in_process, prompts, 2, temperature=temperature, seed=11, num_tokens_to_generate=12
    )
    body = {
        "prompt": prompts,
        "n": 2,
        "max_tokens": 12,
        "temperature": temperature,
        "seed": 11,
        "logprobs": 3,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "top_k": -1,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    choices, usage = served.completed(PATH, body)
    assert usage["prompt_tokens"] == 14
    assert usage["completion_tokens"] == 48
    for index, request in enumerate(expected):
        choice = choices[index]
        assert choice["token_ids"] == request.generated_tokens
        assert choice["prompt_token_ids"] == prompts[index // 2]
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in request.generated_tokens]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            request.generated_log_probs.tolist(), abs=1e-4
        )
        for top, own in zip(
            choice["logprobs"]["top_logprobs"], request.generated_top_n_logprobs, strict=True
        ):
            assert set(top) >= {f"token_id:{i}" for i in own}


def test_an_echo_scores_the_prompt(served: Served, in_process: LLM) -> None:
    (expected,) = in_order(
        in_process, PROMPT, num_tokens_to_generate=1, temperature=0.0, skip_prompt_log_probs=False
    )
    for max_tokens in (0, 1):
        body = {
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "echo": True,
            "temperature": 0,
        }
        answer = served.post(PATH, body).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert [len(column) for column in logprobs.values()] == [len(PROMPT) + max_tokens] * 4
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:9] == pytest.approx(
            expected.prompt_log_probs.tolist(), abs=1e-4
        )
        if max_tokens:
            # A greedy token is bit-equal to the best one: clients detect a greedy token by that.
            assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
        assert answer["usage"]["completion_tokens"] == max_tokens


def test_usage_of_a_streamed_echo_counts_no_generated_tokens(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "stream": True}
    _, usage = served.completed(PATH, body | {"stream_options": {"include_usage": True}})
    assert usage["prompt_tokens"] == usage["total_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == 0


def test_prompt_logprobs_are_by_id_with_ranks(served: Served, in_process: LLM) -> None:
    (expected,) = in_order(
        in_process, PROMPT, num_tokens_to_generate=1, skip_prompt_log_probs=False
    )
    (choice,), _ = served.completed(PATH, {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2})
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    for token_id, log_prob, row in zip(PROMPT[1:], expected.prompt_log_probs, rows, strict=True):
        assert row[str(token_id)]["logprob"] == pytest.approx(float(log_prob), abs=1e-4)
        assert sorted(entry["rank"] for entry in row.values())[:2] == [1, 2]


def test_max_tokens_of_0_has_no_weight_versions(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    asked = {"return_weight_versions": True, "return_provenance": True}
    for stream in ({}, {"stream": True, "logprobs": None}):
        (choice,), _ = served.completed(PATH, body | asked | stream)
        assert choice["weight_versions"] == choice["policy_staleness"] == []
        assert choice["kv_cache_staleness"] == choice["context_kv_version_min"] == []
        assert choice["weights_version"] == 0


def test_streamed_samples_share_a_prefill(served: Served) -> None:
    before = served.do(served.llm.stats())
    served.completed(PATH, {"prompt": PROMPT, "n": 4, "max_tokens": 2, "stream": True})
    after = served.do(served.llm.stats())
    assert after.num_forked_requests == before.num_forked_requests + 3
    assert after.num_prefill_tokens == before.num_prefill_tokens + len(PROMPT)


def test_return_weight_versions_and_return_provenance(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "return_weight_versions": True}
    (choice,), _ = served.completed(PATH, body | {"return_provenance": True})
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    assert choice["weights_version"] == 0
    for name in ("policy_staleness", "kv_cache_staleness", "context_kv_version_min"):
        assert choice[name] == [0] * 4
    (plain,), _ = served.completed(PATH, {"prompt": PROMPT})
    assert not {"weight_versions", "weights_version", "policy_staleness"} & set(plain)


def test_skip_special_tokens_changes_nothing_without_a_tokenizer(served: Served) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "skip_special_tokens": False}
    answer = served.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    assert answer.json()["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 0},
        {"top_k": 100000000},
        {"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0},
        {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
        {"stop": None, "stop_token_ids": [], "logit_bias": None, "best_of": 1, "n": None},
        {"user": {"nested": [1]}, "response_format": {"type": "text"}, "max_tokens": None},
    ],
)
def test_neutral_values_change_nothing(served: Served, fields: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "seed": 3, "return_token_ids": True}
    (plain,), _ = served.completed(PATH, body)
    assert len(plain["token_ids"]) == 16
    (choice,), _ = served.completed(PATH, body | fields)
    assert choice["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"prompt": []}, 400, "empty"),
        ({"prompt": ""}, 400, "tokenizer"),
        ({"prompt": [[1, 2], []]}, 400, "empty"),
        ({"prompt": [1, "two"]}, 400, "prompts"),
        ({"prompt": [[1], "two"]}, 400, "prompts"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "-1"),
        ({"prompt": [10**6]}, 400, "vocabulary"),
        ({"prompt": [10**30]}, 400, ""),
        ({"prompt": "text"}, 400, "tokenizer"),
        ({"n": 0}, 400, "n=0"),
        ({"n": 10**9}, 400, "n="),
        ({"n": 10**30}, 400, ""),
        ({"n": "two"}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -5}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "maximum context length"),
        ({"prompt": prompt_of(600)}, 400, "maximum context length"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_p": 1.5}, 400, "top_p"),
        ({"top_k": -7}, 400, "top_k"),
        ({"logprobs": 10**6}, 400, "logprobs"),
        ({"logprobs": -1}, 400, "logprobs"),
        ({"seed": 2**70}, 400, "seed"),
        ({"stop": "word"}, 400, "tokenizer"),
        ({"stop_token_ids": [10**6]}, 400, "vocabulary"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"repetition_penalty": 0.0}, 400, "repetition_penalty"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"guided_regex": "a+"}, 400, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"stream": True, "echo": True, "logprobs": 1}, 400, "streamed"),
        ({"model": "another"}, 404, "another"),
    ],
)
def test_completions_refuse_bad_fields_by_name(
    served: Served, fields: dict[str, Any], status: int, word: str
) -> None:
    answer = served.post(PATH, {"prompt": PROMPT, "max_tokens": 2} | fields)
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert error["code"] == status
    assert word in error["message"]


def test_a_refused_stream_gets_a_status(served: Served) -> None:
    answer = served.post(PATH, {"prompt": [10**6], "stream": True})
    assert answer.status == 400
    assert "vocabulary" in answer.json()["error"]["message"]
