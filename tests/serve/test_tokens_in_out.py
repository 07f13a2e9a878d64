"""POST /inference/v1/generate, /metrics and /openapi.json."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rollout import LLM, SamplingParams
from tests.apis.fleets import directory
from tests.serve.served import CONFIG, Served
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed

PATH = "/inference/v1/generate"
PROMPT = prompt_of(7)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_out_returns_tokens_and_log_probs_of_generate(
    served: Served, stream: bool
) -> None:
    with LLM(directory(), None, CONFIG) as llm:
        params = SamplingParams(num_tokens_to_generate=9, seed=6, return_log_probs=True)
        expected = llm.generate(PROMPT, params, 2)
    body = {
        "token_ids": PROMPT,
        "request_id": "mine",
        "stream": stream,
        "sampling_params": {"n": 2, "max_tokens": 9, "seed": 6, "logprobs": 1, "detokenize": False},
    }
    if stream:
        events = served.events(PATH, body)
        assert {event["request_id"] for event in events} == {"mine"}
        parts = [event["choices"][0] for event in events]
    else:
        reply = served.post(PATH, body).json()
        assert reply["request_id"] == "mine"
        assert reply["usage"]["completion_tokens"] == 18
        parts = reply["choices"]
    assert isinstance(expected, list)
    for index, request in enumerate(expected):
        mine = [part for part in parts if part["index"] == index]
        assert [i for part in mine for i in part["token_ids"]] == request.generated_tokens
        content = [e for part in mine if part["logprobs"] for e in part["logprobs"]["content"]]
        assert [e["token_id"] for e in content] == request.generated_tokens
        assert [e["token"] for e in content] == [f"token_id:{i}" for i in request.generated_tokens]
        log_probs = [entry["logprob"] for entry in content]
        assert log_probs == pytest.approx(request.generated_log_probs.tolist(), abs=1e-4)
        assert all(map(math.isfinite, log_probs))
        assert mine[-1]["finish_reason"] == "length"
        assert mine[-1]["weight_versions"] == [{"version": "0", "start": 0, "end": 9}]


def test_tokens_in_out_without_max_tokens_fills_the_context(served: Served) -> None:
    reply = served.post(
        PATH, {"token_ids": prompt_of(490), "sampling_params": {"ignore_eos": True}}
    )
    assert len(reply.json()["choices"][0]["token_ids"]) == 512 - 490


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": []},
        {"token_ids": "text"},
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 0}},
        {"token_ids": PROMPT, "sampling_params": 3},
        {"token_ids": prompt_of(512)},
        {"token_ids": PROMPT, "stream": True, "sampling_params": {"prompt_logprobs": 1}},
    ],
)
def test_bad_bodies_are_refused(served: Served, body: dict[str, Any]) -> None:
    answer = served.post(PATH, body)
    assert (answer.status, answer.json()["error"]["code"]) == (400, 400)


def test_metrics_count_requests_and_tokens(served: Served) -> None:
    def value(name: str) -> float:
        lines = served.get("/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    name = f'rollout_http_requests_total{{method="POST",path="{PATH}",status="200"}}'
    before = value(name), value("rollout_engine_num_sampled_tokens_total ")
    served.post(PATH, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}})
    assert value(name) == before[0] + 1
    assert value("rollout_engine_num_sampled_tokens_total ") == before[1] + 5
    assert value('rollout_engine_policy_staleness_total{versions="0"} ') >= 5
    assert value("rollout_samples_running ") == 0
    assert value('rollout_engine_state{state="RUNNING"} ') == 1
    text = served.get("/metrics").body.decode()
    for name in ("lora_base_bytes", "routing_bytes"):  # which shrink, too
        assert f"# TYPE rollout_engine_{name} gauge" in text
    rank = '{engine="0",rank="0"} '
    assert value(f"rollout_rank_weights_bytes{rank}") > 0
    assert value(f"rollout_rank_cpu_seconds_total{rank}") > 0


def test_the_document_names_all_routes_and_fields(served: Served) -> None:
    document = served.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "/v1/completions" in document["paths"]
    fields = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "echo", "return_provenance", "temperature"} <= set(fields)
    for path, methods in document["paths"].items():
        for method in methods:
            answer = served.call(method.upper(), path.replace("{", "").replace("}", ""), b"{}")
            assert answer.status != 405, path
