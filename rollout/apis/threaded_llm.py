"""ThreadedLLM: the methods of AsyncLLM over an LLM's engine in this process.

Used by asynchronous training programs with one engine, `trainer_hooks.train` and
`rollout.apis.serving`. It steps the engine in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rollout.apis.llm import LLM, own_runtime
from rollout.apis.streaming import AsyncGeneration
from rollout.control.commands import AsyncControlCalls, ChecksumWeights, Command, R
from rollout.control.reports import FleetStats, WeightChecksums, WeightUpdateReport
from rollout.control.state import EngineState
from rollout.coordinator.client.streams import RequestFuture, RequestStream, StreamedTokens
from rollout.errors import EngineStateError, LockstepError, RolloutError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.token_runs import TokenRun
from rollout.serve.llm import Group
from rollout.weights.update import NamedTensors

_logger = logging.getLogger(__name__)
_MAX_FAILURES = 3  # consecutive failed steps that end the thread
_CHECK_RANKS_S = 0.5  # between checks of the ranks while no step runs; steps check them anyway

Record = DynamicInferenceRequestRecord


@dataclass(slots=True, eq=False)
class _Sample:
    """A submitted sample.

    tokens: the tokens of the sample's stream; None if it is not streamed.
    num_reported: number of tokens that were put into the stream.
    """

    future: RequestFuture
    tokens: StreamedTokens | None
    num_reported: int = 0


_Item = tuple[_Sample, TokenRun | Record | Exception]


@dataclass(frozen=True, slots=True)
class _Submission:
    """Groups that are queued all or none, and their samples in the same order."""

    groups: Sequence[Group]
    samples: Sequence[_Sample]
    priority: int


class ThreadedLLM(AsyncGeneration, AsyncControlCalls):
    """An LLM of this process with the methods of AsyncLLM. It is an async context manager.

        with LLM(policy) as llm:
            async with ThreadedLLM(llm) as threaded:
                request = await threaded.generate([1, 2, 3])

    AsyncRolloutProducer, `evaluate`, `generation_phase`, weight syncs and servers accept it.

    A thread steps the engine while the engine runs and has requests. Control methods run in other
    threads, so the event loop stays free. The LLM's own control methods can still be called, but
    its generate, submit and collect raise EngineStateError. Leaving the ThreadedLLM aborts
    unfinished requests. The LLM can be used again afterwards.
    """

    def __init__(self, llm: LLM) -> None:
        """Start the thread. Raises ConfigError for an LLM behind a coordinator or with
        pg_collection."""
        self._llm = llm
        self._runtime = own_runtime(llm, "ThreadedLLM")
        self.tokenizer, self.model_directory = llm.tokenizer, llm.model_directory
        self._unfinished_samples: dict[RequestFuture, _Sample] = {}  # written by event loops
        # Guards the fields up to `_has_ended`, and wakes the thread.
        self._changed = threading.Condition()
        self._submissions: deque[_Submission] = deque()
        self._to_abort: deque[_Sample] = deque()
        self._is_ending = self._has_ended = False
        # Samples in the engine by request id; written by the thread alone.
        self._open: dict[int, _Sample] = {}
        self._end: Future[RolloutError] = Future()  # why the thread has ended
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        return self._llm.state

    @property
    def weights_version(self) -> int:
        """The version of the weights that the engine serves."""
        return self._llm.weights_version

    # ---- requests

    def _unfinished(self) -> list[RequestFuture]:
        return list(self._unfinished_samples)

    def add_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestFuture]]:
        """Queue all groups or none, and return a future for each sample.

        A group is a prompt and the parameters of its samples. A future's `request_id` is -1 until
        the engine has the request. Unfinished requests are aborted after `deadline_s` seconds.
        Cancelling a future aborts its request. If a group is malformed, all futures fail with
        InvalidRequestError. Raises EngineStateError after the thread has ended.
        """
        submitted = self._submit(groups, priority, deadline_s, is_streamed=False)
        return [[sample.future for sample in each] for each in submitted]

    def stream_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestStream]]:
        """Queue groups as `add_groups` does. Returns a stream for each sample."""
        submitted = self._submit(groups, priority, deadline_s, is_streamed=True)
        streams = []
        for samples, (_, params) in zip(submitted, groups, strict=True):
            streams.append(list[RequestStream]())
            for sample, own in zip(samples, params, strict=True):
                assert sample.tokens is not None, "submitted as a stream"
                streams[-1].append(
                    RequestStream(sample.future, sample.tokens, own.streaming_interval)
                )
        return streams

    def _submit(
        self,
        groups: Sequence[Group],
        priority: int,
        deadline_s: float | None,
        *,
        is_streamed: bool,
    ) -> list[list[_Sample]]:
        loop = asyncio.get_running_loop()
        submitted = []
        for prompt, each in groups:
            ids = () if isinstance(prompt, str) else prompt
            futures = [RequestFuture(-1, ids, loop) for _ in each]
            submitted.append(
                [_Sample(future, StreamedTokens() if is_streamed else None) for future in futures]
            )
        samples = [sample for each in submitted for sample in each]
        with self._changed:
            if self._has_ended:
                raise EngineStateError("this ThreadedLLM has ended; make a new one")
            self._submissions.append(_Submission(groups, samples, priority))
            self._changed.notify()
        for sample in samples:
            self._watch(sample, loop, deadline_s)
        return submitted

    def _watch(
        self, sample: _Sample, loop: asyncio.AbstractEventLoop, deadline_s: float | None
    ) -> None:
        """Abort the sample at its deadline, and when its future is cancelled."""
        self._unfinished_samples[sample.future] = sample
        timer = None if deadline_s is None else loop.call_later(deadline_s, self._abort, sample)

        def end(future: asyncio.Future[Record]) -> None:
            self._unfinished_samples.pop(sample.future, None)
            if timer is not None:
                timer.cancel()
            if sample.tokens is not None:
                sample.tokens.end()
            if future.cancelled():
                self._abort(sample)

        sample.future.add_done_callback(end)

    def abort_request(self, future: RequestFuture) -> None:
        """Abort a request. Its future resolves to the record with the tokens so far. An ended
        request is ignored."""
        if (sample := self._unfinished_samples.get(future)) is not None:
            self._abort(sample)

    def _abort(self, sample: _Sample) -> None:
        with self._changed:
            self._to_abort.append(sample)
            self._changed.notify()

    # ---- control calls, beside those of AsyncControlCalls

    async def do(self, command: Command[R]) -> R:
        """Run a control call in another thread and return its result. See LLM.do."""
        return await asyncio.to_thread(self._llm.do, command)

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace all weights in place, or none, in another thread. See LLM.update_weights."""
        return await asyncio.to_thread(self._llm.update_weights, named_tensors, version, in_flight)

    async def weights_checksum(self) -> str:
        """Return a checksum of all weights, which is equal for engines that serve equal weights."""
        return await asyncio.to_thread(self._llm.weights_checksum)

    async def weight_checksums(self, start: int = 0) -> Mapping[int, WeightChecksums]:
        """Return {0: one page of the engine's weight checksums, from index `start` on}."""
        return {0: await self.do(ChecksumWeights(start=start))}

    async def fleet_stats(self) -> FleetStats:
        """Return the engine's counters in the form of a fleet with one engine, which has rank 0."""
        stats = await self.stats()
        return FleetStats(state=stats.state.name, together=stats, engines={0: stats})

    async def lost(self) -> RolloutError:
        """Wait until the thread has ended, and return the reason."""
        return await asyncio.shield(asyncio.wrap_future(self._end))

    async def aclose(self) -> None:
        """Abort unfinished requests and end the thread. A second call does nothing."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> ThreadedLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    # ---- in the thread

    @contextmanager
    def _woken_by_commands(self) -> Iterator[None]:
        """Wake this thread after each control call, which can change whether a step is possible."""

        def wake() -> None:
            with self._changed:
                self._changed.notify()

        self._runtime.on_command = wake
        try:
            yield
        finally:
            self._runtime.on_command = lambda: None

    def _run(self) -> None:
        """Step until the end, then fail all remaining futures and set `_end`."""
        error: Exception = EngineStateError(
            "this ThreadedLLM was closed before this call was answered; make a new one"
        )
        try:
            with self._llm.one_thread.calling("step"), self._woken_by_commands():
                self._step_until_end()
                self._runtime.drop(list(self._open))
        except Exception as fault:  # callers get any error that ends the thread
            error = fault
        with self._changed:
            self._has_ended = True
            left = [sample for each in self._submissions for sample in each.samples]
            self._submissions.clear()
        _deliver([(sample, error) for sample in (*self._open.values(), *left)])
        if not isinstance(error, RolloutError):
            _logger.error("the engine failed", exc_info=error)
            error = EngineStateError(f"the engine failed: {error!r}")
        self._end.set_result(error)

    def _step_until_end(self) -> None:
        num_failures = 0
        while self._wait_for_work():
            self._add_submissions()
            self._abort_samples()
            try:
                self._step()
            except LockstepError:
                raise
            except Exception:  # a single failure may be transient
                num_failures += 1
                if num_failures == _MAX_FAILURES or self._runtime.engine.is_broken:
                    raise
                _logger.exception("a step failed; its requests are queued again")
                continue
            num_failures = 0

    def _wait_for_work(self) -> bool:
        """Wait until there is work. Returns False if the thread must end. Raises EngineStateError
        if the LLM was shut down while it has requests. Raises LockstepError if the process of one
        of the engine's ranks has ended."""
        timeout_s = _CHECK_RANKS_S if self._runtime.has_ranks else None
        has_work = False
        while not has_work:
            with self._changed:
                has_work = self._changed.wait_for(self._has_work, timeout_s)
            if not has_work:
                self._runtime.check_ranks()
        if self._is_ending:
            return False
        if self._open and self._runtime.state is EngineState.STOPPED:
            raise EngineStateError(
                "the LLM was shut down before this call was answered; make a new one"
            )
        return True

    def _has_work(self) -> bool:
        state = self._runtime.state
        return bool(
            self._is_ending
            or self._submissions
            or self._to_abort
            or self._runtime.can_step
            or (self._open and state is EngineState.STOPPED)
        )

    def _add_submissions(self) -> None:
        while self._submissions:
            submission = self._submissions.popleft()
            try:
                ids = self._runtime.submit(submission.groups, submission.priority)
            except Exception as fault:  # fails this submission alone
                _deliver([(sample, fault) for sample in submission.samples])
                continue
            request_ids = [request_id for group in ids for request_id in group]
            for request_id, sample in zip(request_ids, submission.samples, strict=True):
                sample.future.request_id = request_id
                self._open[request_id] = sample

    def _abort_samples(self) -> None:
        while self._to_abort:
            request_id = self._to_abort.popleft().future.request_id
            if (sample := self._open.pop(request_id, None)) is not None:
                _deliver([(sample, self._runtime.abort_record(request_id))])

    def _step(self) -> None:
        """Run one step, if the engine runs, and deliver the step's tokens and records."""
        streamed = [(i, s.num_reported) for i, s in self._open.items() if s.tokens is not None]
        records, tokens = self._runtime.step(streamed)
        items: list[_Item] = []
        if tokens is not None:
            for request_id, _, run in tokens.apart():
                sample = self._open[request_id]
                sample.num_reported = run.end
                items.append((sample, run))
        for record in records:
            if (sample_ := self._open.pop(record.request_id, None)) is not None:
                items.append((sample_, record))
            else:  # submitted to the LLM before this object was created
                self._runtime.keep(record)
        _deliver(items)


def _deliver(items: Iterable[_Item]) -> None:
    """Pass tokens, records and errors to the samples, each in its own event loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Item]] = defaultdict(list)
    for sample, item in items:
        by_loop[sample.future.get_loop()].append((sample, item))
    for loop, own in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_take, own)


def _take(items: Sequence[_Item]) -> None:
    for sample, item in items:
        if sample.future.done():
            continue
        if isinstance(item, TokenRun):
            assert sample.tokens is not None, "only streams are reported"
            sample.tokens.add(item)
        elif isinstance(item, Exception):
            sample.future.set_exception(item)
            sample.future.exception()  # marks it as read, so that asyncio does not log it
        else:
            sample.future.set_result(item)
