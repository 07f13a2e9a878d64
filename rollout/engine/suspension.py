"""Suspension: releases the memory of the KV cache and of the weights, and restores it.

`rollout.engine.build` creates it, and Engine calls it. `rollout_vllm.suspension`, `rollout.testing`
and `trainer_hooks.phase` import the argument checks. The servers in `rollout.serve` and
`rollout_verl.server` import the names of the resources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.reports import MemoryStatus, ResumeReport, SuspendReport
from rollout.engine.output_processor import OutputProcessor
from rollout.errors import ConfigError
from rollout.scheduling.scheduler import Scheduler
from rollout.worker.executor import WorkerExecutor
from rollout.worker.worker import MemoryUse, Worker

KV_CACHE, WEIGHTS = RESOURCES = ("kv_cache", "weights")
_Mode = KVCacheManagementMode
_P = ParamSpec("_P")


class Suspension:
    """Implements `SuspensionInterface` over a WorkerExecutor.

    It remembers which resources are released, and the mode under which the KV cache was released:

    - PERSIST leaves the KV cache in place.
    - OFFLOAD copies the blocks in use to the host and releases the memory.
    - RECOMPUTE releases the memory without a copy. Running requests return to the queue and are
      prefilled again.

    If `keeps_addresses` is set, only PERSIST is allowed, because another mode would move the KV
    cache.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        executor: WorkerExecutor,
        default_mode: KVCacheManagementMode,
        keeps_addresses: bool,
    ) -> None:
        self._scheduler, self._outputs = scheduler, outputs
        self._executor = executor
        self._keeps_addresses = keeps_addresses
        self._default_mode = self._mode = default_mode
        self._num_requeued = 0  # requests queued again since the KV cache was last in place
        self._to_restore: list[str] = []  # resources whose release began, even if it failed
        self._released: set[str] = set()  # resources whose release succeeded

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        *,
        discard: bool,
        is_first: bool,
    ) -> SuspendReport:
        """Release those resources in `release` that are not released yet.

        `mode` applies to the KV cache; None means the config's mode. Weights are copied to the host
        first, unless `discard`. Resources that an earlier, failed attempt released are restored
        first: all of them if `is_first`, else those in `release`.

        Raises ConfigError for an unknown resource or mode, and for a mode that would move a KV
        cache whose addresses must stay. After any other exception, call `resume` to restore
        everything, or retry.
        """
        start = time.perf_counter()
        check_resources(release, discard=discard)
        chosen = self._checked_mode(mode)
        if is_first:
            self.resume()
            self._mode = chosen
        released, num_requeued = dict.fromkeys(RESOURCES, 0), self._num_requeued
        num_resident = 0
        if WEIGHTS in release and WEIGHTS not in self._released:
            self._begin_release(WEIGHTS)
            num_resident += self._sum(Worker.num_resident_bytes, of_weights=True)
            released[WEIGHTS] = self._sum(Worker.release_weights, discard=discard)
            self._released.add(WEIGHTS)
        is_in_place = KV_CACHE not in self._released or self._mode is _Mode.PERSIST
        if KV_CACHE in release and is_in_place:
            self._begin_release(KV_CACHE)
            self._mode = chosen
            if chosen is not _Mode.PERSIST:
                num_resident += self._sum(Worker.num_resident_bytes, of_weights=False)
            released[KV_CACHE] = self._release_kv()
            self._released.add(KV_CACHE)
        kept, status = self._executor.run(Worker.after_suspend), self.status()
        return SuspendReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_released=sum(released.values()),
            resident_bytes_released=min(num_resident, sum(released.values())),
            bytes_kept=sum(status.resident_bytes.values()),
            bytes_on_host=sum(status.bytes_on_host.values()),
            released_by_owner=released,
            kept_by_owner=status.resident_bytes,
            kept_beside={name: sum(rank[name] for rank in kept) for name in kept[0]},
            num_requests_requeued=self._num_requeued - num_requeued,
        )

    def resume(self, only: str | None = None) -> ResumeReport:
        """Restore all resources whose release began, or only the resource `only`. It can be called
        again after an exception."""
        start = time.perf_counter()
        restored, was_incomplete = dict.fromkeys(RESOURCES, 0), bool(self._to_restore)
        for resource in (WEIGHTS, KV_CACHE):
            if resource in self._to_restore and only in (resource, None):
                restored[resource] = self._restore(resource)
        is_complete = was_incomplete and not self._to_restore
        graphs_recaptured = self._executor.run(Worker.after_resume)[0] if is_complete else 0
        num_requeued = 0
        if KV_CACHE not in self._to_restore:
            num_requeued, self._num_requeued = self._num_requeued, 0
        return ResumeReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_restored=sum(restored.values()),
            restored_by_owner=restored,
            graphs_recaptured=graphs_recaptured,
            num_requests_recomputed=num_requeued,
        )

    def is_complete_with(self, only: str | None) -> bool:
        """Return whether no resource stays released once `only` is restored (None: all resources).
        Raises ConfigError for an unknown resource."""
        check_only(only)
        return only is None or all(resource == only for resource in self._to_restore)

    def drop_unused_copies(self) -> None:
        """Free the host copies of KV blocks that no request uses. O(1) if all copies are in use,
        else O(offloaded blocks)."""
        kv, manager = self._executor.kv, self._scheduler.kv_cache_manager
        # Every used block has a copy on the host, so further copies are unused.
        if kv.num_offloaded_bytes > manager.num_used_blocks * kv.bytes_per_block:
            manager.drop_unused_blocks()  # no later request may match these blocks
            unused = [block for block in kv.offloaded_blocks if not manager.num_users(block)]
            self._executor.run(Worker.discard_kv, unused)

    def status(self) -> MemoryStatus:
        """Return how much KV cache and weight memory is resident, on the host or released."""
        use = sum(self._executor.run(Worker.memory_use), start=MemoryUse())
        weights = self._executor.weights
        return MemoryStatus(
            resident_bytes={KV_CACHE: use.kv, WEIGHTS: use.weights},
            bytes_on_host={KV_CACHE: use.kv_on_host, WEIGHTS: use.weights_on_host},
            kv_mode=self._mode.value,
            released=tuple(resource for resource in RESOURCES if resource in self._released),
            to_restore=tuple(self._to_restore),
            has_weights=weights.has_values,
            lora_base_bytes=use.lora_base,
            routing_bytes=self._scheduler.num_routing_bytes,
        )

    # ---- one resource

    def _begin_release(self, resource: str) -> None:
        if resource in self._to_restore:  # an earlier release failed midway
            self._restore(resource)
        self._to_restore.append(resource)

    def _restore(self, resource: str) -> int:
        """Restore `resource`. Returns the number of bytes copied back or made usable again."""
        self._released.discard(resource)
        if resource == WEIGHTS:
            num_bytes = self._sum(Worker.restore_weights)
        else:
            num_bytes = self._restore_kv()
        self._to_restore.remove(resource)
        return num_bytes

    def _release_kv(self) -> int:
        """Release the KV cache under the current mode. Returns the number of bytes released."""
        if self._mode is _Mode.PERSIST:
            return 0
        if self._mode is _Mode.RECOMPUTE:
            requeued = self._scheduler.requeue_running()
            self._outputs.requeue(requeued)
            self._num_requeued += len(requeued)
        self._scheduler.kv_cache_manager.drop_unused_blocks()
        if self._mode is _Mode.OFFLOAD:
            self._sum(Worker.offload_kv, self._scheduler.kv_cache_manager.used_blocks())
        return self._sum(Worker.release_kv)

    def _restore_kv(self) -> int:
        if self._mode is _Mode.PERSIST:
            return 0
        num_bytes = self._sum(Worker.restore_kv)
        if self._mode is _Mode.OFFLOAD:
            num_bytes = self._sum(Worker.onload_kv)
        return num_bytes

    def _sum(
        self, method: Callable[Concatenate[Worker, _P], int], *args: _P.args, **kwargs: _P.kwargs
    ) -> int:
        """Run a method of Worker on all ranks. Returns the sum of the ranks' results."""
        return sum(self._executor.run(method, *args, **kwargs))

    def _checked_mode(self, mode: KVCacheManagementMode | str | None) -> KVCacheManagementMode:
        wanted = self._default_mode if mode is None else mode
        chosen = as_enum("mode", KVCacheManagementMode, wanted)
        if self._keeps_addresses and chosen is not _Mode.PERSIST:
            raise ConfigError(
                f"mode={chosen.value!r} would move the KV, but static_kv_memory_pointers=True and "
                "this memory_kind has no stable addresses; use memory_kind='reserved' on a CPU, "
                "'vmm' on CUDA"
            )
        return chosen


def check_only(only: str | None) -> None:
    """Raise ConfigError unless `only` is the name of a resource, or None."""
    if only is not None and only not in RESOURCES:
        raise ConfigError(f"only={only!r} must be one of {list(RESOURCES)}, or None for all")


def check_resources(release: Sequence[str], *, discard: bool) -> None:
    """Raise ConfigError unless `release` is a sequence of resource names. Raises ConfigError, too,
    if `discard` is set and "weights" are not among the names."""
    if isinstance(release, str) or not all(resource in RESOURCES for resource in release):
        raise ConfigError(f"release={release!r} must be a tuple of some of {list(RESOURCES)}")
    if discard and WEIGHTS not in release:
        raise ConfigError(f"discard_weights=True needs 'weights' in release={release!r}")
