"""TensorParallelExecutor and SpmdExecutor: run an engine on several ranks, from rank 0.

Made by `rollout.tensor_parallel.start`. Used by `rollout.engine` in place of WorkerExecutor, and by
`rollout.apis.spmd`. An executor calls rank 0's Worker, and sends the same commands to the other
ranks over sockets. SpmdExecutor serves ranks that are processes of a trainer.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from rollout.child_process import ChildProcess
from rollout.errors import EngineStateError, LockstepError
from rollout.parallel.channel import LeadChannel, Sent, raise_first
from rollout.parallel.collectives import CollectiveAbortedError
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import RankUse
from rollout.tensor_parallel.follower import Follower, SpmdCall, SpmdFollower, SpmdOutcome, digest
from rollout.tensor_parallel.update_source import SharedSource, in_shared_memory
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors
from rollout.weights.version import next_version
from rollout.worker.executor import WorkerExecutor
from rollout.worker.worker import Worker

_P = ParamSpec("_P")
_R = TypeVar("_R")


class TensorParallelExecutor(WorkerExecutor):
    """Sends each command to the other ranks, runs it on rank 0, and waits for all answers.

    If a command fails on a rank, the error is raised after all ranks have answered. The ranks can
    then run the next command. If a rank ends or does not answer in time, this command and every
    later one raise LockstepError.

    `channel` carries all commands except staging, and only the thread that steps uses it. `staging`
    carries `Follower.stage` and `Follower.drop_staged`, from any thread."""

    def __init__(
        self,
        worker: Worker,
        *,
        channel: LeadChannel,
        staging: LeadChannel,
        processes: Sequence[ChildProcess] = (),
    ) -> None:
        """`processes` are the child processes of the other ranks, in the order of ranks. The child
        processes are killed by `close`, by a failure of a rank, and when the executor is freed."""
        super().__init__(worker)
        self._collectives = worker.collectives
        self._channel, self._staging = channel, staging
        channel.on_failure = staging.on_failure = self._on_failure
        self._processes = processes
        weakref.finalize(self, end_processes, processes)  # if `close` is never called
        self._staging_lock = threading.Lock()
        self._num_staged, self._is_closed = 0, False
        self._to_drop: deque[int] = deque()

    @property
    def pids(self) -> list[int]:
        """Process ids of the child processes, in the order of ranks."""
        return [process.pid for process in self._processes]

    def run(
        self, method: Callable[Concatenate[Worker, _P], _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> list[_R]:
        """Run a method of Worker on all ranks. Returns the results in the order of ranks. Once all
        ranks have answered, raises rank 0's error, or else another rank's error. LockstepError is
        raised at once."""
        sent = self._channel.send(method, *args, **kwargs)
        return self._together(lambda: method(self.worker, *args, **kwargs), sent)

    def _together(self, own: Callable[[], _R], sent: Sent[_R]) -> list[_R]:
        """Call `own`, rank 0's part of the command `sent`. Returns the results of all ranks."""
        try:
            return [own(), *self._channel.results(sent)]
        except BaseException as error:
            self._realign(error)

    def _realign(self, error: BaseException) -> NoReturn:
        """Bring all ranks to where they wait for the next command, after a command has failed with
        `error`. Always raises: `error`, or the error of another rank that aborted rank 0's
        collective."""
        if isinstance(error, LockstepError):
            raise self._channel.fail(str(error)) from error
        self._collectives.abort()
        answers = self._channel.answers()
        try:
            self._collectives.reset()
        except LockstepError as failure:
            raise self._channel.fail(str(failure)) from error
        self._channel.results(self._channel.send(Follower.reset))
        if isinstance(error, CollectiveAbortedError):
            raise_first(answers)
        raise error

    # ---- steps

    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Start a step on all ranks. The returned function waits for its result. The function
        raises LockstepError if another rank has sampled other tokens. Tokens are not compared on
        devices where steps overlap."""
        sent = self._channel.send(Follower.run_step, plan)
        try:
            fetch = self.worker.launch(plan)
        except BaseException as error:
            self._realign(error)

        def wait() -> StepOutput:
            try:
                output = fetch()
                digests = self._channel.results(sent)
            except BaseException as error:
                self._realign(error)
            own = digest(output)
            for rank, found in enumerate(digests, start=1):
                if found not in (None, own):
                    raise self._channel.fail(
                        f"rank {rank} drew other tokens than rank 0 in step {plan.step_id}"
                    )
            return output

        return wait

    # ---- weights

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedWeights:
        """Stage an update on all ranks, through a copy in shared memory. Verifies the checksum with
        the fingerprints of all ranks. `check` and `source_checksum` are as in WorkerExecutor."""
        self.weights.require_resident("stage an update")
        with self._staging_lock, self._shared(named_tensors) as (tensors, source):
            self._num_staged += 1
            key = self._num_staged
            sent = self._staging.send(Follower.stage, key, source, source_checksum)
            try:
                staged = self.worker.stage_weights(tensors, check, source_checksum)
                shares = self._staging.results(sent)
                self.weights.verify(staged, [staged.share, *shares], source_checksum)
            except BaseException:
                # Also cancels staging on the other ranks. All have answered before this block ends
                # and frees the shared memory.
                self._staging.answers(self._staging.send(Follower.drop_staged, key))
                raise
        staged.elsewhere = _StagedElsewhere(key, self._drop)
        self._send_drops()
        return staged

    @contextmanager
    def _shared(self, named_tensors: NamedTensors) -> Iterator[tuple[NamedTensors, SharedSource]]:
        """Copy an update to shared memory and yield it. See `in_shared_memory`."""
        with in_shared_memory(named_tensors) as shared:
            yield shared

    def _drop(self, key: int) -> None:
        """Make the other ranks drop the update that they staged under `key`. Any thread may call
        it."""
        self._to_drop.append(key)
        self._send_drops()

    def _send_drops(self) -> None:
        """Send the queued drops, unless another thread stages. The other thread sends them when it
        is done."""
        while self._to_drop and self._staging_lock.acquire(blocking=False):
            try:
                with suppress(LockstepError, IndexError):
                    self._staging.send(Follower.drop_staged, self._to_drop.popleft())
            finally:
                self._staging_lock.release()

    def commit_weights(self, staged: StagedWeights, version: int | None) -> int:
        """Serve a staged update as `version` on all ranks. Returns the bytes written on all ranks.
        If one rank fails, the other ranks roll back."""
        version = next_version(self.weights.version, version)
        key, before = staged.elsewhere.key, self.weights.version
        sent = self._channel.send(Follower.commit_staged, key, version)
        try:
            return sum(self._together(lambda: self.worker.commit_weights(staged, version), sent))
        except LockstepError:
            raise
        except BaseException:
            if self.weights.version != before:
                self.weights.roll_back(staged)
            self._together(lambda: None, self._channel.send(Follower.undo_commit, key))
            raise

    # ---- ranks

    def check_ranks(self) -> None:
        """Raise LockstepError if another rank has ended. Does nothing after `close`."""
        if not self._is_closed:
            self._channel.check()

    def rank_uses(self) -> tuple[RankUse, ...]:
        """Return each rank's memory and CPU time, in the order of ranks, or () after `close`."""
        return () if self._is_closed else super().rank_uses()

    def close(self) -> None:
        """End the other ranks, release rank 0's KV cache and close its collectives. May be called
        again if it fails."""
        self._channel.close()
        self._staging.close()
        self._is_closed = True
        end_processes(self._processes)
        super().close()
        self._collectives.close()

    def _on_failure(self, reason: str) -> None:
        self._channel.fail(reason)
        self._staging.fail(reason)
        end_processes(self._processes)


