"""GET /health and /health_generate, and the reasons that refused requests get."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apis.fleets import weights
from tests.serve.served import Served

pytestmark = pytest.mark.distributed

COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 2}
READINESS = ("/health", "/health/", "/ping", "/ready")


@pytest.fixture(scope="module")
def root(checkpoint: Path) -> Path:
    return checkpoint


@pytest.fixture(scope="module")
def served(checkpoint_server: Served) -> Served:
    return checkpoint_server


def reason(served: Served, path: str) -> str:
    """The message of a 503; "" if there is none."""
    answer = served.post(path, COMPLETION) if path.startswith("/v1") else served.get(path)
    assert answer.status in (200, 503), answer.body
    return "" if answer.status == 200 else str(answer.json()["error"]["message"])


def test_health_generate_generates_a_token(served: Served) -> None:
    before = served.do(served.llm.stats()).num_sampled_tokens
    assert served.get("/health_generate").status == 200
    assert served.do(served.llm.stats()).num_sampled_tokens > before


def test_an_engine_without_weights_refuses_requests_and_is_not_healthy(
    served: Served, root: Path
) -> None:
    assert served.post("/sleep?level=2").status == 200
    assert served.post("/wake_up").json()["status"] == "awake"
    for path in (*READINESS, "/v1/completions", "/generate"):
        message = "" if path == "/generate" else reason(served, path)
        if path != "/generate":
            assert "PAUSED without weights" in message, path
    refused = served.post("/generate", {"input_ids": [1]})
    assert (refused.status, "without weights" in refused.json()["error"]["message"]) == (503, True)
    assert "PAUSED" in reason(served, "/health_generate")
    assert served.get("/is_paused").json() == {"is_paused": True}
    assert served.post("/update_weights", {"weight_dir": str(root)}).status == 200
    for path in (*READINESS, "/health_generate", "/v1/completions"):
        assert reason(served, path) == ""
    assert served.get("/is_paused").json() == {"is_paused": False}


def test_health_recovers_when_the_program_updates_the_weights(served: Served) -> None:
    assert served.post("/sleep?level=2").status == 200
    assert served.post("/wake_up").status == 200
    assert served.get("/health").status == 503
    served.do(served.llm.update_weights(weights()))
    assert reason(served, "/v1/completions") == ""
    assert served.get("/health").status == 200


def test_health_accepts_released_memory(served: Served) -> None:
    assert served.post("/release_memory_occupation").status == 200
    for path in READINESS:
        assert reason(served, path) == ""
    assert "SUSPENDED" in reason(served, "/health_generate")
    assert served.post("/resume_memory_occupation").status == 200
    assert reason(served, "/v1/completions") == ""
    assert reason(served, "/health_generate") == ""


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/pause", "/sleep?level=1"])
def test_health_accepts_a_pause(served: Served, path: str) -> None:
    assert served.post(path).status == 200
    for health in READINESS:
        assert served.get(health).status == 200
    assert reason(served, "/health_generate") != ""
    assert served.post("/wake_up").status == 200
    assert reason(served, "/health_generate") == ""
