"""What each KV mode does at suspend and resume. Mode is policy; the mechanism is the memory
backend's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollout.config import KVCacheManagementMode
from rollout.kv.cache import KVCache
from rollout.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSuspended:
    """Bytes given back, bytes that stay reserved on the device, and on the host."""

    bytes_released: int = 0
    bytes_kept: int = 0
    bytes_on_host: int = 0


class KVPolicy(Protocol):
    """One KV mode."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        """Send requests back to the queue whose KV will be lost. Returns their ids."""
        ...

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> KVSuspended:
        """Give up what the mode gives up. On an exception `resume` brings all of it back."""
        ...

    def resume(self, kv: KVCache) -> int:
        """Bring it back, so that steps can run. Returns bytes restored."""
        ...


class PersistKV:
    """Everything stays where it is."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        return ()

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> KVSuspended:
        return KVSuspended(bytes_kept=kv.num_bytes)

    def resume(self, kv: KVCache) -> int:
        return 0


class OffloadKV:
    """Blocks in use wait on the host; all device memory is given back."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        return ()

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> KVSuspended:
        scheduler.drop_unused_blocks()
        num_copied = kv.offload(scheduler.used_blocks())
        return KVSuspended(bytes_released=kv.release(), bytes_on_host=num_copied)

    def resume(self, kv: KVCache) -> int:
        kv.restore()
        return kv.onload(kv.offloaded_blocks)


class RecomputeKV:
    """Nothing is copied: requests in context go back to the queue and are prefilled again."""

    def requeue(self, scheduler: Scheduler) -> tuple[int, ...]:
        return scheduler.requeue_active()

    def suspend(self, scheduler: Scheduler, kv: KVCache) -> KVSuspended:
        scheduler.drop_unused_blocks()
        return KVSuspended(bytes_released=kv.release())

    def resume(self, kv: KVCache) -> int:
        return kv.restore()


KV_POLICIES: dict[KVCacheManagementMode, KVPolicy] = {
    KVCacheManagementMode.PERSIST: PersistKV(),
    KVCacheManagementMode.OFFLOAD: OffloadKV(),
    KVCacheManagementMode.RECOMPUTE: RecomputeKV(),
}
