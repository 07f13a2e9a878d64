"""Clients of control routes that disconnect at any moment: each operation runs to its end, and the
server reports the engines' state."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.control.state import EngineState
from tests.run_seed import run_seed
from tests.serve.raw_client import connected, request_bytes
from tests.serve.served import Served
from tests.tiny_models import prompt_of
from tests.waiting import until

pytestmark = pytest.mark.distributed

NUM_CUTS = 200 if os.environ.get("ROLLOUT_TEST_LONG") == "1" else 30
LONGEST_S = 0.2  # that a client waits before it disconnects; most operations take some milliseconds
WITHIN_S = 100.0
COMPLETION = {"prompt": prompt_of(9), "max_tokens": 3, "seed": 1}


@pytest.fixture(scope="module")
def root(checkpoint: Path) -> Path:
    return checkpoint


@pytest.fixture(scope="module")
def served(checkpoint_server: Served) -> Served:
    return checkpoint_server


def operations(root: Path) -> list[tuple[str, Any]]:
    update = {"weight_dir": str(root)}
    paths: list[tuple[str, Any]] = [
        *((f"/pause?mode={mode}", {}) for mode in ("keep", "abort", "wait")),
        *((f"/sleep?level={level}&mode={mode}", {}) for level in (0, 1, 2) for mode in ("keep",)),
        *((f"/sleep?level={level}&mode={mode}", {}) for level in (1, 2) for mode in ("wait",)),
        *((f"/sleep?level={level}", {}) for level in (0, 1, 2)),
        ("/resume", {}),
        ("/wake_up", {}),
        ("/wake_up?tags=weights", {}),
        ("/wake_up?tags=kv_cache", {}),
        ("/release_kv_cache_memory", {}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/update_weights", update),
        ("/update_weight_version", {"new_version": "another"}),
        ("/abort_requests", {}),
        *(("/pause_generation", {"mode": mode}) for mode in ("abort", "retract", "in_place")),
        ("/continue_generation", {}),
        ("/release_memory_occupation", {}),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
        ("/resume_memory_occupation", {}),
        ("/flush_cache", {}),
        ("/update_weights_from_disk", {"model_path": str(root)}),
    ]
    return paths


def cut(served: Served, path: str, body: Any, seconds: float) -> None:
    """Send a request, and disconnect after `seconds`."""
    client = connected((served.host, served.port))
    client.sendall(request_bytes(path, body))
    time.sleep(seconds)
    client.close()


def reported(served: Served) -> tuple[bool, bool, str]:
    """Return whether the server reports a pause, a sleep, and the state in its metrics."""
    metrics = served.get("/metrics").body.decode()
    found = re.search(r'rollout_engine_state\{state="(\w+)"\} 1.0', metrics)
    assert found is not None
    return (
        served.get("/is_paused").json()["is_paused"],
        served.get("/is_sleeping").json()["is_sleeping"],
        found.group(1),
    )


def is_true(served: Served) -> bool:
    """Return whether the server reports the state of the engines, unless it has just changed."""
    before = served.do(served.llm.stats()).state
    is_paused, is_sleeping, name = reported(served)
    if served.do(served.llm.stats()).state is not before or name != before.name:
        return False
    if is_paused != (before is not EngineState.RUNNING):
        return False
    if before is EngineState.PAUSED:
        return True  # asleep or not: a sleep of level 0 releases nothing
    return is_sleeping == (before is EngineState.SUSPENDED)


def recover(served: Served, root: Path) -> None:
    """Recover as a trainer does that does not know the result of its last request."""
    for path in ("/wake_up", "/resume"):
        assert served.post(path).status == 200
    answer = served.post("/v1/completions", COMPLETION)
    if answer.status == 503 and b"without weights" in answer.body:
        assert served.get("/health").status == 503
        assert served.post("/update_weights", {"weight_dir": str(root)}).status == 200
        answer = served.post("/v1/completions", COMPLETION)
    assert answer.status == 200, answer.body
    assert len(answer.json()["choices"]) == 1


class Load:
    """A client that asks for one completion after the other."""

    def __init__(self, served: Served) -> None:
        self._served, self._is_ending = served, False
        self._statuses: set[int] = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": prompt_of(5), "max_tokens": 40, "ignore_eos": True}
        while not self._is_ending:
            self._statuses.add(self._served.post("/v1/completions", body).status)

    def end(self) -> set[int]:
        """Begin no more, and wait for the last answer; returns the statuses."""
        self._is_ending = True
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), "a request has no answer"
        return self._statuses


def test_the_server_works_after_control_requests_that_are_cut_at_any_time(
    served: Served, root: Path
) -> None:
    chance, load = random.Random(run_seed()), Load(served)
    try:
        for index in range(NUM_CUTS):
            path, body = chance.choice(operations(root))
            seconds = LONGEST_S * 10 ** -chance.uniform(0.0, 3.0)
            cut(served, path, body, seconds)
            what = f"cut {index} of {path} {body} after {seconds:.4f} s"
            if chance.random() < 0.5:  # else the next request comes while it runs
                until(lambda: is_true(served), f"{what}: the server reports the engines' state")
            try:
                recover(served, root)
            except AssertionError as error:
                raise AssertionError(what) from error
            until(lambda: is_true(served), f"{what}: the server reports the engines' state")
            assert reported(served) == (False, False, "RUNNING"), what
            assert served.get("/health").status == 200, what
    finally:
        statuses = load.end()
    assert statuses <= {200, 503}
    assert served.get("/health_generate").status == 200


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("path", "state"),
    [
        ("/pause?mode=keep", EngineState.PAUSED),
        ("/sleep?level=1", EngineState.SUSPENDED),
        ("/release_memory_occupation", EngineState.SUSPENDED),
    ],
)
def test_an_operation_whose_client_has_gone_runs_to_its_end(
    served: Served, path: str, state: EngineState
) -> None:
    cut(served, path, {}, 0.01)
    until(lambda: served.do(served.llm.stats()).state is state, f"{path} has its effect")
    until(lambda: is_true(served), "the server reports it")
    assert served.post("/wake_up").status == 200
    assert served.post("/v1/completions", COMPLETION).status == 200


def test_a_pause_by_the_program_is_told_and_ended_over_http(served: Served) -> None:
    served.do(served.llm.pause())
    assert reported(served) == (True, False, "PAUSED")
    assert served.post("/resume").status == 200
    assert reported(served) == (False, False, "RUNNING")
