"""Suspension: gives memory back and brings it again, owner by owner, and reports what it moved."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout.config import KVCacheManagementMode, as_enum
from rollout.engine.kv_policy import KV_POLICIES
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
        self._num_requeued = 0  # since the KV was there
        self._released: list[str] = []  # what resume brings back, that of failed attempts too
        self._done: set[str] = set()  # those of them that were released to the end

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        *,
        discard: bool,
        is_first: bool,
    ) -> SuspendReport:
        """Give up what `release` names and is not given up yet: the KV as `mode` (None: the
        config's) says.

        Weights are copied to the host before they are released, unless `discard`. What an attempt
        that failed has left is brought back before: all of it if `is_first`, else what is named.
        Raises ConfigError for an unknown owner, or a mode that would break a promise. After any
        other exception `resume` makes all whole again, and then this can be tried again.
        """
        start = time.perf_counter()
        _check_owners(release, discard=discard)
        chosen = self._checked_mode(mode)
        if is_first:
            self.resume()
            self._mode = chosen
        released, num_requeued = dict.fromkeys(OWNERS, 0), self._num_requeued
        if WEIGHTS in release and WEIGHTS not in self._done:
            self._begin(WEIGHTS)
            released[WEIGHTS] = self._weights.release(discard=discard)
            self._done.add(WEIGHTS)
        is_in_place = KV_CACHE not in self._done or self._mode is KVCacheManagementMode.PERSIST
        if KV_CACHE in release and is_in_place:
            self._begin(KV_CACHE)
            self._mode = chosen
            released[KV_CACHE] = self._suspend_kv()
            self._done.add(KV_CACHE)
        kept = {
            KV_CACHE: self._kv.num_bytes if self._kv.is_resident else 0,
            WEIGHTS: self._weights.num_bytes if self._weights.is_resident else 0,
        }
        return SuspendReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_released=sum(released.values()),
            bytes_kept=sum(kept.values()),
            bytes_on_host=self._kv.num_offloaded_bytes + self._weights.num_bytes_on_host,
            released_by_owner=released,
            kept_by_owner=kept,
            num_requests_requeued=self._num_requeued - num_requeued,
        )

    def _begin(self, owner: str) -> None:
        """From here on `resume` brings the owner back."""
        if owner in self._released:
            self._restore(owner)
        self._released.append(owner)

    def _suspend_kv(self) -> int:
        policy = KV_POLICIES[self._mode]
        requeued = policy.requeue(self._scheduler)
        self._book.note_requeued(requeued, evicted=False)
        self._num_requeued += len(requeued)
        return policy.suspend(self._scheduler, self._kv)

    def resume(self, only: str | None = None) -> ResumeReport:
        """Bring back what is given up, or the part `only` names. On an exception: try again."""
        start = time.perf_counter()
        restored, was_incomplete = dict.fromkeys(OWNERS, 0), bool(self._released)
        for owner in (WEIGHTS, KV_CACHE):
            if owner in self._released and only in (owner, None):
                restored[owner] = self._restore(owner)
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

    def _restore(self, owner: str) -> int:
        """Returns the bytes that were copied or made usable again."""
        self._done.discard(owner)
        if owner == WEIGHTS:
            num_bytes = self._weights.restore()
        else:
            num_bytes = KV_POLICIES[self._mode].resume(self._kv)
        self._released.remove(owner)
        return num_bytes

    def is_complete_with(self, only: str | None) -> bool:
        """Whether nothing would be missing once `only` (None: everything) is back."""
        if only is not None and only not in OWNERS:
            raise ConfigError(f"only={only!r} must be one of {list(OWNERS)}, or None for all")
        return only is None or all(owner == only for owner in self._released)

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
