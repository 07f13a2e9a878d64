"""Worker: one rank of an engine, with its model runner, KV cache and weights.

Used by `rollout.worker.executor` and `rollout.tensor_parallel`, which call its methods on each
rank, and by `rollout.engine.build` and `rollout.engine.suspension`. `rollout_vllm` calls
`process_bytes`. It changes the memory of the KV cache and of the weights.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from rollout.parallel.collectives import ONE_RANK, Collectives
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import RankUse
from rollout.weights.fingerprints import WeightShare
from rollout.weights.served import ServedWeights
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors
from rollout.worker.kv_cache import BlockIds, KVCache
from rollout.worker.model_runner import ModelRunner

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of the KV cache and of the weights.

    kv, weights: reserved bytes; 0 while released.
    kv_on_host, weights_on_host: host copies kept while suspended.
    lora_base: host copies of the base values of weights that a LoRA adapter has changed."""

    kv: int = 0
    weights: int = 0
    kv_on_host: int = 0
    weights_on_host: int = 0
    lora_base: int = 0

    def __add__(self, other: MemoryUse) -> MemoryUse:
        sums = (a + b for a, b in zip(astuple(self), astuple(other), strict=True))
        return MemoryUse(**dict(zip(self.__slots__, sums, strict=True)))


def _on_the_device(
    method: Callable[Concatenate[Worker, _P], _R],
) -> Callable[Concatenate[Worker, _P], _R]:
    """Decorate a method to run with the engine's device current in the calling thread."""

    @functools.wraps(method)
    def run(self: Worker, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._runner.as_current():
            return method(self, *args, **kwargs)

    return run


class Worker:
    """Model runner, KV cache and weights of one rank.

    A WorkerExecutor runs these methods on every rank. Other ranks are other processes, so arguments
    and results must be picklable. `launch`, `stage_weights` and `commit_weights` are exceptions,
    for which Follower has commands of its own."""

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVCache,
        weights: ServedWeights,
        collectives: Collectives = ONE_RANK,
    ) -> None:
        self._runner, self.kv, self.weights = runner, kv, weights
        self.collectives = collectives

    # ---- steps

    @property
    def overlaps(self) -> bool:
        """Whether the host can prepare a step while the previous one runs."""
        return self._runner.overlaps

    @property
    def num_graph_captures(self) -> int:
        """Number of steps captured so far; 0 where steps run eagerly."""
        return self._runner.num_graph_captures

    @_on_the_device
    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Start a step. The returned function waits for its result. See ModelRunner.launch."""
        return self._runner.launch(plan)

    @_on_the_device
    def warm_up(self) -> int:
        """Capture graphs of steps before requests need them. Returns how many were captured."""
        return self._runner.warm_up()

    @_on_the_device
    def after_suspend(self) -> dict[str, int]:
        """Return unused allocator memory to the system after a release. Returns the bytes still in
        use besides KV cache and weights, by name."""
        return self._runner.after_suspend()

    @_on_the_device
    def after_resume(self) -> int:
        """Check captured steps once all memory is restored. Returns how many must be captured
        again. All ranks must call it."""
        return self._runner.after_resume()

    # ---- the KV cache; see KVCache

    @_on_the_device
    def offload_kv(self, block_ids: BlockIds) -> int:
        """Copy these blocks to the host. Returns the bytes copied."""
        return self.kv.offload(block_ids)

    @_on_the_device
    def onload_kv(self) -> int:
        """Copy all offloaded blocks back into place. Returns the bytes copied."""
        return self.kv.onload(self.kv.offloaded_blocks)

    @_on_the_device
    def discard_kv(self, block_ids: BlockIds) -> int:
        """Drop the host copies of these blocks. Returns the bytes freed."""
        return self.kv.discard(block_ids)

    @_on_the_device
    def release_kv(self) -> int:
        """Release the KV cache's memory and its contents. Returns the bytes released."""
        return self.kv.release()

    @_on_the_device
    def restore_kv(self) -> int:
        """Reserve the KV cache's memory again, with undefined contents. Returns its bytes."""
        return self.kv.restore()

    # ---- the weights; see ServedWeights

    @_on_the_device
    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedWeights:
        """Verify and prepare this rank's part of an update. The served weights do not change. Any
        thread may call it. `check` and `source_checksum` are as in WorkerExecutor.stage_weights."""
        return self.weights.stage(named_tensors, check, source_checksum)

    @_on_the_device
    def commit_weights(self, staged: StagedWeights, version: int | None) -> int:
        """Serve a staged update as `version`, or as the next version if None. Returns the bytes
        written."""
        return self.weights.commit(staged, version)

    def set_version(self, version: int) -> None:
        """Change the version of the served weights to `version`."""
        self.weights.set_version(version)

    @_on_the_device
    def fingerprint_share(self, names: Sequence[str] | None = None) -> WeightShare:
        """Return this rank's part of the fingerprints of the named weights. None means all
        weights."""
        return self.weights.fingerprint_share(names)

    @_on_the_device
    def release_weights(self, *, discard: bool) -> int:
        """Release the weights' memory. Returns the bytes released. The values are copied to the
        host first, unless `discard`."""
        return self.weights.release(discard=discard)

    @_on_the_device
    def restore_weights(self) -> int:
        """Reserve the weights' memory again and copy kept values back. Returns the bytes copied."""
        return self.weights.restore()

    # ---- reports and the end

    def num_resident_bytes(self, *, of_weights: bool) -> int:
        """Return how many bytes of the weights, or else of the KV cache, take physical memory now.
        On a CPU these are the pages that were written to."""
        return self.weights.num_resident_bytes if of_weights else self.kv.num_resident_bytes

    def memory_use(self) -> MemoryUse:
        """Return this rank's bytes of the KV cache and of the weights."""
        kv, weights = self.kv, self.weights
        return MemoryUse(
            kv=kv.num_bytes if kv.is_resident else 0,
            weights=weights.num_bytes if weights.is_resident else 0,
            kv_on_host=kv.num_offloaded_bytes,
            weights_on_host=weights.num_bytes_on_host,
            lora_base=weights.num_base_bytes,
        )

    def rank_use(self) -> RankUse:
        """Return this rank's memory, CPU time and time in collectives."""
        use = self.memory_use()
        return RankUse(
            rank=self.collectives.rank,
            kv_bytes=use.kv,
            weights_bytes=use.weights,
            kv_on_host_bytes=use.kv_on_host,
            weights_on_host_bytes=use.weights_on_host,
            lora_base_bytes=use.lora_base,
            rss_bytes=process_bytes(),
            cpu_seconds=time.process_time(),
            wait_seconds=self.collectives.wait_seconds,
        )

    @_on_the_device
    def close(self) -> None:
        """Release the KV cache on the device and on the host. May be called again if it fails."""
        try:
            self.kv.discard(self.kv.offloaded_blocks)
        finally:
            self.kv.release()


def process_bytes() -> int:
    """Return the resident bytes of this process, or 0 on systems without /proc."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")
