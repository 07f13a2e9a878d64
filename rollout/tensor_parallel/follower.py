"""Follower and SpmdFollower: ranks other than 0, which run the commands of rank 0.

Made by `rollout.tensor_parallel.start`. Used by `rollout.tensor_parallel.executor`, which sends the
names of their methods as commands, and by `rollout.apis.spmd` and `rollout.engine.build`. A command
is a method of Worker or of these classes. Commands and answers go over sockets. SpmdFollower runs
in a process of a trainer.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from rollout.control.state import EngineState
from rollout.errors import EngineStateError, LockstepError, WeightUpdateError, decode_error
from rollout.parallel.channel import FollowerChannel, Received
from rollout.parallel.collectives import Collectives
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.tensor_parallel.update_source import SharedSource, read_along
from rollout.weights.fingerprints import WeightShare
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors
from rollout.worker.loading import EngineSizes, LoadedModel, runner_of
from rollout.worker.worker import Worker


class Follower(Worker):
    """A Worker that runs the commands of rank 0. It keeps at most two steps in flight, as rank 0
    does. It keeps the updates staged on this rank, by the keys that rank 0 chose."""

    def __init__(self, loaded: LoadedModel, sizes: EngineSizes, staging: FollowerChannel) -> None:
        """`staging` is the channel of the commands `stage` and `drop_staged`."""
        super().__init__(*runner_of(loaded, sizes), loaded.weights, loaded.backend.collectives)
        self._staging = staging
        self._staged: dict[int, StagedWeights] = {}
        self._in_flight: deque[Callable[[], StepOutput]] = deque()

    # ---- commands of rank 0, beside those of Worker

    def run_step(self, plan: StepPlan) -> int | None:
        """Launch a step. Returns the digest of its output, or None if steps overlap."""
        if len(self._in_flight) == 2:
            self._in_flight.popleft()()
        fetch = self.launch(plan)
        if not self.overlaps:
            return digest(fetch())
        # Rank 0 must not wait for this rank's output.
        self._in_flight.append(fetch)
        return None

    def reset(self) -> None:
        """Drop the steps in flight after a failure on some rank, and make collectives usable
        again."""
        self._in_flight.clear()
        self.collectives.reset()

    def stage(self, key: int, source: SharedSource, source_checksum: str) -> WeightShare:
        """Stage this rank's part of an update under `key`. Returns its part of the fingerprints."""
        staged = self.stage_weights(source.open(), self._check_not_cancelled, source_checksum)
        self._staged[key] = staged
        return staged.share

    def _check_not_cancelled(self) -> None:
        # Until rank 0 has this rank's share, the only command it can send is to drop the update.
        if self._staging.has_command:
            raise WeightUpdateError("the staging of these weights was cancelled")

    def drop_staged(self, key: int) -> None:
        """Drop the update staged under `key`, if there is one."""
        self._staged.pop(key, None)

    def commit_staged(self, key: int, version: int) -> int:
        """Serve the update staged under `key` as `version`. Returns the bytes written."""
        return self.commit_weights(self._staged[key], version)

    def undo_commit(self, key: int) -> None:
        """Roll back the update staged under `key`, if this rank has committed it."""
        if self._staged[key].is_spent:
            self.weights.roll_back(self._staged[key])

    # ---- the loop

    def serve(self, channel: FollowerChannel) -> None:
        """Run the commands of rank 0 until the channel ends. Staging commands run in a thread of
        their own, beside steps."""
        loop = threading.Thread(
            target=self._serve, args=(self._staging,), name="weight-staging", daemon=True
        )
        loop.start()
        self._serve(channel)

    def _serve(self, channel: FollowerChannel) -> None:
        with suppress(LockstepError):
            while True:
                channel.answer(self.answer_to(channel.receive()))

    def answer_to(self, received: Received) -> Any:
        """Run one command. Returns its result, or the exception that it raised. After an exception,
        aborts the collectives in which other ranks may wait for this rank. Commands without
        collectives abort nothing."""
        try:
            return received(self)
        except Exception as error:
            if received.command not in _WITHOUT_COLLECTIVES:
                self.collectives.abort()
            return error


def digest(output: StepOutput) -> int:
    """Return the CRC-32 of the sampled token ids, by which ranks compare their steps."""
    return zlib.crc32(output.samples.token_ids_S.tobytes())


# ---- processes of a trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class SpmdCall:
    """A call of an LLM method on one rank.

    `digests`: hashes of the arguments that must be equal on all ranks, by the argument's name."""

    method: str
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpmdOutcome:
    """Outcome of a call on rank 0, and the engine's state and weights version afterwards.

    `result`: the pickled result.
    `error`: the encoded error, or None if the call succeeded."""

    result: bytes = b""
    error: Mapping[str, Any] | None = None
    state: str
    weights_version: int


