"""Suspension: gives memory back and brings it again, by the KV mode, and reports what it moved."""

from __future__ import annotations

import time

from rollout.config import KVCacheManagementMode, as_enum
from rollout.engine.kv_policy import KV_POLICIES
from rollout.engine.reports import ResumeReport, SuspendReport
from rollout.errors import ConfigError
from rollout.kv.cache import KVCache
from rollout.scheduling.scheduler import Scheduler


class Suspension:
    """Remembers how the engine was suspended, so that resume undoes just that.

    `must_stay`: the KV has promised addresses that its memory would lose with a release.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCache,
        mode: KVCacheManagementMode,
        *,
        must_stay: bool,
    ) -> None:
        self._scheduler, self._kv, self._must_stay = scheduler, kv, must_stay
        self._default_mode = self._mode = mode
        self._num_requeued = 0

    def suspend(
        self, mode: KVCacheManagementMode | str | None
    ) -> tuple[SuspendReport, tuple[int, ...]]:
        """Do what `mode` (None: the config's) says. Also returns the ids that went back to the queue."""
        start = time.perf_counter()
        chosen = as_enum(
            "mode", KVCacheManagementMode, self._default_mode if mode is None else mode
        )
        if self._must_stay and chosen is not KVCacheManagementMode.PERSIST:
            raise ConfigError(
                f"mode={chosen.value!r} would move the KV, but static_kv_memory_pointers=True and "
                "memory_kind='device' has no stable addresses; make the engine with "
                "memory_kind='reserved'"
            )
        suspended = KV_POLICIES[chosen].suspend(self._scheduler, self._kv)
        self._mode, self._num_requeued = chosen, len(suspended.requeued)
        report = SuspendReport(
            mode=chosen.value,
            seconds=time.perf_counter() - start,
            bytes_released=suspended.bytes_released,
            bytes_kept=suspended.bytes_kept,
            bytes_on_host=suspended.bytes_on_host,
            num_requests_requeued=len(suspended.requeued),
        )
        return report, suspended.requeued

    def resume(self) -> ResumeReport:
        """Undo the last suspend. On an exception it can be tried again."""
        start = time.perf_counter()
        num_bytes = KV_POLICIES[self._mode].resume(self._scheduler, self._kv)
        return ResumeReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_restored=num_bytes,
            num_requests_recomputed=self._num_requeued,
        )

    def nothing_suspended(self) -> SuspendReport:
        """The answer to a suspend that is already done."""
        return SuspendReport(mode=self._mode.value)

    def nothing_resumed(self) -> ResumeReport:
        """The answer to a resume that is already done."""
        return ResumeReport(mode=self._mode.value)
