"""LLM.serve over the engine of this process, and over a fleet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from rollout import (
    LLM,
    DynamicInferenceEngine,
    EngineState,
    EngineStateError,
    SamplingParams,
    ServeConfig,
)
from rollout.errors import CoordinatorLostError
from tests.apis.fleets import directory, weights
from tests.serve.served import CONFIG
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed

PROMPT = prompt_of(9)
LONG = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module", params=[False, True], ids=["own engine", "fleet"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(directory(), None, CONFIG, use_coordinator=request.param) as llm:
        yield llm


@pytest.fixture
def served(llm: LLM) -> Iterator[LLM]:
    llm.serve(ServeConfig(port=0), blocking=False)
    yield llm
    llm.stop_serving()


def post(llm: LLM, path: str, body: Any) -> Any:
    assert llm.serving_address is not None
    host, port = llm.serving_address
    request = urllib.request.Request(
        f"http://{host}:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def tokens_of(llm: LLM, **fields: Any) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "return_token_ids": True}
    return post(llm, "/v1/completions", body | fields)["choices"][0]["token_ids"]


def test_serve_returns_the_tokens_of_generate(llm: LLM) -> None:
    params = SamplingParams(num_tokens_to_generate=8, seed=3)
    expected = llm.generate([PROMPT], params)[0].generated_tokens
    llm.serve(ServeConfig(port=0), blocking=False)
    assert tokens_of(llm) == expected
    llm.stop_serving()
    assert llm.serving_address is None
    assert llm.generate([PROMPT], params)[0].generated_tokens == expected


def test_serve_shares_state_with_methods_of_the_llm(served: LLM) -> None:
    served.pause()
    assert served.state is EngineState.PAUSED
    version = served.update_weights(weights(1).state_dict()).version
    served.unpause()
    assert tokens_of(served)
    checksums = post(served, "/weight_checker", {})["checksums"]
    engine = DynamicInferenceEngine.from_model(weights(1), CONFIG)
    assert checksums == engine.weight_checksums().checksums
    post(served, "/pause?mode=keep", {})
    assert served.stats().state is EngineState.PAUSED
    post(served, "/resume", {})
    assert served.weights_version == version


def test_a_second_server_is_refused(served: LLM) -> None:
    with pytest.raises(EngineStateError, match="serves already"):
        served.serve(ServeConfig(port=0), blocking=False)
    assert tokens_of(served)


def test_stop_serving_answers_requests_and_empties_the_engine(llm: LLM) -> None:
    llm.serve(ServeConfig(port=0, drain_timeout_s=0.0), blocking=False)
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(post(llm, "/v1/completions", LONG)))
    client.start()
    while not llm.stats().num_running:
        assert not answers
    llm.stop_serving()
    client.join()
    assert answers[0]["choices"][0]["finish_reason"] == "abort"
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == stats.num_paused == 0


def test_a_served_llm_refuses_generate() -> None:
    with LLM(directory(), None, CONFIG) as llm:
        (group,) = llm.submit([PROMPT], SamplingParams(num_tokens_to_generate=2))
        with pytest.raises(EngineStateError, match="collect"):
            llm.serve(ServeConfig(port=0), blocking=False)
        assert llm.collect()[0].group_id == group
        llm.serve(ServeConfig(port=0), blocking=False)
        with pytest.raises(EngineStateError, match="stop_serving"):
            llm.generate([PROMPT])


_PROGRAM = """
import sys, threading, time
from rollout import LLM, ServeConfig

def report():
    while llm.serving_address is None:
        time.sleep(0.01)
    print("serving", flush=True)

with LLM(sys.argv[1], buffer_size_gb=0.02, num_threads=1) as llm:
    threading.Thread(target=report).start()
    llm.serve(ServeConfig(port=0))
print("ended", flush=True)
"""


def test_sigterm_ends_a_blocking_server() -> None:
    words = [sys.executable, "-c", _PROGRAM, directory()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "serving\n"
        program.send_signal(signal.SIGTERM)
        assert program.stdout.read() == "ended\n"
        assert program.wait(timeout=100) == 0


def test_a_blocking_serve_raises_when_its_fleet_fails() -> None:
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            llm.serve(ServeConfig(port=0))
        except CoordinatorLostError as error:
            errors.append(error)

    with LLM(directory(), None, CONFIG, use_coordinator=True) as llm:
        serving = threading.Thread(target=serve)
        serving.start()
        while llm.serving_address is None:
            assert serving.is_alive()
        assert len(tokens_of(llm)) == 8
        os.kill(coordinator_pid(llm), signal.SIGKILL)
        serving.join(120)
        assert not serving.is_alive(), "it ends"
        (error,) = errors
        assert "coordinator" in str(error)
        assert llm.serving_address is None


def coordinator_pid(llm: LLM) -> int:
    fleet = llm._runtime._llm._fleet
    return int(fleet._coordinator.pid)
