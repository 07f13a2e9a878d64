"""Takes the place of vLLM's `tests/utils.py`: RemoteOpenAIServer starts our server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from vllm.entrypoints.openai.api_server import UnservedOptionError, serve_command
from vllm.utils.network_utils import get_open_port

VLLM_PATH = Path(__file__).parents[1]
ROCM_EXTRA_ARGS: list[str] = []
START_S, EXIT_S = 300, 60


class RemoteOpenAIServer:
    """A server of the tiny model under the name `model`; the context's end ends it.

    A test that asks for an option without a counterpart is skipped, with the reason.
    """

    DUMMY_API_KEY = "token-abc123"
    uds: str | None = None
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        options = ["--model", model, *vllm_serve_args]
        self.host, self.port = "127.0.0.1", get_open_port()
        if "--port" in options:
            self.port = int(options[options.index("--port") + 1])
        try:
            serve_command([*options, "--port", str(self.port)])
        except UnservedOptionError as error:
            pytest.skip(f"option: {error}")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
        self.proc = subprocess.Popen([*command, "--port", str(self.port)])
        try:
            self._wait()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.proc.poll() is None, f"the server exited with {self.proc.returncode}"
            try:
                if requests.get(self.url_for("health"), timeout=START_S).status_code == 200:
                    return
            except requests.ConnectionError:
                assert time.monotonic() < deadline, f"no server after {START_S} s"
            time.sleep(0.1)

    def _end(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options(options))

    def _client_options(self, options: dict[str, Any]) -> dict[str, Any]:
        fixed = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": 600} | options | fixed


def __getattr__(name: str) -> Callable[..., Any]:
    """Marks for kinds of hardware, and other kinds of servers: their tests are skipped."""
    if name.startswith("__"):
        raise AttributeError(name)

    def skipped(*arguments: object, **keywords: object) -> Any:
        mark = pytest.mark.skip(reason=f"in process: tests.utils.{name}")
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not keywords
        return mark(arguments[0]) if is_decorator else mark

    return skipped
