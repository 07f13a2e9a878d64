"""FileWeightTransfer: sends a trainer's weights to a server through files and HTTP calls.

Users pass it to TRL's asynchronous trainers as their `weight_transfer`. A FileWeightTransfer writes
directories of safetensors, which the server reads, and removes them.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout.errors import WeightUpdateError
from trainer_hooks.weight_sync.weight_files import WeightFiles, weight_directory

_POLL_S = 0.5


class FileWeightTransfer:
    """A `weight_transfer` for TRL's asynchronous trainers that needs no NCCL and no GPU.

        rollout serve model=DIR checkpoint_roots=/dev/shm
        trainer = AsyncGRPOTrainer(..., weight_transfer=FileWeightTransfer("http://127.0.0.1:8000"))

    Each update is a directory of safetensors, which the server reads and this object then removes.
    Engines freeze their requests at `pause`, and continue them at `resume` under the new weights.
    The object is not thread-safe. All methods raise WeightUpdateError with the server's reason.
    `directory`: folder for updates, below one of the server's checkpoint_roots, on a file system
    that trainer and server share. None means shared memory, or the system's folder for temporary
    files if there is none.
    `admin_key`: the server's key.
    `max_shard_bytes`: limit on a file. A larger tensor gets a file of its own.
    `start_timeout_s`: seconds that `init_weight_transfer` polls.
    `timeout_s`: seconds to wait for each reply.
    """

    def __init__(
        self,
        url: str,
        directory: str | Path | None = None,
        *,
        admin_key: str | None = None,
        max_shard_bytes: int = 2**30,
        start_timeout_s: float = 600.0,
        timeout_s: float = 1800.0,
    ) -> None:
        self._parent = None if directory is None else Path(directory).absolute()
        self._url, self._admin_key = url.rstrip("/"), admin_key
        self._max_shard_bytes = max_shard_bytes
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s
        self._is_paused = False
        # Trainer and server share a file system, so no proxy is used.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def init_weight_transfer(self) -> None:
        """Poll until the server is ready or a poll fails after `start_timeout_s`."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                self._call("GET", "/health")
                return
            except WeightUpdateError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_S)

    def pause(self) -> None:
        """Freeze the running requests, keeping their KV."""
        self._call("POST", "/pause?mode=keep&clear_cache=false")
        self._is_paused = True

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Write all tensors, and return when all engines have committed them.

        Gathering sharded tensors is a collective. A server that reports an error keeps its weights.
        """
        tensors = iter(iterator)
        try:
            with weight_directory(self._parent) as directory:
                with WeightFiles(directory, self._max_shard_bytes) as files:
                    for name, tensor in tensors:
                        files.add(name, tensor)
                self._call("POST", "/update_weights", {"weight_dir": str(directory)})
        except WeightUpdateError:
            for _ in tensors:  # gathering is a collective: this rank must take part to the end
                pass
            raise

    def resume(self) -> None:
        """Continue the frozen requests."""
        self._call("POST", "/resume")
        self._is_paused = False

    def destroy(self) -> None:
        """Resume the server's requests if they are still paused. The server keeps running."""
        if self._is_paused:
            self.resume()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        headers = {"Content-Type": "application/json"}
        if self._admin_key is not None:
            headers["Authorization"] = f"Bearer {self._admin_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        what = f"{method} {self._url}{path}"
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            with error:
                reason = _reason(error.read())
            raise WeightUpdateError(f"{what} answered {error.code}: {reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise WeightUpdateError(f"{what} got no answer: {error}") from error


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
