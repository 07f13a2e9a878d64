"""ServerExecutor: the weights of a vLLM server, which it loads from a file of a verified update.

`rollout_vllm.server.engine` makes it; Engine uses it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollout.errors import EngineStateError, RolloutError, WeightUpdateError
from rollout.models.checkpoints.reader import Checkpoint
from rollout.telemetry import RankUse
from rollout.weights.update import Fingerprint, NamedTensors, checksum_of
from rollout.weights.version import next_version
from rollout.worker.worker import process_bytes
from rollout_vllm.server.client import VllmServer
from rollout_vllm.server.verified import StagedFile, fingerprints_of, verified_update

_logger = logging.getLogger(__name__)
UNNAMED = "default"  # vLLM's name of weights that nobody has named


class ServerExecutor:
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
        self._server, self._name = server, name
        self._updates_directory, self._timeout_s = updates_directory, update_timeout_s
        self._rejects = reject_non_finite
        # Its tensors are served until the first update.
        self._checkpoint: Checkpoint | None = Checkpoint.open(directory)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._checkpoint.items()}
        self._fingerprints: Mapping[str, Fingerprint] = {}
        self.version, self.has_values, self.is_finite = version, True, True
        self.is_settled: Callable[[], bool] = lambda: True
        self._is_closed = False

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

    @property
    def weights(self) -> ServerExecutor:
        return self

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def require_values(self, what: str) -> None:
        if not self.has_values:
            raise EngineStateError(
                f"cannot {what}: an update failed halfway in the vLLM server, which is paused; "
                "commit a full update"
            )

    def require_resident(self, what: str) -> None:
        pass  # the weights are never released

    def data_ptrs(self) -> dict[str, int]:
        return {}

    # ---- updates

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedFile:
        return verified_update(
            named_tensors,
            self._shapes,
            self._updates_directory,
            check,
            source_checksum,
            rejects_non_finite=self._rejects,
        )

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
        self.has_values, self.is_finite = True, staged.is_finite
        self._fingerprints, self._checkpoint = staged.fingerprints, None
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

    # ---- checksums

    def weights_checksum(self) -> str:
        self.require_values("compute a checksum")
        return checksum_of(self._served_fingerprints())

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        self.require_values("compute checksums")
        found = self._served_fingerprints()
        return {name: f"{found[name][0] % 2**64:016x}" for name in names}

    def _served_fingerprints(self) -> Mapping[str, Fingerprint]:
        if self._checkpoint is not None:
            self._fingerprints = dict(fingerprints_of(self._checkpoint.items()))
            self._checkpoint = None
        return self._fingerprints

    # ---- ranks

    def warm_up(self) -> int:
        return 0  # vLLM captures its graphs when it starts

    def rank_uses(self) -> tuple[RankUse, ...]:
        """Return the resource use of this process. The server does not report its own."""
        if self._is_closed:
            return ()
        return (
            RankUse(
                kv_bytes=0,
                weights_bytes=0,
                kv_on_host_bytes=0,
                weights_on_host_bytes=0,
                lora_base_bytes=0,
                rss_bytes=process_bytes(),
                cpu_seconds=time.process_time(),
                wait_seconds=0.0,
            ),
        )

    def kv_data_ptrs(self) -> dict[str, int]:
        return {}

    def check_ranks(self) -> None:
        """Raise LockstepError if the server must not be used any more, and all records that have
        ended were returned."""
        if self._server.failure is not None and self.is_settled():
            raise self._server.failure

    def close(self) -> None:
        self._is_closed = True
        self._server.close()
