"""Suspension: releases the memory of the KV cache and of the weights, and restores it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.reports import MemoryStatus, ResumeReport, SuspendReport
from rollout.engine.output_processor import OutputProcessor
from rollout.errors import ConfigError
from rollout.scheduling.scheduler import Scheduler
from rollout.worker.worker import Worker

KV_CACHE, WEIGHTS = OWNERS = ("kv_cache", "weights")
_Mode = KVCacheManagementMode


class Suspension:
    """Remembers what was released and under which KV mode, so that resume restores just that.

    PERSIST leaves the KV cache where it is. OFFLOAD copies the blocks in use to the host and
    releases the memory. RECOMPUTE releases it without a copy: requests in context go back to the
    queue and are prefilled again.
    `keeps_addresses`: the config promises that the addresses of the KV stay, and its memory would
    lose them when it is released. Only PERSIST is allowed then.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        executor: Worker,
        default_mode: KVCacheManagementMode,
        keeps_addresses: bool,
    ) -> None:
        self._scheduler, self._outputs = scheduler, outputs
        self._executor = executor
        self._keeps_addresses = keeps_addresses
        self._default_mode = self._mode = default_mode
        self._num_requeued = 0  # since the KV was last in place
        self._to_restore: list[str] = []  # owners whose release began, also if it failed
        self._released: set[str] = set()  # those of them whose release succeeded

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        *,
        discard: bool,
        is_first: bool,
    ) -> SuspendReport:
        """Release what `release` names and is not released yet: the KV under `mode`.

        None as `mode` takes that of the config. Weights are copied to the host first, unless
        `discard`. What an earlier, failed attempt has released is restored first: all of it if
        `is_first`, else the owners in `release`. Raises ConfigError for an unknown owner, and for a
        mode that would move KV whose addresses must stay. After any other exception `resume`
        restores everything, and a retry is legal.
        """
        start = time.perf_counter()
        _check_owners(release, discard=discard)
        chosen = self._checked_mode(mode)
        if is_first:
            self.resume()
            self._mode = chosen
        released, num_requeued = dict.fromkeys(OWNERS, 0), self._num_requeued
        num_resident = 0
        if WEIGHTS in release and WEIGHTS not in self._released:
            self._begin_release(WEIGHTS)
            num_resident += self._executor.num_resident_bytes(of_weights=True)
            released[WEIGHTS] = self._executor.release_weights(discard=discard)
            self._released.add(WEIGHTS)
        is_in_place = KV_CACHE not in self._released or self._mode is _Mode.PERSIST
        if KV_CACHE in release and is_in_place:
            self._begin_release(KV_CACHE)
            self._mode = chosen
            if chosen is not _Mode.PERSIST:
                num_resident += self._executor.num_resident_bytes(of_weights=False)
            released[KV_CACHE] = self._release_kv()
            self._released.add(KV_CACHE)
        kept, status = self._executor.after_suspend(), self.status()
        return SuspendReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_released=sum(released.values()),
            resident_bytes_released=min(num_resident, sum(released.values())),
            bytes_kept=sum(status.resident_bytes.values()),
            bytes_on_host=sum(status.bytes_on_host.values()),
            released_by_owner=released,
            kept_by_owner=status.resident_bytes,
            kept_beside=kept,
            num_requests_requeued=self._num_requeued - num_requeued,
        )

    def resume(self, only: str | None = None) -> ResumeReport:
        """Restore what is released, or the owner that `only` names. May be retried if it fails."""
        start = time.perf_counter()
        restored, was_incomplete = dict.fromkeys(OWNERS, 0), bool(self._to_restore)
        for owner in (WEIGHTS, KV_CACHE):
            if owner in self._to_restore and only in (owner, None):
                restored[owner] = self._restore(owner)
        is_complete = was_incomplete and not self._to_restore
        graphs_recaptured = self._executor.after_resume() if is_complete else 0
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
        """Return whether all owners are in place once `only` (None: everything) is restored."""
        if only is not None and only not in OWNERS:
            raise ConfigError(f"only={only!r} must be one of {list(OWNERS)}, or None for all")
        return only is None or all(owner == only for owner in self._to_restore)

    def drop_unused_copies(self) -> None:
        """Free the host copies of blocks that no request uses any more. O(1) if there are none.

        Otherwise O(offloaded blocks).
        """
        kv, manager = self._executor.kv, self._scheduler.kv_cache_manager
        # Every used block has its copy there, so more copies are those of others.
        if kv.num_offloaded_bytes > manager.num_used_blocks * kv.bytes_per_block:
            manager.drop_unused_blocks()  # no later request may find what is freed now
            unused = [block for block in kv.offloaded_blocks if not manager.num_users(block)]
            self._executor.discard_kv(unused)

    def status(self) -> MemoryStatus:
        """Return where the memory of both owners is now."""
        use, weights = self._executor.memory_use(), self._executor.weights
        return MemoryStatus(
            resident_bytes={KV_CACHE: use.kv, WEIGHTS: use.weights},
            bytes_on_host={KV_CACHE: use.kv_on_host, WEIGHTS: use.weights_on_host},
            kv_mode=self._mode.value,
            released=tuple(owner for owner in OWNERS if owner in self._released),
            to_restore=tuple(self._to_restore),
            has_weights=weights.has_values,
            lora_base_bytes=use.lora_base,
            routing_bytes=self._scheduler.num_routing_bytes,
        )

    # ---- one owner

    def _begin_release(self, owner: str) -> None:
        """Remember, before the release begins, that `resume` has to restore the owner."""
        if owner in self._to_restore:
            self._restore(owner)
        self._to_restore.append(owner)

    def _restore(self, owner: str) -> int:
        """Return the number of bytes that were copied or made usable again."""
        self._released.discard(owner)
        if owner == WEIGHTS:
            num_bytes = self._executor.restore_weights()
        else:
            num_bytes = self._restore_kv()
        self._to_restore.remove(owner)
        return num_bytes

    def _release_kv(self) -> int:
        """Release the KV cache as the mode says. Returns the number of bytes released."""
        if self._mode is _Mode.PERSIST:
            return 0
        if self._mode is _Mode.RECOMPUTE:
            requeued = self._scheduler.requeue_running()
            self._outputs.requeue(requeued)
            self._num_requeued += len(requeued)
        self._scheduler.kv_cache_manager.drop_unused_blocks()
        if self._mode is _Mode.OFFLOAD:
            self._executor.offload_kv(self._scheduler.kv_cache_manager.used_blocks())
        return self._executor.release_kv()

    def _restore_kv(self) -> int:
        """Undo `_release_kv`. Returns the number of bytes restored."""
        if self._mode is _Mode.PERSIST:
            return 0
        num_bytes = self._executor.restore_kv()
        if self._mode is _Mode.OFFLOAD:
            num_bytes = self._executor.onload_kv()
        return num_bytes

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


def _check_owners(release: Sequence[str], *, discard: bool) -> None:
    if isinstance(release, str) or not all(owner in OWNERS for owner in release):
        raise ConfigError(f"release={release!r} must be a tuple of some of {list(OWNERS)}")
    if discard and WEIGHTS not in release:
        raise ConfigError(f"discard_weights=True needs 'weights' in release={release!r}")
