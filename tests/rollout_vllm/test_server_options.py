"""engine="vllm-server" before a server is used: options, fields, requests, the command line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout import ConfigError, InferenceConfig, SamplingParams
from rollout.cli.engine import with_server
from rollout.cli.settings import UsageError
from rollout.errors import InvalidRequestError
from rollout_vllm.server.engine import check_server_params, make_engine
from tests.tiny_models import tiny_model

DEAD = "http://127.0.0.1:9"  # the port of the discard protocol, at which nothing listens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"needs engine_options=\{'url'"),
        ({"engine_options": {"url": "localhost:8000"}}, "must be like http://HOST:PORT"),
        ({"engine_options": {"url": DEAD, "port": 1}}, r"engine_options\['port'\] is unknown"),
        ({"engine_options": {"url": DEAD, "timeout_s": 0}}, "must be a number above 0"),
        ({"engine_options": {"url": "http://10.1.1.1:80"}}, "give engine_options=.'updates_dir"),
        ({"engine_options": {"url": DEAD, "updates_directory": "/no"}}, "is not a folder"),
        ({"engine_options": {"url": DEAD}, "kv_cache_management_mode": "offload"}, "='offload'"),
        ({"engine_options": {"url": DEAD}, "dtype": "float16"}, "dtype='float16'.*give it to vllm"),
        ({"engine_options": {"url": DEAD}}, "does not answer .*vllm serve DIR --enable-scale-out"),
    ],
)
def test_make_engine_refuses_settings_that_a_vllm_server_cannot_follow(
    fields: dict[str, Any], message: str, directory: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(directory, InferenceConfig(engine="vllm-server", **fields))


class _WithoutDevelopmentMode(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def plain_server() -> Iterator[str]:
    """A server without the routes of vLLM's development mode."""
    server = HTTPServer(("127.0.0.1", 0), _WithoutDevelopmentMode)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_make_engine_names_the_way_to_start_a_vllm_server_with_its_routes(
    plain_server: str, directory: Path
) -> None:
    config = InferenceConfig(engine="vllm-server", engine_options={"url": plain_server})
    with pytest.raises(ConfigError, match=r"lacks the routes.*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        make_engine(directory, config)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(presence_penalty=0.5), r"presence_penalty=0.5 does not work"),
        (
            SamplingParams(temperature=0.5, return_log_probs=True, logprobs_mode="temperature"),
            "--logprobs-mode raw_logprobs",
        ),
    ],
)
def test_check_server_params_refuses_what_a_vllm_server_does_not_follow(
    params: SamplingParams, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_server_params(params, "raw_logprobs")


def test_beside_sets_the_engine_and_its_url() -> None:
    given = {"seed": 3, "engine_options": {"timeout_s": 5}}
    assert with_server(given, DEAD) == {
        "seed": 3,
        "engine": "vllm-server",
        "engine_options": {"url": DEAD, "timeout_s": 5},
    }
    for fields in ({"engine": "vllm"}, {"engine_options": {"url": "http://other:1"}}):
        with pytest.raises(UsageError, match="contradicts"):
            with_server(fields, DEAD)
