"""Worker: all that an engine does with tensors, on one rank."""

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
from rollout.weights.fingerprints import checksums_of_shares
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

    kv, weights: reserved, 0 while released. *_on_host: copies that wait for resume. lora_base: on
    the host, what adapted weights are without their adapter.
    """

    kv: int
    weights: int
    kv_on_host: int
    weights_on_host: int
    lora_base: int

    def __add__(self, other: MemoryUse) -> MemoryUse:
        sums = (a + b for a, b in zip(astuple(self), astuple(other), strict=True))
        return MemoryUse(**dict(zip(self.__slots__, sums, strict=True)))


def _on_the_device(
    verb: Callable[Concatenate[Worker, _P], _R],
) -> Callable[Concatenate[Worker, _P], _R]:
    """Have a verb's kernels launched on the engine's device: another may be the thread's own."""

    @functools.wraps(verb)
    def run(self: Worker, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._runner.as_current():
            return verb(self, *args, **kwargs)

    return run


class Worker:
    """The verbs that an engine has for its runner, its KV cache and its served weights.

    `kv` and `weights` are to be read. Where several ranks run one engine,
    TensorParallelExecutor has them do each verb as well.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVCache,
        weights: ServedWeights,
        collectives: Collectives = ONE_RANK,
    ) -> None:
        self._runner, self.kv, self.weights = runner, kv, weights
        self._collectives = collectives

    # ---- steps

    @property
    def overlaps(self) -> bool:
        """Whether a step can be prepared while the one before runs."""
        return self._runner.overlaps

    @property
    def num_graph_captures(self) -> int:
        """Steps captured so far; 0 where steps run eagerly."""
        return self._runner.num_graph_captures

    @_on_the_device
    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Start a step; the function returned waits for its result. See ModelRunner.launch."""
        return self._runner.launch(plan)

    @_on_the_device
    def warm_up(self) -> int:
        """Capture ahead what steps would capture when they first need it. Returns how many."""
        return self._runner.warm_up()

    @_on_the_device
    def after_suspend(self) -> dict[str, int]:
        """Memory was released. Returns bytes that stay beside the KV and the weights, by name."""
        return self._runner.after_suspend()

    @_on_the_device
    def after_resume(self) -> int:
        """All memory is here again. Returns how many captured steps are lost."""
        return self._runner.after_resume()

    # ---- the KV cache; see KVCache

    @_on_the_device
    def offload_kv(self, block_ids: BlockIds) -> int:
        """Copy these blocks to the host. Returns bytes."""
        return self.kv.offload(block_ids)

    @_on_the_device
    def onload_kv(self) -> int:
        """Bring all offloaded blocks back in place. Returns bytes."""
        return self.kv.onload(self.kv.offloaded_blocks)

    @_on_the_device
    def discard_kv(self, block_ids: BlockIds) -> int:
        """Forget these offloaded blocks. Returns bytes freed."""
        return self.kv.discard(block_ids)

    @_on_the_device
    def release_kv(self) -> int:
        """Give the memory back; the contents are lost. Returns bytes."""
        return self.kv.release()

    @_on_the_device
    def restore_kv(self) -> int:
        """Reserve the memory again; the contents are undefined. Returns bytes."""
        return self.kv.restore()

    # ---- the weights; see ServedWeights

    @_on_the_device
    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedWeights:
        """Verify and prepare an update, from any thread; nothing changes."""
        return self.weights.stage(named_tensors, check, source_checksum)

    @_on_the_device
    def commit_weights(self, staged: StagedWeights, version: int | None) -> int:
        """Serve a staged update as `version`. Returns bytes written."""
        return self.weights.commit(staged, version)

    def set_version(self, version: int) -> None:
        """Serve the same weights as `version`."""
        self.weights.set_version(version)

    @_on_the_device
    def weights_checksum(self) -> str:
        """A checksum of all weights."""
        return self.weights.checksum()

    @_on_the_device
    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """The checksums of these weights, each by its name."""
        return checksums_of_shares([self.weights.fingerprint_share(names)])

    @_on_the_device
    def release_weights(self, *, discard: bool) -> int:
        """Release the memory, after a copy to the host unless `discard`. Returns bytes."""
        return self.weights.release(discard=discard)

    @_on_the_device
    def restore_weights(self) -> int:
        """Reserve the memory again, with the values that were kept. Returns bytes copied."""
        return self.weights.restore()

    # ---- all of it

    def check_ranks(self) -> None:
        """Raise LockstepError if a rank of the engine is gone."""

    def num_resident_bytes(self, *, of_weights: bool) -> int:
        """Bytes of the weights, or of the KV cache, that take memory: a host gives it to what is
        written to."""
        return self.weights.num_resident_bytes if of_weights else self.kv.num_resident_bytes

    def memory_use(self) -> MemoryUse:
        """Bytes by owner, as of now."""
        kv, weights = self.kv, self.weights
        return MemoryUse(
            kv=kv.num_bytes if kv.is_resident else 0,
            weights=weights.num_bytes if weights.is_resident else 0,
            kv_on_host=kv.num_offloaded_bytes,
            weights_on_host=weights.num_bytes_on_host,
            lora_base=weights.num_base_bytes,
        )

    def rank_use(self) -> RankUse:
        """What this rank uses."""
        use = Worker.memory_use(self)  # not that of all ranks
        return RankUse(
            rank=self._collectives.rank,
            kv_bytes=use.kv,
            weights_bytes=use.weights,
            kv_on_host_bytes=use.kv_on_host,
            weights_on_host_bytes=use.weights_on_host,
            lora_base_bytes=use.lora_base,
            rss_bytes=process_bytes(),
            cpu_seconds=time.process_time(),
            wait_seconds=self._collectives.wait_seconds,
        )

    def rank_uses(self) -> tuple[RankUse, ...]:
        """What all ranks of the engine use, in their order."""
        return (self.rank_use(),)

    @_on_the_device
    def close(self) -> None:
        """Give up the KV cache, on the device and on the host. May be tried again."""
        try:
            self.kv.discard(self.kv.offloaded_blocks)
        finally:
            self.kv.release()


def process_bytes() -> int:
    """Bytes of memory that this process takes; 0 where the system does not say."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")
