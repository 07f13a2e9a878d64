"""WorkerExecutor: runs an engine on one rank, the Worker of this process.

Used by `rollout.engine`, and extended by `rollout.tensor_parallel.executor` to several ranks. Made
by `rollout.engine.build`. It changes the Worker's KV cache and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import RankUse
from rollout.weights.fingerprints import checksum_of_shares, checksums_of_shares
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors
from rollout.weights.version import next_version
from rollout.worker.worker import Worker

_P = ParamSpec("_P")
_R = TypeVar("_R")


class WorkerExecutor:
    """Implements `StepExecutor` of `rollout.engine.protocols` on the one rank of this process.
    `run` calls a method of Worker on every rank. TensorParallelExecutor overrides `run`, and the
    methods that need more than one such call."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.kv, self.weights = worker, worker.kv, worker.weights
        self.overlaps = worker.overlaps

    def run(
        self, method: Callable[Concatenate[Worker, _P], _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> list[_R]:
        """Run a method of Worker on all ranks. Returns a list of results in the order of ranks."""
        return [method(self.worker, *args, **kwargs)]

    # ---- steps

    @property
    def num_graph_captures(self) -> int:
        """Number of steps captured so far; 0 where steps run eagerly."""
        return self.worker.num_graph_captures

    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Start a step. The returned function waits for its result."""
        return self.worker.launch(plan)

    def warm_up(self) -> int:
        """Capture graphs of steps before requests need them. Returns how many were captured."""
        return self.run(Worker.warm_up)[0]

    # ---- weights

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedWeights:
        """Verify and prepare an update. The served weights do not change. Any thread may call it.
        `check` is called before each tensor, and raises to cancel the staging. `source_checksum` is
        the checksum that the update must have, or "" for any."""
        return self.worker.stage_weights(named_tensors, check, source_checksum)

    def commit_weights(self, staged: StagedWeights, version: int | None) -> int:
        """Serve a staged update on all ranks or on none. Returns the bytes written. `version` None
        means the next version."""
        return self.worker.commit_weights(staged, version)

    def set_version(self, version: int) -> None:
        """Change the version of the served weights to `version`. Raises EngineStateError if the
        weights have no values. Refuses an illegal version before any rank is called."""
        self.weights.require_values("set the generation epoch")
        self.run(Worker.set_version, next_version(self.weights.version, version))

    def weights_checksum(self) -> str:
        """Return a checksum of all weights, which does not depend on the number of ranks. Raises
        EngineStateError while the weights are released or have no values."""
        self._require_readable("compute a checksum")
        return checksum_of_shares(self.run(Worker.fingerprint_share))

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksum of each named weight, by name. Raises EngineStateError while the
        weights are released or have no values."""
        self._require_readable("compute checksums")
        return checksums_of_shares(self.run(Worker.fingerprint_share, names))

    def _require_readable(self, what: str) -> None:
        """Raise EngineStateError if the weights cannot be read."""
        # Before ranks are called, because an error on a rank aborts collectives.
        self.weights.require_resident(what)
        self.weights.require_values(what)

    # ---- ranks

    def rank_uses(self) -> tuple[RankUse, ...]:
        """Return each rank's memory and CPU time, in the order of ranks."""
        return (*self.run(Worker.rank_use),)

    def kv_data_ptrs(self) -> dict[str, int]:
        """Return the address of each layer's KV tensor on this rank, by name, or {} while
        released."""
        return self.kv.data_ptrs()

    def check_ranks(self) -> None:
        """Raise LockstepError if another rank has ended. On one rank, do nothing."""

    def close(self) -> None:
        """Release the KV cache's memory. May be called again if it fails."""
        self.worker.close()
