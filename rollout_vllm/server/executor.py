"""ServerExecutor: the weights of a vLLM server, which it loads from a file of a verified update.

`rollout_vllm.server.engine` makes it; Engine uses it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rollout.errors import EngineStateError, RolloutError, WeightUpdateError
from rollout.weights.lora import LoraAdapter
from rollout.weights.update import NamedTensors, by_name, check_checksum
from rollout.weights.version import next_version
from rollout_vllm.server.client import VllmServer
from rollout_vllm.server.staged_file import StagedFile
from rollout_vllm.verified import VerifiedWeights

_logger = logging.getLogger(__name__)
UNNAMED = "default"  # vLLM's name of weights that nobody has named


class ServerExecutor(VerifiedWeights):
    """Implements `Executor` and `ServingWeights` over a vLLM server.

    An update is verified and written to a file while the old weights are served. The commit pauses
    the server, lets its workers reload the weights from the file, names them and resumes. vLLM
    cannot take a load back. So if one fails, the server stays paused, `has_values` is False, and
    a full update repairs it.

    The server's name of the weights is "VERSION@NAME", with the name of this engine.
    """

    def __init__(
        self,
        server: VllmServer,
        directory: Path,
        version: int,
        *,
        name: str,
        updates_directory: Path,
        update_timeout_s: float,
        reject_non_finite: bool,
    ) -> None:
        super().__init__(directory, reject_non_finite=reject_non_finite)
        self._server, self._name = server, name
        self._updates_directory, self._timeout_s = updates_directory, update_timeout_s
        self.version = version
        self.is_settled: Callable[[], bool] = lambda: True

    def start(self, directory: Path) -> None:
        """Let the server serve the checkpoint in `directory` under this engine's name.

        Unnamed weights are those with which the server was started. Named ones were updated by
        another engine, and are loaded again.
        """
        found = self._server.call("GET", "/weight_info")["weight_version"]
        if found != UNNAMED:
            _logger.warning("the vLLM server has the weights %r; loading %s", found, directory)
            self._server.call("POST", "/pause?mode=keep")
            self._reload(directory)
        self._name_weights(self.version)
        if found != UNNAMED:
            self._server.call("POST", "/resume")
        if self._server.call("GET", "/is_paused")["is_paused"]:
            raise EngineStateError(
                f"the vLLM server at {self._server.url} is paused; resume it: POST /resume"
            )

    def _reload(self, directory: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        self._server.call("POST", "/collective_rpc", body, timeout_s=self._timeout_s)

    def _name_weights(self, version: int) -> None:
        label = f"{version}@{self._name}"
        self._server.call("POST", "/update_weight_version", {"new_version": label})
        self.version, self._server.expected_label = version, label

    # ---- the weights that are served

    def require_values(self, what: str) -> None:
        if not self.has_values:
            raise EngineStateError(
                f"cannot {what}: an update failed halfway in the vLLM server, which is paused; "
                "commit a full update"
            )

    def require_resident(self, what: str) -> None:
        pass  # the weights are never released

    # ---- updates

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedFile:
        start = time.perf_counter()
        if isinstance(named_tensors, LoraAdapter):
            raise WeightUpdateError(
                "engine='vllm-server' takes whole weights only; push merged_tensors(model) of "
                "trainer_hooks.weight_sync in place of the adapter"
            )
        given = by_name(named_tensors)
        tensors = self._read(given, self._shapes, check, "model's directory")
        fingerprints = self._hashed(tensors, check)
        if source_checksum:
            check_checksum(fingerprints, source_checksum)
        return StagedFile(tensors, fingerprints, self._updates_directory, start)

    def commit_weights(self, staged: StagedFile, version: int | None) -> int:
        version = next_version(self.version, version)
        self._pause()
        self.has_values = False
        try:
            self._reload(staged.directory)
            self._name_weights(version)
            self._server.call("POST", "/resume")
        except RolloutError as error:
            raise WeightUpdateError(
                f"the vLLM server failed to load the update ({error}); its weights may be mixed, "
                "so it stays paused until a full update is committed"
            ) from error
        self._set_served(staged.fingerprints)
        return staged.num_bytes

    def _pause(self) -> None:
        """Pause the server, also for its other clients, whose requests continue afterwards."""
        if self._server.failure is not None:
            raise WeightUpdateError(f"{self._server.failure}; its weights are kept")
        label, self._server.expected_label = self._server.expected_label, None
        try:
            self._server.call("POST", "/pause?mode=keep", timeout_s=self._timeout_s)
        except RolloutError as error:
            self._server.expected_label = label
            raise WeightUpdateError(f"{error}; the serving weights are kept") from error

    def set_version(self, version: int) -> None:
        self.require_values("change the version of the weights")
        version = next_version(self.version, version)
        label, self._server.expected_label = self._server.expected_label, None
        try:
            self._name_weights(version)
        except RolloutError as error:
            self._server.expected_label = label
            raise WeightUpdateError(f"{error}; the version is kept") from error

    # ---- ranks

    def check_ranks(self) -> None:
        """Raise LockstepError if the server must not be used any more, and all records that have
        ended were returned."""
        if self._server.failure is not None and self.is_settled():
            raise self._server.failure

    def close(self) -> None:
        self._is_closed = True
        self._server.close()
