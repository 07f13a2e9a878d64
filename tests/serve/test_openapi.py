"""Requests made from the OpenAPI document of each protocol get neither a 5xx nor a status that the
document lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout import ServeConfig
from tests.serve.served import Served, served_directory

pytestmark = pytest.mark.distributed

SECONDS = 300
KEY = "master"
# What a body may be is more than JSON Schema says: ids are within a vocabulary, an update is begun
# before it ends. Nobody logs in.
EXCLUDED = "positive_data_acceptance,use_after_free,ensure_resource_availability"
# /health_generate says 503 while another request has paused the engines: see test_health.py.
EXCLUDED_PATHS = "^/health_generate$"


@pytest.fixture(params=["openai", "vllm", "sglang"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    server = served_directory(
        ServeConfig(
            port=0,
            protocols=(request.param,),
            api_key=KEY,
            admin_key=KEY,
            max_n=2,
            max_samples=4,
            max_model_len=64,
            request_timeout_s=2.0,  # some requests pause the engines, and the rest must go on
            weight_transfer_timeout_s=1.0,
        )
    )
    try:
        yield server
    finally:
        server.close()


@pytest.mark.slow
def test_no_request_from_the_document_gets_an_answer_that_it_does_not_name(
    served: Served, tmp_path: Path
) -> None:
    pytest.importorskip("schemathesis")
    program = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
    options = {
        "--max-time": SECONDS,
        "--header": f"Authorization: Bearer {KEY}",
        "--exclude-checks": EXCLUDED,
        "--exclude-path-regex": EXCLUDED_PATHS,
        "--request-timeout": 60,
        "--warnings": "off",
    }
    words = [str(word) for pair in options.items() for word in pair]
    ended = subprocess.run(
        [*program, *words, "--continue-on-failure", "--suppress-health-check=all"],
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        cwd=tmp_path,  # it keeps what it found there
    )
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2_000:]
    assert served.get("/health").status == 200
    stats = served.do(served.llm.stats())
    assert stats.num_running == stats.num_waiting == 0
