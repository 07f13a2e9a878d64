"""A `vllm serve` process on loopback for tests, where vLLM is installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.vllm_engines import BLOCK_SIZE, directory_of
from tests.tiny_models import MAX_LENGTH

_START_S = 600.0
_ARGUMENTS = (
    *("--enable-scale-out", "--enforce-eager", "--skip-tokenizer-init"),
    *("--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE), "--dtype", "float32"),
    *("--max-model-len", str(MAX_LENGTH), "--num-gpu-blocks-override", "64"),
)


@dataclass
class ServerProcess:
    url: str
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """Stop the steps of the server. Its requests wait."""
        request = urllib.request.Request(f"{self.url}/pause?mode=keep", method="POST")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def kill(self) -> None:
        """End the server and its workers at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def vllm_server(log: Path) -> Iterator[ServerProcess]:
    """A server of the tests' model, in development mode. Its output goes to `log`."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` runs this module. The script asks for metadata that the CPU wheel does not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(directory_of()), "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *_ARGUMENTS],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = ServerProcess(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_up(server, log)
        yield server
    finally:
        if process.poll() is None:
            server.kill()


def _wait_until_up(server: ServerProcess, log: Path) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=10):
                return
        except OSError:
            assert server.process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