class SpmdFollower(Follower):
    """A rank other than 0 in a process of a trainer. It runs commands only within `join_call`. If
    this rank fails by itself, all ranks raise LockstepError, also in every later call."""

    def __init__(
        self,
        rank: int,
        loaded: LoadedModel,
        sizes: EngineSizes,
        channel: FollowerChannel,
    ) -> None:
        super().__init__(loaded, sizes, channel)
        self._rank, self._channel = rank, channel
        self._timeout_s = loaded.config.tensor_parallel_timeout_s  # for the next command
        self._start_timeout_s = loaded.config.tensor_parallel_start_timeout_s  # for the first
        self._call: SpmdCall | None = None
        self._source: NamedTensors = ()
        self._refusal: str | None = None
        self._outcome: SpmdOutcome | None = None
        self._failure: str | None = None
        self.state, self.weights_version = EngineState.RUNNING, self.weights.version

    def join_call(self, call: SpmdCall, source: NamedTensors = ()) -> Any:
        """Take part in a call that all ranks make. Returns rank 0's result.

        Runs rank 0's commands until the call ends. `source` holds this rank's tensors if the call
        is an update. Raises rank 0's error, EngineStateError if the ranks' calls differ, or
        LockstepError if a rank has failed."""
        if self._failure is not None:
            raise LockstepError(self._failure)
        self._call, self._source = call, source
        self._refusal = self._outcome = None
        try:
            outcome = self._run_until_outcome()
        except EngineStateError:
            raise
        except BaseException as error:  # Ctrl-C, too: rank 0 would wait for this rank
            self._leave(error)
        finally:
            self._source = ()
        self.state = EngineState(outcome.state)
        self.weights_version = outcome.weights_version
        if outcome.error is not None:
            raise decode_error(outcome.error)
        return pickle.loads(outcome.result)

    def _run_until_outcome(self) -> SpmdOutcome:
        timeout_s = self._start_timeout_s
        while True:
            answer = self.answer_to(self._channel.receive(timeout_s))
            if isinstance(answer, LockstepError):
                raise answer
            # After the end of a call rank 0 may have shut down.
            with nullcontext() if self._outcome is None else suppress(LockstepError):
                self._channel.answer(answer)
            if self._refusal is not None:
                raise EngineStateError(self._refusal)
            if self._outcome is not None:
                return self._outcome
            timeout_s = self._timeout_s

    def _leave(self, error: BaseException) -> NoReturn:
        reason = str(error) if isinstance(error, LockstepError) else f"it raised {error!r}"
        self._failure = f"rank {self._rank} has left the engine; create a new engine: {reason}"
        self.collectives.abort()
        self._channel.leave(reason)
        raise error

    def shutdown(self) -> None:
        """Release this rank's memory and leave the group. A second call does nothing."""
        if self.state is EngineState.STOPPED:
            return
        self.state = EngineState.STOPPED
        self._failure = f"rank {self._rank} has shut down"
        self._channel.leave("it has shut down")
        self.close()
        self.collectives.close()

    # ---- commands of rank 0

    def report_call(self) -> SpmdCall:
        """Return the call that this rank is in."""
        assert self._call is not None, "commands run within a call"
        return self._call

    def refuse_call(self, reason: str) -> None:
        """End the call with EngineStateError(reason), because the ranks' calls differ."""
        self._refusal = reason

    def finish_call(self, outcome: SpmdOutcome) -> None:
        """End the call with rank 0's outcome."""
        self._outcome = outcome

    def read_source(self) -> None:
        """Read this rank's source of an update, and drop the values, while rank 0 reads its own."""
        read_along(self._source)


_WITHOUT_COLLECTIVES = (Follower.stage, Follower.drop_staged, SpmdFollower.read_source)


# ---- the start

F = TypeVar("F", bound=Follower)


class FollowerStart(Generic[F]):
    """The start of a rank other than 0. Rank 0 sends the commands `join_ranks`, `load`, `prepare`
    and `begin` in this order, from `load_on_ranks`."""

    def __init__(
        self,
        *,
        join: Callable[[], Collectives],
        load: Callable[[Collectives], LoadedModel],
        make: Callable[[LoadedModel, EngineSizes], F],
    ) -> None:
        """`join` joins the rendezvous of the ranks, and returns their collectives. `load` loads
        this rank's part of the model. `make` returns the Follower for an engine of given sizes."""
        self._join, self._load, self._make = join, load, make
        self._collectives: Collectives | None = None
        self._loaded: LoadedModel | None = None
        self._follower: F | None = None

    def serve(self, channel: FollowerChannel, timeout_s: float | None = None) -> F:
        """Run commands until the rank has started. Returns its Follower. `timeout_s` is how long to
        wait for each command, or None for no limit. An error of a command is sent to rank 0 and
        raised."""
        while self._follower is None:
            received = channel.receive(timeout_s)
            try:
                result = received(self)
            except Exception as error:
                channel.answer(error)
                raise
            channel.answer(result)
        return self._follower

    def join_ranks(self) -> None:
        self._collectives = self._join()

    def load(self) -> None:
        assert self._collectives is not None, "ranks join before they load"
        self._loaded = self._load(self._collectives)

    def prepare(self) -> int:
        """Bind the model to its backend. Returns the number of KV blocks that fit this rank."""
        assert self._loaded is not None, "ranks load before they prepare"
        self._loaded.model.prepare(self._loaded.backend)
        return self._loaded.sizes.num_blocks

    def begin(self, sizes: EngineSizes) -> None:
        """Make the Follower, which reserves the memory of an engine of these sizes."""
        assert self._loaded is not None, "ranks load before they begin"
        self._follower = self._make(self._loaded, sizes)
