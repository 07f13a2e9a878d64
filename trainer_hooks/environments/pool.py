"""EnvironmentPool: environment instances that are reused for one episode after another.

Used by `trainer_hooks.environments.episodes`. The number of instances in use is limited. Each
instance has a thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.environments.faults import EnvironmentFault
from trainer_hooks.environments.protocol import Environment, ToolCallError

_log = logging.getLogger(__name__)

MakeEnvironment = Callable[[], Environment | Awaitable[Environment]]


class HostedEnvironment:
    """An environment instance with a thread that runs its methods. Async methods run in the event
    loop.

    The thread is a daemon, so a method that never returns blocks neither the event loop nor the
    program's exit.

    `is_reusable`: whether another episode can use the instance. It is False once a method has
        raised, taken too long or been cancelled.
    """

    def __init__(self, make: MakeEnvironment) -> None:
        """Start without an instance. The first method call makes it by `make`."""
        self._make = make
        self._environment: Environment | None = None
        self._thread = _Thread()
        self._task: asyncio.Task[Any] | None = None
        self.is_reusable = True

    @property
    def tools(self) -> Any:
        """Schemas of the environment's tools, or () before the first method call.

        Raises EnvironmentFault if the property raises an error other than ConfigError.
        """
        try:
            return getattr(self._environment, "tools", ())
        except Exception as error:  # the user's code may raise anything
            self.is_reusable = False
            if isinstance(error, ConfigError):
                raise
            raise EnvironmentFault("tools_error", f"tools raised {error!r}") from error

    async def call(self, name: str, *args: Any, timeout_s: float | None) -> Any:
        """Return the result of method `name`, or None if the environment has no such method.

        Raises EnvironmentFault if the method raises or exceeds `timeout_s`. ConfigError, and a
        ToolCallError of `step`, pass through.
        """
        task = self._task = asyncio.ensure_future(self._run(name, args))
        task.add_done_callback(_retrieve_exception)
        was_reusable, self.is_reusable = self.is_reusable, False
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()  # no effect on a finished task
        if not done:
            raise EnvironmentFault(f"{name}_timeout", f"{name}() took over {timeout_s:g} s")
        try:
            result = task.result()
        except ConfigError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # the user's code may raise anything
            if isinstance(error, ToolCallError) and name == "step":
                self.is_reusable = was_reusable
                raise
            raise EnvironmentFault(f"{name}_error", f"{name}() raised {error!r}") from error
        self.is_reusable = was_reusable
        return result

    async def close(self) -> None:
        """Close the instance after its last method has returned, and end the thread. Logs
        errors."""
        try:
            if self._task is not None and not self._task.done():
                await asyncio.wait({self._task})
            close = getattr(self._environment, "close", None)
            if inspect.iscoroutinefunction(close):
                await self._thread.idle()
                await close()
            else:
                await self._in_loop_or_thread(self._close_in_thread)
        except Exception as error:  # the user's code may raise anything
            _log.warning("an environment failed to close: %r", error, exc_info=error)
        finally:
            self._thread.end()

    def _close_in_thread(self) -> Any:
        # Read in the thread, which can create the instance after its rollout was cancelled.
        close = getattr(self._environment, "close", None)
        return None if close is None else close()

    async def _run(self, name: str, args: tuple[Any, ...]) -> Any:
        if self._environment is None:
            await self._in_loop_or_thread(self._made())
        method = getattr(self._environment, name, None)
        if method is None:
            return None
        return await self._in_loop_or_thread(functools.partial(method, *args))

    def _made(self) -> Callable[[], Any]:
        if not inspect.iscoroutinefunction(self._make):
            return self._keep_made

        async def keep_made() -> None:
            self._environment = await self._make()  # type: ignore[misc]

        return keep_made

    def _keep_made(self) -> None:
        # The thread stores the instance, so that `close` finds it if the caller was cancelled.
        self._environment = self._make()  # type: ignore[assignment]

    async def _in_loop_or_thread(self, work: Callable[[], Any]) -> Any:
        function = work.func if isinstance(work, functools.partial) else work
        if inspect.iscoroutinefunction(function):
            try:
                return await work()
            except SystemExit as error:  # it would end the event loop
                raise RuntimeError(repr(error)) from error
        result = await self._thread.submit(work)
        return await result if inspect.isawaitable(result) else result


class _Thread:
    """A daemon thread that runs functions in order. It starts with the first function."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_begun = False

    def submit(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Return a future of the result of `work`, which runs even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the event loop is closed
                _drop(result)

        self._works.put(run)
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._loop, name="environment", daemon=True).start()
        return future

    async def idle(self) -> None:
        if self._has_begun:
            await self.submit(lambda: None)

    def end(self) -> None:
        self._works.put(None)

    def _loop(self) -> None:
        while (work := self._works.get()) is not None:
            work()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller was cancelled
        _drop(result)
    elif error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future cannot hold StopIteration, and SystemExit would end the event loop
        future.set_exception(RuntimeError(repr(error)))


def _drop(result: Any) -> None:
    """Close a coroutine that is never awaited, so that Python does not warn about it."""
    if inspect.iscoroutine(result):
        result.close()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Read the task's exception, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


class EnvironmentPool:
    """At most `max_environments` environment instances in use.

    A pool serves one event loop. An instance whose episode had no fault is reused. Any other
    instance is closed when its last method returns, and no longer counts as in use even if it
    hangs.
    """

    def __init__(self, make: MakeEnvironment, max_environments: int) -> None:
        """Start without instances. `make` returns a new one. Raises ConfigError for
        `max_environments` below 1."""
        if max_environments < 1:
            raise ConfigError(f"max_environments={max_environments} must be at least 1")
        self._make = make
        self._places = asyncio.Semaphore(max_environments)
        self._idle: list[HostedEnvironment] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def acquire(self) -> HostedEnvironment:
        """Wait for an instance and return it for exclusive use until `release`. Raises
        EnvironmentFault if the pool is closed."""
        await self._places.acquire()
        if self._is_closed:
            self._places.release()
            raise EnvironmentFault("closed", "the environments are closed")
        return self._idle.pop() if self._idle else HostedEnvironment(self._make)

    def release(self, environment: HostedEnvironment) -> None:
        """Return the instance to the pool, or close it if it is not reusable."""
        self._places.release()
        if environment.is_reusable and not self._is_closed:
            self._idle.append(environment)
        else:
            self._close(environment)

    async def aclose(self, timeout_s: float) -> None:
        """Close all instances, at the latest when they are released. Returns after `timeout_s`
        seconds even if instances are still closing. Can be called twice."""
        self._is_closed = True
        while self._idle:
            self._close(self._idle.pop())
        if self._closing:
            _, pending = await asyncio.wait(self._closing, timeout=timeout_s)
            if pending:
                _log.warning("%d environments did not close in %g s", len(pending), timeout_s)
                for task in pending:
                    task.cancel()

    def _close(self, environment: HostedEnvironment) -> None:
        task = asyncio.ensure_future(environment.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
