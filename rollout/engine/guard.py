"""CallGuard: lets one thread at a time call an engine, and detects calls that stopped halfway.

`rollout.engine.build` and `rollout_vllm.engine` create it. Engine, StepPipeline and
`rollout_vllm.pipeline` enter it around each call that changes state. CallGuard registers an exit
handler.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from rollout.deferred_signals import deferred_signals
from rollout.errors import EngineStateError

_EXIT_S = 30.0  # the longest wait of the exiting process for another thread's call


class CallGuard:
    """Guards the calls that change the state of one engine.

    A call from a second thread at the same time raises EngineStateError. Signals are deferred until
    the running call ends. If an exception stops a call halfway and is not marked as harmless, every
    later call raises EngineStateError.

    While the process exits, calls of threads other than the exiting one block forever.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_free = threading.Condition(self._mutex)
        self._owner: threading.Thread | None = None
        self._call, self._depth = "", 0  # the owner's call
        # The call that was stopped halfway, and the cause. It is set while each call runs, because
        # another thread may raise an exception in this one at any point.
        self._stopped: tuple[str, str] | None = None
        self._harmless: BaseException | None = None
        # The thread in which the process exits. Others are then blocked: a daemon thread that
        # computes during the interpreter's teardown would abort the process.
        self._ends_process: threading.Thread | None = None
        atexit.register(_block_if_alive, weakref.ref(self))

    @property
    def is_broken(self) -> bool:
        """Whether a call was stopped halfway, so that later calls are refused."""
        return self._stopped is not None and not self._depth

    def mark_harmless(self, error: BaseException) -> None:
        """Mark `error` as one that leaves the engine consistent. The caller raises `error` next."""
        self._harmless = error

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Mark exceptions of the block as harmless, because the block undoes its own changes."""
        try:
            yield
        except BaseException as error:
            self.mark_harmless(error)
            raise

    @contextmanager
    def change(self, call: str) -> Iterator[None]:
        """Guard the block as one call, which error messages name `call`. Nested calls join the
        outer call. Raises EngineStateError if another thread is inside, or if an earlier call was
        stopped halfway."""
        me = threading.current_thread()
        if self._owner is me and self._depth:
            yield
            return
        with deferred_signals():  # a handler must not raise while the mutex is taken, either
            self._acquire(call, me)
            try:
                self._depth, self._stopped = 1, (call, "an exception")
                try:
                    yield
                except BaseException as error:
                    self._stopped = None if error is self._harmless else (call, repr(error))
                    raise
                self._stopped = None
            finally:
                self._depth, self._harmless = 0, None
                self._release()

    def _acquire(self, call: str, me: threading.Thread) -> None:
        with self._mutex:
            while self._ends_process not in (None, me):
                self._is_free.wait()
            owner = self._owner
            if owner is not None and owner is not me and owner.is_alive():
                raise EngineStateError(
                    f"cannot {call} while thread {owner.name!r} is in {self._call} of this engine: "
                    "one thread at a time calls an engine; methods of LLM may be called from any"
                )
            if self._stopped is not None:
                stopped_call, why = self._stopped
                raise EngineStateError(
                    f"{why} has stopped {stopped_call} of this engine halfway, so that its parts "
                    "are inconsistent; call shutdown() and create a new engine"
                )
            self._owner, self._call = me, call

    def _release(self) -> None:
        with self._mutex:
            self._owner = None
            self._is_free.notify_all()

    def block_at_exit(self) -> None:
        """Block later calls of other threads, and wait up to 30 s for a running call."""
        me = threading.current_thread()
        with self._mutex:
            self._ends_process = me
            self._is_free.wait_for(lambda: self._owner in (None, me), _EXIT_S)


def _block_if_alive(guard: weakref.ref[CallGuard]) -> None:
    if (alive := guard()) is not None:
        alive.block_at_exit()