def end_processes(children: Sequence[ChildProcess]) -> None:
    """Kill child processes with SIGKILL and wait for their end."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()


class _StagedElsewhere:
    """The parts of an update that the other ranks have staged under `key`. Freeing this object
    calls `drop`, which makes the other ranks drop their parts."""

    def __init__(self, key: int, drop: Callable[[int], None]) -> None:
        self.key, self._drop = key, drop

    def __del__(self) -> None:
        self._drop(self.key)


class SpmdExecutor(TensorParallelExecutor):
    """Runs an engine whose ranks are processes of a trainer that all call the same LLM methods.

    `begin_call` waits for the other ranks, and `end_call` sends them the outcome. One channel
    carries all commands. A failure of a rank ends no process. Every rank that waits for another one
    raises LockstepError at once."""

    def __init__(self, worker: Worker, *, channel: LeadChannel, start_timeout_s: float) -> None:
        """`start_timeout_s` is how long to wait until the other ranks make the call that rank 0
        makes."""
        super().__init__(worker, channel=channel, staging=channel)
        self._start_timeout_s = start_timeout_s

    def begin_call(self, call: SpmdCall) -> None:
        """Wait until all ranks make `call`. Raises EngineStateError on all ranks if their calls
        differ. The ranks can then make another call."""
        sent = self._channel.send(SpmdFollower.report_call)
        calls = self._channel.answers(sent, self._start_timeout_s, f"call {call.method}")
        if difference := _difference([call, *calls]):
            self._channel.send(SpmdFollower.refuse_call, difference)
            raise EngineStateError(difference)

    def end_call(self, outcome: SpmdOutcome) -> None:
        """Let the other ranks return from the call with `outcome`, after the queued drops. Does
        nothing once a rank has failed."""
        with suppress(LockstepError):
            while self._to_drop:
                self._channel.send(Follower.drop_staged, self._to_drop.popleft())
            self._channel.send(SpmdFollower.finish_call, outcome)

    @contextmanager
    def _shared(self, named_tensors: NamedTensors) -> Iterator[tuple[NamedTensors, SharedSource]]:
        """Copy rank 0's source to shared memory and yield it, while the other ranks read their
        sources."""
        # Reading may be a collective of the trainer's ranks.
        sent = self._channel.send(SpmdFollower.read_source)
        with super()._shared(named_tensors) as shared:
            self._channel.results(sent)
            yield shared

    def _send_drops(self) -> None:
        """Do nothing. Ranks run commands only within a call, so `end_call` sends the drops."""

    def _on_failure(self, reason: str) -> None:
        self._collectives.abort()
        self._channel.end(self._channel.fail(reason))

    def close(self) -> None:
        self._channel.end(LockstepError("rank 0 has shut the engine down"))
        super().close()


def _difference(calls: list[SpmdCall]) -> str | None:
    """Return a message on how the calls of the ranks differ, or None if they are equal."""
    first, remedy = calls[0], "all ranks of pg_collection.tp make the same calls, in one order"
    if any(call.method != first.method for call in calls):
        named = ", ".join(f"rank {rank} called {call.method}" for rank, call in enumerate(calls))
        return f"the ranks have called different methods: {named}; {remedy}"
    for rank, call in enumerate(calls):
        for name, digest_of_first in first.digests.items():
            if call.digests[name] != digest_of_first:
                return (
                    f"ranks 0 and {rank} have called {first.method} with different {name}; all "
                    "ranks of pg_collection.tp give the same arguments"
                )
    return None
