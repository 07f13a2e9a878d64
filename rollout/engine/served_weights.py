"""ServedWeights: which weights the engine serves, under which version, and how they change."""

from __future__ import annotations

import time

from rollout.errors import EngineStateError
from rollout.runner.weight_store import WeightStore
from rollout.runner.weight_update import (
    NamedTensors,
    StagedWeights,
    WeightUpdater,
    WeightUpdateReport,
    next_version,
)


class ServedWeights:
    """The only writer of the weights version. `store` holds the bytes, `updater` replaces them."""

    def __init__(self, updater: WeightUpdater, store: WeightStore, version: int) -> None:
        self._updater, self.store = updater, store
        self.version = version

    def checksum(self) -> str:
        """Checksum of all weights. Raises EngineStateError while they are released."""
        self.require_resident("compute a checksum")
        return self._updater.checksum()

    def stage(self, named_tensors: NamedTensors) -> StagedWeights:
        """Verify and prepare an update. Raises WeightUpdateError naming the tensor at fault."""
        return self._updater.stage(named_tensors)

    def check_version(self, version: int | None) -> int:
        """The version an update would get. Raises WeightUpdateError unless above the served one."""
        return next_version(self.version, version)

    def set_version(self, version: int) -> None:
        """Serve the same bytes under a new version. Raises WeightUpdateError, EngineStateError."""
        self.require_values("set the generation epoch")
        self.version = self.check_version(version)

    def commit(self, staged: StagedWeights, version: int | None) -> WeightUpdateReport:
        """Copy a staged update in place and serve it under `version`, None for the next one."""
        new_version = self.check_version(version)
        start = time.perf_counter()
        num_bytes = self._updater.commit(staged)
        self.store.note_written()
        self.version = new_version
        stall_seconds = time.perf_counter() - start
        checksum = self._updater.checksum()
        return WeightUpdateReport(
            version=new_version,
            seconds=staged.seconds + time.perf_counter() - start,
            stall_seconds=stall_seconds,
            num_bytes=num_bytes,
            checksum=checksum,
        )

    def require_resident(self, what: str) -> None:
        """Raise EngineStateError while the weights' memory is released."""
        if not self.store.is_resident:
            raise EngineStateError(
                f"cannot {what}: the weights' memory is released; resume(only='weights') first"
            )

    def require_values(self, what: str) -> None:
        """Raise EngineStateError while the weights' values are missing."""
        if not self.store.has_values:
            raise EngineStateError(
                f"cannot {what}: the weights were discarded; commit a full update first"
            )
