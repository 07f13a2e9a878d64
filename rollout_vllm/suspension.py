"""VllmSuspension: releases the KV cache of vLLM, and on CUDA its memory, and restores them.

`rollout_vllm.engine` makes it; Engine uses it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm.v1.engine.core import EngineCore

from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.reports import MemoryStatus, ResumeReport, SuspendReport
from rollout.engine.output_processor import OutputProcessor
from rollout.engine.suspension import KV_CACHE, RESOURCES, WEIGHTS, check_only, check_resources
from rollout.errors import ConfigError
from rollout_vllm.executor import VllmExecutor
from rollout_vllm.offload import offload_kv_cache
from rollout_vllm.options import check_mode
from rollout_vllm.scheduler import VllmScheduler

_Mode = KVCacheManagementMode


class VllmSuspension:
    """Implements `SuspensionInterface` over vLLM.

    PERSIST leaves the KV cache in place. RECOMPUTE drops it: running requests go back to the queue
    and are prefilled again. `has_sleep`: vLLM's enable_sleep_mode, on CUDA. It has OFFLOAD, which
    copies the KV cache to the host and returns its memory. It also returns the weights' memory:
    vLLM sleeps with weights and KV cache together, so the KV cache is released with them.
    """

    def __init__(
        self,
        core: EngineCore,
        scheduler: VllmScheduler,
        executor: VllmExecutor,
        outputs: OutputProcessor,
        default_mode: KVCacheManagementMode,
        *,
        has_sleep: bool,
    ) -> None:
        self._core, self._scheduler, self._executor = core, scheduler, executor
        self._outputs, self._has_sleep = outputs, has_sleep
        self._default_mode = self._mode = default_mode
        self._released: list[str] = []
        self._num_requeued, self._num_bytes_on_host = 0, 0
        self._asleep: set[str] = set()  # resources whose memory vLLM has returned

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        *,
        discard: bool,
        is_first: bool,
    ) -> SuspendReport:
        start = time.perf_counter()
        check_resources(release, discard=discard)
        chosen = as_enum("mode", _Mode, self._default_mode if mode is None else mode)
        self._check(chosen, release)
        requeued, num_bytes = list[int](), 0
        if is_first:
            self._mode = chosen
        if KV_CACHE in release and self._is_in_place:
            self._mode = chosen
            if KV_CACHE not in self._released:
                self._released.append(KV_CACHE)
            if chosen is _Mode.RECOMPUTE:
                self._core.reset_prefix_cache(reset_running_requests=True)
                requeued = self._scheduler.take_preempted()
                self._outputs.requeue(requeued)
                self._num_requeued += len(requeued)
            if chosen is _Mode.OFFLOAD:
                num_bytes = self._offload()
        if WEIGHTS in release and WEIGHTS not in self._released:
            self._released.append(WEIGHTS)
            self._executor.is_resident = False
            self._executor.has_values &= not discard
            if KV_CACHE not in self._asleep:
                num_bytes = self._num_kv_bytes()
            self._core.model_executor.sleep(level=2 if discard else 1)
            self._asleep = {*RESOURCES}
        return SuspendReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_released=num_bytes,
            resident_bytes_released=num_bytes,
            num_requests_requeued=len(requeued),
        )

    @property
    def _is_in_place(self) -> bool:
        """Whether the KV cache has its contents in place."""
        return KV_CACHE not in self._released or self._mode is _Mode.PERSIST

    def _offload(self) -> int:
        """Copy the KV cache to the host and return its memory. Returns the bytes."""
        self._asleep.add(KV_CACHE)
        self._core.model_executor.sleeping_tags.add(KV_CACHE)  # for its wake_up
        self._num_bytes_on_host = sum(self._core.collective_rpc(offload_kv_cache))
        return self._num_bytes_on_host

    def _check(self, mode: KVCacheManagementMode, release: Sequence[str]) -> None:
        check_mode(mode, "mode", has_sleep=self._has_sleep)
        if WEIGHTS not in release:
            return
        if not self._has_sleep:
            raise ConfigError(
                "release='weights' needs vLLM's sleep mode: engine_options={'enable_sleep_mode': "
                "True}, on CUDA; release only 'kv_cache' here"
            )
        if mode is _Mode.PERSIST or (KV_CACHE not in release and self._is_in_place):
            raise ConfigError(
                "vLLM sleeps with weights and KV cache together: release both, with "
                "mode='recompute' or mode='offload'"
            )

    def resume(self, only: str | None = None) -> ResumeReport:
        start, num_bytes = time.perf_counter(), 0
        restored = [name for name in self._released if only in (None, name)]
        if asleep := [name for name in restored if name in self._asleep]:
            self._core.model_executor.wake_up(asleep)
            self._asleep -= {*asleep}
        if KV_CACHE in restored:
            num_bytes, self._num_bytes_on_host = self._num_kv_bytes(), 0
        self._released = [name for name in self._released if name not in restored]
        self._executor.is_resident = WEIGHTS not in self._released
        num_requeued = 0
        if KV_CACHE not in self._released:
            num_requeued, self._num_requeued = self._num_requeued, 0
        return ResumeReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_restored=num_bytes if self._has_sleep else 0,
            num_requests_recomputed=num_requeued,
        )

    def is_complete_with(self, only: str | None) -> bool:
        check_only(only)
        return only is None or all(name == only for name in self._released)

    def drop_unused_copies(self) -> None:
        pass  # vLLM makes none

    def status(self) -> MemoryStatus:
        return MemoryStatus(
            resident_bytes={
                KV_CACHE: 0 if KV_CACHE in self._asleep else self._num_kv_bytes(),
                WEIGHTS: 0,
            },
            bytes_on_host={KV_CACHE: self._num_bytes_on_host, WEIGHTS: 0},
            kv_mode=self._mode.value,
            released=tuple(self._released),
            to_restore=tuple(self._released),
            has_weights=self._executor.has_values,
            lora_base_bytes=self._executor.num_base_bytes,
            routing_bytes=0,
        )

    def _num_kv_bytes(self) -> int:
        return sum(use.kv_bytes for use in self._executor.rank_uses())
