"""Pausing: pauses and resumes a server's engines, and releases and restores their memory.

`rollout.serve.control.state` makes it. Used by `rollout.serve.vllm.control`,
`rollout.serve.sglang.control`, `rollout.serve.app`, `rollout.serve.health`, `rollout.serve.metrics`
and `rollout.serve.control.weight_transfer`. Nothing else in a server pauses or resumes the engines.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollout.control.state import EngineState
from rollout.engine.suspension import KV_CACHE, RESOURCES
from rollout.errors import InvalidRequestError
from rollout.serve.errors import ApiError
from rollout.serve.live_requests import LiveRequests, RequestLimiter
from rollout.serve.llm import ServedLLM

_REASON = "pause"  # the limiter's `reason`


class PauseMode(enum.Enum):
    """The effect of a pause on running requests.

    KEEP: requests stop and later continue with their KV.
    RETRACT: requests stop, lose their KV, and are prefilled again later.
    ABORT: requests are answered with their tokens so far.
    WAIT: requests run to their end before the engines stop.
    """

    KEEP = "keep"
    RETRACT = "retract"
    ABORT = "abort"
    WAIT = "wait"


class Pausing:
    """Pauses and resumes the engines of a server, and releases and restores their memory.

    The engines run unless a pause is in force, memory is released, or discarded weights were not
    replaced. Each method asks the engines for their state, because other programs can change it.

    mode: mode of the pause in force, or None.
    is_asleep: whether `sleep` was called in the pause in force.
    """

    def __init__(self, llm: ServedLLM, live: LiveRequests, limiter: RequestLimiter) -> None:
        self._llm, self._live, self._limiter = llm, live, limiter
        self._lock = asyncio.Lock()  # held by each method that changes the engines' state
        self.mode: PauseMode | None = None
        self.is_asleep = False
        self._mode_changed = asyncio.Event()  # replaced by a new event at each change
        # Whether the pause in force waits for requests, which engines must run to their end.
        self._is_waiting = False
        # Number of weight updates when the weights were discarded; None: the engines have weights.
        self._discarded_at: int | None = None

    # ---- the state of the engines

    async def is_paused(self) -> bool:
        """Return whether a pause is in force or the engines do not run for another reason."""
        return self.mode is not None or await self._state() is not EngineState.RUNNING

    async def is_sleeping(self) -> bool:
        """Return whether memory is released or a sleep is in force."""
        state = await self._state()
        return state is EngineState.SUSPENDED or (
            self.is_asleep and state is not EngineState.RUNNING
        )

    async def require_weights(self) -> None:
        """Raise ApiError (503) if discarded weights were not replaced. Does nothing during a
        pause."""
        if self.mode is not None or self._discarded_at is None:
            return
        async with self._lock:
            await self._run()  # another program may have sent weights
            if self._discarded_at is not None:
                raise ApiError(
                    503,
                    f"the engines are {(await self._state()).name} without weights, since they "
                    "were discarded; POST an update of the weights",
                )

    # ---- pause and resume

    async def pause(self, mode: PauseMode, *, refuses_new: bool = False) -> None:
        """Begin a pause, or change the mode of the pause in force. With `refuses_new`, new requests
        are answered with 503 until the pause ends."""
        async with self._begun_pause(mode, refuses_new) as is_in_force:
            if is_in_force:
                await self._stop_for(mode)

    async def resume(self) -> None:
        """End the pause. The engines run again unless memory or weights are missing."""
        self._end_pause()
        async with self._lock:
            await self._run()

    # ---- memory

    async def release(self, resources: Sequence[str]) -> None:
        """Stop the engines and release memory. The engines' requests are prefilled again later."""
        _check_resources(resources)
        async with self._lock:
            await self._release(resources)

    async def restore(self, resources: Sequence[str]) -> None:
        """Restore released memory. Once all memory is restored, the engines run again unless a
        pause is in force or weights are missing."""
        _check_resources(resources)
        async with self._lock:
            await self._restore(resources)
            await self._run()

    async def drop_cached_kv(self, *, even_of_running: bool = False) -> bool:
        """Drop all cached prefixes and return True. If requests use KV, drop nothing and return
        False. With `even_of_running`, drop their KV, too. Then running requests are prefilled
        again."""
        async with self._lock:
            stats = await self._llm.stats()
            if stats.num_running + stats.num_paused and not even_of_running:
                return False
            if stats.num_blocks_used + stats.num_blocks_indexed:
                await self._stop()
                await self._drop_kv()
                await self._run()
            return True

    # ---- sleep and wake up

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Begin a pause and release memory. New requests are refused unless `mode` is KEEP. Level 0
        releases no memory. Level 1 releases all memory and keeps the weights on the host. Level 2
        discards the weights. Raises ApiError if another call changes or ends the pause before the
        engines stop."""
        async with self._begun_pause(mode, mode is not PauseMode.KEEP) as is_in_force:
            if not is_in_force:
                raise ApiError(409, "another pause or its end came before the engines slept")
            await self._stop_for(mode)
            if level:
                await self._release(RESOURCES, discards_weights=level == 2)
            self.is_asleep = True

    async def wake_up(self, resources: Sequence[str] = RESOURCES) -> None:
        """Restore released memory. The pause ends once all memory is restored."""
        _check_resources(resources)
        async with self._lock:
            await self._restore(resources)
            if await self._state() is not EngineState.SUSPENDED:
                self._end_pause()
                await self._run()

    # ---- versions

    async def set_generation_epoch(self, version: int) -> None:
        """Begin a weights version without new weights. The engines stop for a moment."""
        async with self._lock:
            await self._stop()
            try:
                await self._llm.set_generation_epoch(version)
            finally:
                await self._run()

    async def run_after_update(self) -> None:
        """Let the engines run after an update that replaced discarded weights."""
        async with self._lock:
            await self._run()

    # ---- beginning and end of a pause

    @asynccontextmanager
    async def _begun_pause(self, mode: PauseMode, refuses_new: bool) -> AsyncIterator[bool]:
        """Put a pause in force. Hold the lock during the block, in which the caller stops the
        engines. In mode WAIT, first wait until no request runs. Yields False if another call has
        changed the mode."""
        was_in_force = self.mode is not None
        self._set_mode(mode)
        self._is_waiting = mode is PauseMode.WAIT
        if refuses_new:
            self._limiter.close(_REASON, f"generation is paused (mode {mode.value})")
        else:
            self._limiter.open(_REASON)
        while True:
            async with self._lock:
                changed = self._mode_changed
                if self.mode is not mode or not (
                    self._is_waiting and self._live.num_unfinished_samples
                ):
                    yield self.mode is mode
                    return
                if was_in_force:  # an earlier pause can have stopped the requests to wait for
                    await self._run()
            await self._requests_ended(changed)

    async def _requests_ended(self, mode_changed: asyncio.Event) -> None:
        """Wait until no request runs or `mode_changed` is set."""
        waits = [self._live.all_ended(), mode_changed.wait()]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _end_pause(self) -> None:
        self.is_asleep = False
        self._set_mode(None)
        self._limiter.open(_REASON)

    def _set_mode(self, mode: PauseMode | None) -> None:
        if mode is not self.mode:
            self._mode_changed.set()
            self.mode, self._mode_changed = mode, asyncio.Event()

    # ---- with the lock held

    async def _state(self) -> EngineState:
        return (await self._llm.stats()).state

    async def _stop(self) -> None:
        if await self._state() is EngineState.RUNNING:
            await self._llm.pause()

    async def _stop_for(self, mode: PauseMode) -> None:
        self._is_waiting = False
        await self._stop()
        if mode is PauseMode.ABORT:
            self._live.abort()
        elif mode is PauseMode.RETRACT:
            await self._drop_kv()

    async def _run(self) -> None:
        """Let the engines run unless a pause, released memory or discarded weights forbid it."""
        stats = await self._llm.stats()
        is_running = stats.state is EngineState.RUNNING
        if is_running or stats.num_weight_updates != self._discarded_at:
            self._discarded_at = None
        # A pause that waits for requests lets the engines run until the requests have ended.
        may_run = self._discarded_at is None and (self.mode is None or self._is_waiting)
        if may_run and stats.state is EngineState.PAUSED:
            await self._llm.unpause()

    async def _release(self, resources: Sequence[str], *, discards_weights: bool = False) -> None:
        await self._stop()
        num_updates = (await self._llm.stats()).num_weight_updates
        await self._llm.suspend("recompute", tuple(resources), discards_weights)
        if discards_weights:
            self._discarded_at = num_updates

    async def _restore(self, resources: Sequence[str]) -> None:
        if await self._state() is not EngineState.SUSPENDED:
            return
        if set(resources) >= {*RESOURCES}:
            await self._llm.resume()
            return
        for resource in resources:  # a resource that is not released stays as it is
            await self._llm.resume(resource)

    async def _drop_kv(self) -> None:
        """Free all KV of stopped engines. Running requests are prefilled again later."""
        report = await self._llm.suspend("recompute", (KV_CACHE,))
        if report.released_by_owner[KV_CACHE]:  # else the KV cache was released before
            await self._llm.resume(KV_CACHE)


def _check_resources(resources: Sequence[str]) -> None:
    if unknown := set(resources) - {*RESOURCES}:
        raise InvalidRequestError(
            f"tags {sorted(unknown)} are unknown; give some of {list(RESOURCES)}"
        )
