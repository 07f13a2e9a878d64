"""Suspension: gives memory back and brings it again, owner by owner, and reports what it moved."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout.config import KVCacheManagementMode, as_enum
from rollout.engine.kv_policy import KV_POLICIES, KVSuspended
from rollout.engine.reports import ResumeReport, SuspendReport
from rollout.errors import ConfigError
from rollout.kv.cache import KVCache
from rollout.runner.weight_store import WeightStore
from rollout.scheduling.scheduler import Scheduler

KV_CACHE, WEIGHTS = OWNERS = ("kv_cache", "weights")


class Suspension:
    """Remembers what was given up and how, so that resume undoes just that.

    `must_stay`: the KV has promised addresses that its memory would lose with a release.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCache,
        weights: WeightStore,
        mode: KVCacheManagementMode,
        *,
        must_stay: bool,
    ) -> None:
        self._scheduler, self._kv, self._weights = scheduler, kv, weights
        self._must_stay = must_stay
        self._default_mode = self._mode = mode
        self._num_requeued = 0
        self._released: tuple[str, ...] = ()

    def suspend(
        self, mode: KVCacheManagementMode | str | None, release: Sequence[str], *, discard: bool
    ) -> tuple[SuspendReport, tuple[int, ...]]:
        """Give up what `release` names; also returns the ids that went back to the queue.

        The KV goes as `mode` (None: the config's) says; weights are backed up unless `discard`.
        Raises ConfigError for an unknown owner, or a mode that would break a promise. On an
        exception it can be tried again, or undone by `resume`.
        """
        start = time.perf_counter()
        _check_owners(release, discard=discard)
        self._mode = self._checked_mode(mode)
        self._released = tuple(release)
        suspended, weights_bytes = KVSuspended(bytes_kept=self._kv.num_bytes), 0
        if WEIGHTS in release:
            weights_bytes = self._weights.release(discard=discard)
        if KV_CACHE in release:
            suspended = KV_POLICIES[self._mode].suspend(self._scheduler, self._kv)
        self._num_requeued = len(suspended.requeued)
        kept_weights = self._weights.num_bytes if self._weights.is_resident else 0
        kept = {KV_CACHE: suspended.bytes_kept, WEIGHTS: kept_weights}
        report = SuspendReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_released=suspended.bytes_released + weights_bytes,
            bytes_kept=sum(kept.values()),
            bytes_on_host=suspended.bytes_on_host + self._weights.num_bytes_on_host,
            released_by_owner={KV_CACHE: suspended.bytes_released, WEIGHTS: weights_bytes},
            kept_by_owner=kept,
            num_requests_requeued=self._num_requeued,
        )
        return report, suspended.requeued

    def resume(self, only: str | None) -> ResumeReport:
        """Bring back what the last suspend gave up, or the part `only` names.

        On an exception it can be tried again.
        """
        start = time.perf_counter()
        wanted = self._released if only is None else (only,)
        restored = {KV_CACHE: 0, WEIGHTS: 0}
        if WEIGHTS in wanted:
            restored[WEIGHTS] = self._weights.restore()
        if KV_CACHE in wanted and KV_CACHE in self._released:
            restored[KV_CACHE] = KV_POLICIES[self._mode].resume(self._scheduler, self._kv)
        self._released = tuple(owner for owner in self._released if owner not in wanted)
        return ResumeReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_restored=sum(restored.values()),
            restored_by_owner=restored,
            num_requests_recomputed=self._num_requeued,
        )

    def is_complete_with(self, only: str | None) -> bool:
        """Whether nothing would be missing once `only` (None: everything) is back."""
        if only is not None and only not in OWNERS:
            raise ConfigError(f"only={only!r} must be one of {list(OWNERS)}, or None for all")
        return only is None or all(owner == only for owner in self._released)

    def nothing_suspended(self) -> SuspendReport:
        """The answer to a suspend that is already done."""
        return SuspendReport(mode=self._mode.value)

    def nothing_resumed(self) -> ResumeReport:
        """The answer to a resume that is already done."""
        return ResumeReport(mode=self._mode.value)

    def _checked_mode(self, mode: KVCacheManagementMode | str | None) -> KVCacheManagementMode:
        wanted = self._default_mode if mode is None else mode
        chosen = as_enum("mode", KVCacheManagementMode, wanted)
        if self._must_stay and chosen is not KVCacheManagementMode.PERSIST:
            raise ConfigError(
                f"mode={chosen.value!r} would move the KV, but static_kv_memory_pointers=True and "
                "this memory_kind has no stable addresses; use memory_kind='reserved'"
            )
        return chosen


def _check_owners(release: Sequence[str], *, discard: bool) -> None:
    if isinstance(release, str) or not all(owner in OWNERS for owner in release):
        raise ConfigError(f"release={release!r} must be a tuple of some of {list(OWNERS)}")
    if discard and WEIGHTS not in release:
        raise ConfigError(f"discard_weights=True needs 'weights' in release={release!r}")
