"""Suspension: gives memory back and brings it again, owner by owner, and reports what it moved."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout.config import KVCacheManagementMode, as_enum
from rollout.engine.kv_policy import KV_POLICIES, KVSuspended
from rollout.engine.reports import ResumeReport, SuspendReport
from rollout.engine.request_book import RequestBook
from rollout.errors import ConfigError
from rollout.kv.cache import KVCache
from rollout.runner.model_runner import ModelRunner
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
        book: RequestBook,
        runner: ModelRunner,
        mode: KVCacheManagementMode,
        *,
        must_stay: bool,
    ) -> None:
        self._scheduler, self._kv, self._weights, self._book = scheduler, kv, weights, book
        self._runner, self._must_stay = runner, must_stay
        self._default_mode = self._mode = mode
        self._num_requeued = 0
        self._released: list[str] = []

    def suspend(
        self, mode: KVCacheManagementMode | str | None, release: Sequence[str], *, discard: bool
    ) -> SuspendReport:
        """Give up what `release` names: the KV as `mode` (None: the config's) says.

        Weights are copied to the host before they are released, unless `discard`.
        Raises ConfigError for an unknown owner, or a mode that would break a promise. After any
        other exception `resume` makes all whole again, and then this can be tried again.
        """
        start = time.perf_counter()
        _check_owners(release, discard=discard)
        chosen = self._checked_mode(mode)
        self.resume()  # what an attempt that failed has left
        self._mode, self._num_requeued = chosen, 0
        self._released = [owner for owner in OWNERS if owner in release]
        suspended, weights_bytes = KVSuspended(bytes_kept=self._kv.num_bytes), 0
        if WEIGHTS in release:
            weights_bytes = self._weights.release(discard=discard)
        if KV_CACHE in release:
            suspended = self._suspend_kv()
        kept_weights = self._weights.num_bytes if self._weights.is_resident else 0
        kept = {KV_CACHE: suspended.bytes_kept, WEIGHTS: kept_weights}
        return SuspendReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_released=suspended.bytes_released + weights_bytes,
            bytes_kept=sum(kept.values()),
            bytes_on_host=suspended.bytes_on_host + self._weights.num_bytes_on_host,
            released_by_owner={KV_CACHE: suspended.bytes_released, WEIGHTS: weights_bytes},
            kept_by_owner=kept,
            num_requests_requeued=self._num_requeued,
        )

    def _suspend_kv(self) -> KVSuspended:
        policy = KV_POLICIES[self._mode]
        requeued = policy.requeue(self._scheduler)
        self._book.note_requeued(requeued, evicted=False)
        self._num_requeued = len(requeued)
        return policy.suspend(self._scheduler, self._kv)

    def resume(self, only: str | None = None) -> ResumeReport:
        """Bring back what is given up, or the part `only` names. On an exception: try again."""
        start = time.perf_counter()
        restored, was_incomplete = dict.fromkeys(OWNERS, 0), bool(self._released)
        for owner in (WEIGHTS, KV_CACHE):
            if owner not in self._released or only not in (owner, None):
                continue
            if owner == WEIGHTS:
                restored[owner] = self._weights.restore()
            else:
                restored[owner] = KV_POLICIES[self._mode].resume(self._kv)
            self._released.remove(owner)
        graphs_lost = self._runner.after_resume() if was_incomplete and not self._released else 0
        num_requeued = 0
        if KV_CACHE not in self._released:
            num_requeued, self._num_requeued = self._num_requeued, 0
        return ResumeReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_restored=sum(restored.values()),
            restored_by_owner=restored,
            graphs_recaptured=graphs_lost,
            num_requests_recomputed=num_requeued,
        )

    def is_complete_with(self, only: str | None) -> bool:
        """Whether nothing would be missing once `only` (None: everything) is back."""
        if only is not None and only not in OWNERS:
            raise ConfigError(f"only={only!r} must be one of {list(OWNERS)}, or None for all")
        return only is None or all(owner == only for owner in self._released)

    def nothing_suspended(self) -> SuspendReport:
        """The answer to a suspend that is already done."""
        return SuspendReport(mode=self._mode.value)

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
