"""LeadChannel and FollowerChannel: rank 0 sends commands to the other ranks, which answer them.

Used by `rollout.tensor_parallel.executor` and `rollout.tensor_parallel.follower`. Made by
`rollout.tensor_parallel.start`. Commands and answers travel over sockets, pickled.

A command is a function with its arguments. Each other rank calls the function with an object of its
own and the arguments. It answers once, with the result or the error, in the order of commands.
Unpickling is safe, because all ranks are processes of one engine and no other process can open the
sockets.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rollout.errors import LockstepError, RolloutError, decode_error, encode_error
from rollout.parallel.wire import Wire, WireClosedError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LEAVE_TIMEOUT_S = 1.0  # for the last message of a rank
_NUM_KEPT = 16  # commands whose early errors are kept; fewer steps are in flight


@dataclass(frozen=True, slots=True)
class Sent(Generic[_R]):
    """A command that was sent, identified by its number on the channel. Answers have the type
    `_R`."""

    number: int


@dataclass(frozen=True, slots=True)
class Received:
    """A command that a rank has received. Calling it with the rank's object runs the command."""

    command: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, target: Any) -> Any:
        return self.command(target, *self.args, **self.kwargs)


class LeadChannel:
    """Rank 0's end of the wires to all other ranks. One thread at a time may wait for answers.

    After a LockstepError or `close`, every later call that sends, waits or checks raises
    LockstepError, because the state of a rank is unknown. `on_failure`, which the owner may set, is
    called once with the reason of the first failure."""

    def __init__(self, wires: Mapping[str, Wire], *, timeout_s: float) -> None:
        """`wires` holds the wires to ranks 1, 2, ... by the rank's name in error messages.
        `timeout_s` is the deadline in seconds to send a command, and to receive its answers."""
        self._wires, self.timeout_s = dict(wires), timeout_s
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._num_sent = 0
        self._num_answered = dict.fromkeys(self._wires, 0)
        self._early_errors: dict[tuple[str, int], RolloutError] = {}
        self._cut_off: set[str] = set()  # ranks that may have half of a command
        self._failure: LockstepError | None = None

    def send(
        self, command: Callable[Concatenate[Any, _P], _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Sent[_R]:
        """Send a command to all other ranks, which call it with their own object and the arguments.
        Raises LockstepError if a rank has ended or does not read the command in time."""
        self.require()
        message = pickle.dumps((command, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        self._num_sent += 1
        for name, wire in self._wires.items():
            self._cut_off.add(name)
            try:
                wire.send(message, self.timeout_s)
            except TimeoutError:
                what = f"{name} read no command ({command.__name__})"
                raise self.fail(f"{what} for {self.timeout_s:g} s") from None
            except WireClosedError as error:
                why = self._leave_reason(wire) or str(error)
                raise self.fail(f"{name} has ended ({why}) before {command.__name__!r}") from error
            except BaseException as error:  # Ctrl-C: half of a command may be on its way
                self.fail(f"{command.__name__!r} was cut off by {error!r}")
                raise
            self._cut_off.discard(name)
        return Sent(self._num_sent)

    def _leave_reason(self, wire: Wire) -> str:
        """Return the reason that a rank sent with `FollowerChannel.leave`, or ""."""
        with suppress(TimeoutError, WireClosedError):
            while True:
                answer = pickle.loads(wire.receive(0.0))
                if isinstance(answer, LockstepError):
                    return str(answer)
        return ""

    def results(self, sent: Sent[_R], timeout_s: float | None = None) -> list[_R]:
        """Wait for the results of a command, and return them in the order of ranks. If the command
        failed on a rank, raises the first such rank's error. Raises LockstepError as `answers`
        does."""
        answers = self.answers(sent, timeout_s)
        raise_first(answers)
        return answers

    def answers(
        self, sent: Sent[Any] | None = None, timeout_s: float | None = None, what: str = "answer"
    ) -> list[Any]:
        """Wait for the answers to a command, by default the latest, and return them in the order of
        ranks.

        An answer is the command's result on the rank, or the RolloutError that the command raised
        there. An answer that was dropped or returned before is None. Results of earlier commands,
        which arrive first, are dropped. Recent errors of earlier commands are kept for a later call
        that names the command.

        `timeout_s` None means the channel's own deadline. Raises LockstepError if a rank ends or
        does not answer in time. The error then says that the rank "did not `what` in time"."""
        self.require()
        number = self._num_sent if sent is None else sent.number
        timeout_s = timeout_s or self.timeout_s
        late, deadline = f"did not {what} in time ({timeout_s:g} s)", time.monotonic() + timeout_s
        return [self._answer(name, number, deadline, late) for name in self._wires]

    def _answer(self, name: str, number: int, deadline: float, late: str) -> Any:
        answer = self._early_errors.pop((name, number), None)
        while self._num_answered[name] < number:
            try:
                left_s = max(0.0, deadline - time.monotonic())
                answer = pickle.loads(self._wires[name].receive(left_s))
            except TimeoutError:
                raise self.fail(f"{name} {late}") from None
            except WireClosedError as error:
                raise self.fail(f"{name} has ended ({error})") from error
            self._num_answered[name] += 1
            if isinstance(answer, LockstepError):
                raise self.fail(f"{name} has ended ({answer})")
            if isinstance(answer, RolloutError) and self._num_answered[name] < number:
                self._keep(name, answer)
        return answer

    def _keep(self, name: str, error: RolloutError) -> None:
        """Keep the error of an earlier command for `answers`, and drop old errors."""
        now = self._num_answered[name]
        for key in [key for key in self._early_errors if key[1] < now - _NUM_KEPT]:
            del self._early_errors[key]
        self._early_errors[name, now] = error

    def check(self) -> None:
        """Raise LockstepError if a rank has ended, or if the channel has failed or is closed."""
        self.require()
        for name, wire in self._wires.items():
            if wire.is_closed():
                raise self.fail(f"{name} has ended")

    def require(self) -> None:
        """Raise LockstepError if the channel has failed or is closed."""
        if self._failure is not None:
            raise LockstepError(*self._failure.args) from self._failure

    def fail(self, reason: str) -> LockstepError:
        """Make later calls raise a LockstepError with `reason`, and return that error. Only the
        first failure counts, and calls `on_failure`."""
        if self._failure is None:
            self._failure = LockstepError(f"{reason}; create a new engine")
            self.on_failure(reason)
        return self._failure

    def end(self, error: BaseException) -> None:
        """Send `error` to the other ranks, whose `receive` raises it, and close the channel. A rank
        that may have received half of a command gets nothing."""
        message = pickle.dumps((None, (encode_error(error),), {}), pickle.HIGHEST_PROTOCOL)
        for name in self._wires.keys() - self._cut_off:
            with suppress(TimeoutError, WireClosedError):
                self._wires[name].send(message, _LEAVE_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Close all wires, which ends the other ranks. A second call does nothing."""
        if self._failure is None:
            self._failure = LockstepError("the engine is shut down; create a new engine")
        for wire in self._wires.values():
            wire.close()


class FollowerChannel:
    """The end of the wire at a rank other than 0, which receives commands and answers them."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self._rank, self._wire = rank, wire

    def receive(self, timeout_s: float | None = None) -> Received:
        """Wait for the next command. `timeout_s` None means no deadline. Raises LockstepError if
        rank 0 has ended or sends nothing in time. Raises the error that rank 0 has sent with
        `LeadChannel.end`."""
        try:
            command, args, kwargs = pickle.loads(self._wire.receive(timeout_s))
        except TimeoutError:
            raise LockstepError(f"rank 0 sent no command for {timeout_s:g} s") from None
        except WireClosedError as error:
            raise LockstepError(f"rank 0 has ended ({error})") from error
        if command is None:
            raise decode_error(*args)
        return Received(command, args, kwargs)

    def check(self) -> None:
        """Raise LockstepError if rank 0 has ended."""
        if self._wire.is_closed():
            raise LockstepError("rank 0 has ended")

    @property
    def has_command(self) -> bool:
        """Whether a command has arrived, at least in part, or rank 0 has ended."""
        return self._wire.has_message()

    def answer(self, value: Any) -> None:
        """Answer the oldest unanswered command. An exception is sent as this rank's error. Raises
        as `receive` does if rank 0 has ended."""
        if isinstance(value, BaseException):
            encoded = encode_error(value)
            encoded["message"] = f"rank {self._rank}: {encoded['message']}"
            value = decode_error(encoded)
        try:
            self._wire.send(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None)
        except WireClosedError:
            while True:
                self.receive(0.0)  # raises the error that rank 0 has sent, else LockstepError

    def leave(self, reason: str) -> None:
        """Tell rank 0 why this rank will answer no more, and close the wire. A second call does
        nothing."""
        with suppress(TimeoutError, WireClosedError):
            self._wire.send(pickle.dumps(LockstepError(reason)), _LEAVE_TIMEOUT_S)
        self._wire.close()


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first RolloutError among `answers`. Return if there is none."""
    for answer in answers:
        if isinstance(answer, RolloutError):
            raise answer
