"""ServerSuspension: suspends an Engine over a vLLM server. No memory is released.

`rollout_vllm.server.engine` makes it; Engine uses it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.reports import MemoryStatus, ResumeReport, SuspendReport
from rollout.engine.output_processor import OutputProcessor
from rollout.engine.suspension import KV_CACHE, RESOURCES, WEIGHTS, check_only, check_resources
from rollout.errors import ConfigError
from rollout_vllm.server.scheduler import ServerScheduler

_Mode = KVCacheManagementMode


def check_server_mode(mode: KVCacheManagementMode, argument: str) -> None:
    """Raise ConfigError, naming the argument, for the mode OFFLOAD."""
    if mode is _Mode.OFFLOAD:
        raise ConfigError(
            f"{argument}={mode.value!r} does not work with engine='vllm-server': a client of the "
            "server cannot copy its KV; use 'persist' or 'recompute'"
        )


class ServerSuspension:
    """Implements `SuspensionInterface` over a vLLM server.

    All requests wait in this process while the engine is paused. PERSIST: they continue over the KV
    that the server's prefix cache still has. RECOMPUTE: they are prefilled again. The server keeps
    its memory, which its other clients use, too.
    """

    def __init__(
        self,
        scheduler: ServerScheduler,
        outputs: OutputProcessor,
        default_mode: KVCacheManagementMode,
    ) -> None:
        self._scheduler, self._outputs = scheduler, outputs
        self._default_mode = self._mode = default_mode
        self._is_released, self._num_requeued = False, 0

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
        check_server_mode(chosen, "mode")
        if WEIGHTS in release:
            raise ConfigError(
                "release='weights' does not work with engine='vllm-server': the server has other "
                "clients; release only 'kv_cache'"
            )
        self._mode, requeued = chosen, list[int]()
        if KV_CACHE in release and not self._is_released:
            self._is_released = True
            if chosen is _Mode.RECOMPUTE:
                requeued = [i for i, r in self._scheduler.requests.items() if len(r.spans)]
                self._scheduler.drop_kv(requeued)
                self._outputs.requeue(requeued)
                self._num_requeued += len(requeued)
        return SuspendReport(
            mode=chosen.value,
            seconds=time.perf_counter() - start,
            bytes_released=0,
            resident_bytes_released=0,
            num_requests_requeued=len(requeued),
        )

    def resume(self, only: str | None = None) -> ResumeReport:
        start = time.perf_counter()
        num_requeued = 0
        if only in (None, KV_CACHE):
            self._is_released = False
            num_requeued, self._num_requeued = self._num_requeued, 0
        return ResumeReport(
            mode=self._mode.value,
            seconds=time.perf_counter() - start,
            bytes_restored=0,
            num_requests_recomputed=num_requeued,
        )

    def is_complete_with(self, only: str | None) -> bool:
        check_only(only)
        return only in (None, KV_CACHE) or not self._is_released

    def drop_unused_copies(self) -> None:
        pass  # there are none

    def status(self) -> MemoryStatus:
        released = (KV_CACHE,) if self._is_released else ()
        return MemoryStatus(
            resident_bytes=dict.fromkeys(RESOURCES, 0),
            bytes_on_host=dict.fromkeys(RESOURCES, 0),
            kv_mode=self._mode.value,
            released=released,
            to_restore=released,
            has_weights=True,
            lora_base_bytes=0,
            routing_bytes=0,
        )
