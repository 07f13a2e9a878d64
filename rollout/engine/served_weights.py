"""ServedWeights: which weights the engine serves, under which version, and how they change."""

from __future__ import annotations

from collections.abc import Callable

from rollout.errors import EngineStateError
from rollout.runner.weight_store import WeightStore
from rollout.runner.weight_update import (
    NamedTensors,
    StagedWeights,
    WeightUpdater,
    next_version,
)


class ServedWeights:
    """The only writer of the weights version. `store` holds the bytes, `updater` replaces them."""

    def __init__(self, updater: WeightUpdater, store: WeightStore, version: int) -> None:
        self._updater, self.store = updater, store
        self.version = version

    def checksum(self) -> str:
        """Checksum of all weights. Raises EngineStateError while they are not there."""
        self.require_resident("compute a checksum")
        self.require_values("compute a checksum")
        return self._updater.checksum()

    def stage(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedWeights:
        """Verify and prepare an update. Raises WeightUpdateError naming the tensor at fault."""
        self.require_resident("stage an update")
        return self._updater.stage(named_tensors, check, source_checksum)

    def check_version(self, version: int | None) -> int:
        """The version an update would get. Raises WeightUpdateError unless above the served one."""
        return next_version(self.version, version)

    def set_version(self, version: int) -> None:
        """Serve the same bytes under a new version. Raises WeightUpdateError, EngineStateError."""
        self.require_values("set the generation epoch")
        self.version = self.check_version(version)

    def commit(self, staged: StagedWeights, version: int | None) -> int:
        """Copy a staged update in place and serve it under `version`, None for the next one.
        Returns the bytes written.

        Whatever is raised meanwhile, weights and version are then those of before.
        """
        new_version = self.check_version(version)
        before, had_values = self.version, self.store.has_values
        backup = self._updater.backup_for(staged)
        try:
            self.store.has_values = False  # a failure of the restore must not go unseen
            num_bytes = self._updater.write(staged)
            self.version = new_version
            self.store.has_values = True
        except BaseException:
            backup.restore()
            self.version, self.store.has_values = before, had_values
            raise
        return num_bytes

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
                f"cannot {what}: the weights were discarded, or an update of them was cut off; "
                "commit a full update first"
            )
