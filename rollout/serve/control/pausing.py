"""Pausing: whether the engines run, and who keeps them from it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence

from rollout.engine.state import EngineState
from rollout.engine.suspension import KV_CACHE, OWNERS
from rollout.errors import InvalidRequestError
from rollout.serve.limits import Turnstile
from rollout.serve.live_requests import LiveRequests
from rollout.serve.llm import ServedLLM

_POLL_S = 0.01
_WHO = "pause"  # under this name the turnstile is closed


class PauseMode(enum.Enum):
    """What a pause does with requests that run, as vLLM and SGLang call it.

    KEEP: they freeze, and go on with their KV. RETRACT: they freeze, and are prefilled again.
    ABORT: they are answered with the tokens that they have. WAIT: they end first. New requests wait
    for the end of the pause.
    """

    KEEP = "keep"
    RETRACT = "retract"
    ABORT = "abort"
    WAIT = "wait"


class Pausing:
    """The only one who pauses, suspends and resumes the engines of a server.

    Engines run unless a pause is in force, memory is released, or the weights were discarded and
    none have come since.
    """

    def __init__(self, llm: ServedLLM, live: LiveRequests, turnstile: Turnstile) -> None:
        self._llm, self._live, self._turnstile = llm, live, turnstile
        self._turn = asyncio.Lock()  # held by each verb
        self.mode: PauseMode | None = None  # of the pause in force
        self.released: set[str] = set()  # owners whose memory is released
        self.is_asleep = False
        self._lacks_weights = False

    # ---- pause and resume

    async def pause(self, mode: PauseMode, *, refuses_new: bool = False) -> None:
        """Begin a pause, or give the one in force another mode. `refuses_new`: new requests are
        answered with 503 meanwhile.
        """
        self.mode = mode
        if refuses_new:
            self._turnstile.close(_WHO, f"generation is paused (mode {mode.value})")
        else:
            self._turnstile.open(_WHO)
        if mode is PauseMode.WAIT:
            while self._live.num_samples and self.mode is mode:
                await asyncio.sleep(_POLL_S)
        async with self._turn:
            if self.mode is not mode:
                return  # another verb came meanwhile
            await self._stop()
            if mode is PauseMode.ABORT:
                self._live.abort()
            elif mode is PauseMode.RETRACT:
                await self._drop_kv()

    async def resume(self) -> None:
        """End the pause. The engines run, if nothing else keeps them from it."""
        self.mode = None
        self._turnstile.open(_WHO)
        async with self._turn:
            await self._run()

    # ---- memory

    async def release(self, owners: Sequence[str], *, discards_weights: bool = False) -> None:
        """Release memory of owners. Requests lose their KV with it, and are prefilled again."""
        _check_owners(owners)
        async with self._turn:
            await self._stop()
            await self._llm.suspend("recompute", tuple(owners), discards_weights)
            self.released |= set(owners)
            self._lacks_weights |= discards_weights

    async def restore(self, owners: Sequence[str]) -> None:
        """Restore the memory of owners. Once nothing is released the engines run again, unless a
        pause is in force or the weights' values are missing.
        """
        _check_owners(owners)
        async with self._turn:
            for owner in OWNERS[::-1]:  # weights first, since an update needs their memory
                if owner in owners and owner in self.released:
                    await self._llm.resume(owner)
                    self.released.discard(owner)
            await self._run()

    async def drop_cached_kv(self, *, even_of_running: bool = False) -> bool:
        """Forget cached prefixes. False, and nothing happens, if requests use KV, unless
        `even_of_running`: then those are prefilled again.
        """
        async with self._turn:
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
        """Pause and refuse requests, unless `mode` is KEEP. Level 1 also releases all memory, with
        the weights kept on the host; level 2 discards them.
        """
        await self.pause(mode, refuses_new=mode is not PauseMode.KEEP)
        self.is_asleep = True
        if level:
            await self.release(OWNERS, discards_weights=level == 2)

    async def wake_up(self, owners: Sequence[str] = OWNERS) -> None:
        """Restore the memory of owners. Once nothing is released the pause ends."""
        await self.restore(owners)
        if not self.released:
            self.is_asleep = False
            await self.resume()

    # ---- versions

    async def set_generation_epoch(self, version: int) -> None:
        """Begin a version without new weights, which needs a moment without steps."""
        async with self._turn:
            await self._stop()
            try:
                await self._llm.set_generation_epoch(version)
            finally:
                await self._run()

    async def weights_came(self) -> None:
        """A full update was committed: discarded weights are missing no longer."""
        async with self._turn:
            self._lacks_weights = False
            await self._run()

    # ---- with the turn

    async def _stop(self) -> None:
        if self._llm.state is EngineState.RUNNING:
            await self._llm.pause()

    async def _run(self) -> None:
        """Let the engines run, if nothing keeps them from it."""
        is_held = self.mode is not None or self.released or self._lacks_weights
        if not is_held and self._llm.state is EngineState.PAUSED:
            await self._llm.unpause()

    async def _drop_kv(self) -> None:
        """Free all KV of stopped engines: requests in context go back to the queue."""
        if KV_CACHE not in self.released:
            await self._llm.suspend("recompute", (KV_CACHE,))
            await self._llm.resume(KV_CACHE)


def _check_owners(owners: Sequence[str]) -> None:
    if unknown := set(owners) - {*OWNERS}:
        raise InvalidRequestError(
            f"tags {sorted(unknown)} are unknown; memory is released and restored as {list(OWNERS)}"
        )
