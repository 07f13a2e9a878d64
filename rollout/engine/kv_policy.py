"""What each KV mode does at suspend and resume. Mode is policy; the mechanism is the memory
backend's.
"""

from __future__ import annotations

from typing import Protocol

from rollout.config import KVCacheManagementMode
from rollout.kv.cache import KVCache
from rollout.scheduling.scheduler import Scheduler


class KVPolicy(Protocol):
    """One KV mode."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        """Send requests back to the queue whose KV will be lost. Returns their ids."""
        ...

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> int:
        """Give up what the mode gives up. Returns bytes released.

        On an exception `resume` brings all of it back.
        """
        ...

    def resume(self, kv: KVCache) -> int:
        """Bring it back, so that steps can run. Returns bytes restored."""
        ...


class PersistKV:
    """Everything stays where it is."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        return ()

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> int:
        return 0

    def resume(self, kv: KVCache) -> int:
        return 0


class OffloadKV:
    """Blocks in use wait on the host; all device memory is given back."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        return ()

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> int:
        scheduler.kv_cache_manager.free_unused_blocks()
        kv.offload(scheduler.kv_cache_manager.used_blocks())
        return kv.release()

    def resume(self, kv: KVCache) -> int:
        kv.restore()
        return kv.onload(kv.offloaded_blocks)


class RecomputeKV:
    """Nothing is copied: requests in context go back to the queue and are prefilled again."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        return scheduler.requeue_running()

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> int:
        scheduler.kv_cache_manager.free_unused_blocks()
        return kv.release()

    def resume(self, kv: KVCache) -> int:
        return kv.restore()


KV_POLICIES: dict[KVCacheManagementMode, KVPolicy] = {
    KVCacheManagementMode.PERSIST: PersistKV(),
    KVCacheManagementMode.OFFLOAD: OffloadKV(),
    KVCacheManagementMode.RECOMPUTE: RecomputeKV(),
}
