"""The vllm protocol's pauses, sleep, aborts and the prefix cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rollout import DynamicInferenceEngine, ServeConfig
from tests.apis.fleets import directory
from tests.serve.served import CONFIG, Answer, OwnEngine, Served
from tests.serve.test_vllm_updates import tensors_of
from tests.tiny_models import prompt_of
from tests.waiting import until

pytestmark = pytest.mark.distributed
PROMPT = prompt_of(20)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("checkpoint")
    save_file(tensors_of(0), root / "model.safetensors")
    config = replace(CONFIG, enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    make = partial(OwnEngine, directory(), None, config)
    server = Served(make, ServeConfig(port=0, checkpoint_roots=(str(root),)))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def awake(served: Served) -> Iterator[None]:
    """Each test leaves the engines running."""
    yield
    assert served.get("/is_paused").json() == {"is_paused": False}
    assert served.get("/is_sleeping").json() == {"is_sleeping": False}
    assert completion(served, 1).status == 200


def completion(served: Served, num_tokens: int, **fields: Any) -> Answer:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "seed": 3, "return_token_ids": True}
    return served.post("/v1/completions", body | fields)


class Asked:
    """A completion from another thread, once an engine runs it."""

    def __init__(self, served: Served, num_tokens: int = 400, **fields: Any) -> None:
        before = served.do(served.llm.stats())
        self._answers: list[Answer] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(completion(served, num_tokens, **fields))
        )
        self._thread.start()
        if served.get("/is_paused").json()["is_paused"]:
            return
        while served.do(served.llm.stats()).num_sampled_tokens < before.num_sampled_tokens + 2:
            assert not self._answers

    @property
    def is_answered(self) -> bool:
        return bool(self._answers)

    def choice(self) -> Any:
        self._thread.join()
        assert self._answers[0].status == 200, self._answers[0].body
        return self._answers[0].json()["choices"][0]


def test_pause_keep_freezes_requests_and_new_ones_wait(served: Served) -> None:
    undisturbed = Asked(served).choice()["token_ids"]
    frozen = Asked(served)
    answer = served.post("/pause?mode=keep")
    assert (answer.status, answer.json()) == (200, {"status": "paused"})
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    later = Asked(served, num_tokens=2)
    steps = served.do(served.llm.stats()).num_steps
    assert served.get("/is_paused").json() == {"is_paused": True}
    assert served.do(served.llm.stats()).num_steps == steps
    assert not frozen.is_answered
    assert not later.is_answered
    assert served.post("/resume").json() == {"status": "resumed"}
    assert frozen.choice()["token_ids"] == undisturbed
    assert len(later.choice()["token_ids"]) == 2


def test_pause_abort_answers_requests_and_refuses_new_ones(
    served: Served,
) -> None:
    asked = Asked(served)
    assert served.post("/pause").status == 200
    choice = asked.choice()
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 400
    refused = completion(served, 1)
    error = refused.json()["error"]
    assert (refused.status, error["type"]) == (503, "ServiceUnavailableError")
    assert served.post("/resume").status == 200


def test_pause_wait_lets_requests_end(served: Served) -> None:
    asked = Asked(served)
    assert served.post("/pause?mode=wait").status == 200
    assert asked.choice()["finish_reason"] == "length"
    assert completion(served, 1).status == 503
    served.post("/resume")


def test_abort_requests_aborts_by_name_or_all(served: Served) -> None:
    one, other = Asked(served, request_id="one"), Asked(served, request_id="other")
    answer = served.post("/abort_requests", {"request_ids": ["one", "unknown"]})
    assert answer.json() == {"status": "aborted", "aborted": 1}
    assert one.choice()["finish_reason"] == "abort"
    assert served.call("POST", "/abort_requests").json()["aborted"] == 1
    assert other.choice()["finish_reason"] == "abort"


def test_abort_requests_of_inference_v1_aborts_by_name(served: Served) -> None:
    path = "/inference/v1/abort_requests"
    one, other = Asked(served, request_id="one"), Asked(served, request_id="other")
    for body in ({}, {"request_ids": None}, {"request_ids": "one"}):
        assert served.post(path, body).status == 400
    answer = served.post(path, {"request_ids": ["one", "unknown"]})
    assert (answer.status, answer.body) == (200, b"")
    assert one.choice()["finish_reason"] == "abort"
    assert served.post(path, {"request_ids": []}).status == 200
    assert not other.is_answered, "no names are no requests"
    assert served.post(path, {"request_ids": ["other"]}).status == 200
    assert other.choice()["finish_reason"] == "abort"


def test_load_counts_the_requests_in_the_server(served: Served) -> None:
    assert served.get("/load").json() == {"server_load": 0}
    served.post("/pause?mode=keep")  # so that neither ends before the other comes
    asked = [Asked(served), Asked(served)]
    until(lambda: served.get("/load").json() == {"server_load": 2}, "both are in the server")
    served.post("/resume")
    served.post("/abort_requests")
    for each in asked:
        each.choice()
    assert served.get("/load").json() == {"server_load": 0}


def test_version_is_that_of_the_package(served: Served) -> None:
    assert served.get("/version").json() == {
        "version": served.get("/server_info").json()["version"]
    }


@pytest.mark.parametrize("level", [0, 1])
def test_sleep_keep_resumes_requests_after_wake_up(served: Served, level: int) -> None:
    undisturbed = Asked(served).choice()["token_ids"]
    asked = Asked(served)
    answer = served.post(f"/sleep?level={level}&mode=keep")
    assert answer.json() == {"status": "sleeping", "level": level}
    assert served.get("/is_sleeping").json() == {"is_sleeping": True}
    assert served.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert asked.choice()["token_ids"] == undisturbed


def test_sleep_level_2_ends_with_update_weights(served: Served) -> None:
    expected = completion(served, 5).json()["choices"][0]["token_ids"]
    assert served.post("/sleep?level=2").status == 200
    assert completion(served, 1).status == 503
    update = {"weight_dir": str(checkpoint_root(served))}
    answer = served.post("/update_weights", update)
    assert answer.status == 400, "there is no memory for them"
    assert served.post("/wake_up?tags=weights").json() == {
        "status": "sleeping",
        "tags": ["weights"],
    }
    assert served.post("/update_weights", update).status == 200
    assert served.post("/wake_up?tags=kv_cache").json()["status"] == "awake"
    assert completion(served, 5).json()["choices"][0]["token_ids"] == expected
    served.post("/sleep?level=2")
    assert served.post("/wake_up").json()["status"] == "awake"
    waiting = threading.Thread(target=lambda: completion(served, 1))
    waiting.start()
    assert served.post("/update_weights", update).status == 200
    waiting.join()


def checkpoint_root(served: Served) -> Path:
    server = served.llm.serving._server
    assert server is not None
    return Path(server.config.checkpoint_roots[0])


def test_reset_prefix_cache_is_refused_while_requests_use_it(served: Served) -> None:
    def hits() -> int:
        before = served.do(served.llm.stats()).num_prefix_hit_tokens
        completion(served, 1)
        return served.do(served.llm.stats()).num_prefix_hit_tokens - before

    assert served.post("/reset_prefix_cache").json() == {"success": True}
    assert hits() == 0
    assert hits() > 0
    assert served.post("/reset_prefix_cache").json() == {"success": True}
    assert hits() == 0
    served.post("/pause?mode=keep")
    served.post("/resume")
    assert hits() == 0, "a pause clears the cache, too"
    served.post("/pause?mode=keep&clear_cache=false")
    served.post("/resume")
    assert hits() > 0
    asked = Asked(served)
    assert served.post("/reset_prefix_cache").json() == {"success": False}
    forced = served.post("/reset_prefix_cache?reset_running_requests=true")
    assert forced.json() == {"success": True}
    assert asked.choice()["finish_reason"] == "length"


def test_usage_counts_cached_tokens_once_for_each_prompt(served: Served) -> None:
    other = prompt_of(20, 1)

    def num_cached(*prompts: list[int], **fields: Any) -> int:
        body = {"prompt": prompts, "max_tokens": 2, "n": 2, **fields}
        _, usage = served.completed("/v1/completions", body)
        return usage["prompt_tokens_details"]["cached_tokens"]

    served.post("/reset_prefix_cache")
    assert num_cached(PROMPT) == 0
    assert num_cached(PROMPT, other) == 16
    assert num_cached(PROMPT, cache_salt="other") == 0
    assert num_cached(PROMPT, extra_key="other") == 0
    assert num_cached(PROMPT, cache_salt="other") == 16
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert num_cached(PROMPT, other, **streamed) == 32
    reply = served.post("/generate", {"input_ids": PROMPT}).json()
    assert reply["meta_info"]["cached_tokens"] == 16
    for name in ("cache_salt", "extra_key"):
        reply = served.post("/generate", {"input_ids": PROMPT, name: "new"}).json()
        assert reply["meta_info"]["cached_tokens"] == 0
    assert completion(served, 1, cache_salt="").status == 400


def test_weight_checker_answers_for_each_weight_and_compares(served: Served) -> None:
    checksums = served.post("/weight_checker", {"action": "checksum"}).json()["checksums"]
    engine = DynamicInferenceEngine.from_model(directory(), CONFIG)
    assert checksums == engine.weight_checksums().checksums
    assert {"model.norm.weight", "model.embed_tokens.weight"} <= set(checksums)
    same = served.post("/weight_checker", {"action": "compare", "baseline": checksums})
    assert same.json() == {"match": True, "mismatches": []}
    other = {**checksums, "model.norm.weight": "0" * 16, "added": "1" * 16}
    del other["model.embed_tokens.weight"]
    differs = served.post("/weight_checker", {"action": "compare", "baseline": other}).json()
    names = ["added", "model.embed_tokens.weight", "model.norm.weight"]
    assert differs == {"match": False, "mismatches": names}
    for bad in ({"action": "reset"}, {"action": "compare"}):
        assert served.post("/weight_checker", bad).status == 400


def test_weight_checker_of_released_weights_is_a_conflict(served: Served) -> None:
    assert served.post("/sleep?level=1").status == 200
    answer = served.post("/weight_checker", {"action": "checksum"})
    assert answer.status == 409
    assert "the weights' memory is released" in answer.json()["error"]["message"]
    assert served.post("/wake_up").status == 200


@pytest.mark.parametrize(
    "path", ["/pause?mode=stop", "/sleep?level=3", "/wake_up?tags=disk", "/pause?clear_cache=2"]
)
def test_unknown_modes_are_refused(served: Served, path: str) -> None:
    answer = served.post(path)
    assert (answer.status, answer.json()["error"]["code"]) == (400, 400)
    served.post("/resume")
