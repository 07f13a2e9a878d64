"""LeadChannel and FollowerChannel: commands of rank 0 to the other ranks, and their answers.

A command is a function and its arguments. Rank 0 sends it. Each other rank applies it to an object
of its own and answers once, in the order of commands, with the result or the error raised. Both are
pickled, functions by reference: all ranks are processes of one engine and run the same code, over
sockets that no other process can open. A rank that leaves first may send the reason. Used by
TensorParallelExecutor and Follower.
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
_LAST_WORD_S = 1.0
_NUM_KEPT = 16  # commands; steps in flight are fewer


@dataclass(frozen=True, slots=True)
class Sent(Generic[_R]):
    """A command that was sent, the `number`-th of its channel. Each rank answers with an `_R`."""

    number: int


@dataclass(frozen=True, slots=True)
class Received:
    """A command that a rank has received. A call applies it to the rank's object."""

    command: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, target: Any) -> Any:
        return self.command(target, *self.args, **self.kwargs)


class LeadChannel:
    """Rank 0's end, to all other ranks. One thread at a time waits for answers.

    After one LockstepError every call raises it: the state of a rank that missed its deadline is
    unknown. `on_failure` is called with the reason, once.
    """

    def __init__(self, wires: Mapping[str, Wire], *, timeout_s: float) -> None:
        """`wires`: the wire to each rank by the name that errors give, in the order of ranks.
        `timeout_s`: deadline of each answer."""
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
        """Send a command to all ranks. Each applies it to its own object and `args`."""
        self.require()
        message = pickle.dumps((command, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        self._num_sent += 1
        for name, wire in self._wires.items():
            self._cut_off.add(name)
            try:
                wire.send(message, self.timeout_s)
            except TimeoutError:
                what = f"{name} took no command ({command.__name__})"
                raise self.fail(f"{what} for {self.timeout_s:g} s") from None
            except WireClosedError as error:
                why = self._last_word(wire) or str(error)
                raise self.fail(f"{name} has ended ({why}) before {command.__name__!r}") from error
            except BaseException as error:  # Ctrl-C: half of a command may be on its way
                self.fail(f"{command.__name__!r} was cut off by {error!r}")
                raise
            self._cut_off.discard(name)
        return Sent(self._num_sent)

    def _last_word(self, wire: Wire) -> str:
        """Return the reason that a rank sent before it left; "" if it sent none."""
        with suppress(TimeoutError, WireClosedError):
            while True:
                answer = pickle.loads(wire.receive(0.0))
                if isinstance(answer, LockstepError):
                    return str(answer)
        return ""

    def results(self, sent: Sent[_R], timeout_s: float | None = None) -> list[_R]:
        """Return what each rank has returned, in the order of ranks. Raises the first error of a
        rank, and as `answers` does."""
        answers = self.answers(sent, timeout_s)
        raise_first(answers)
        return answers

    def answers(
        self, sent: Sent[Any] | None = None, timeout_s: float | None = None, what: str = "answer"
    ) -> list[Any]:
        """Wait for the answers to a command, by default the latest, in the order of ranks.

        An answer that is a RolloutError was raised by its rank. Answers to earlier commands arrive
        first: their errors are kept for a later call, and their results are dropped. The answer to
        a command that was passed over in this way, or was waited for before, is None.
        Raises LockstepError at the deadline, which is `timeout_s` if given. The error says `what`
        the rank did not do.
        """
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
        """Keep an error that arrived before the answer waited for, and drop old ones."""
        now = self._num_answered[name]
        for key in [key for key in self._early_errors if key[1] < now - _NUM_KEPT]:
            del self._early_errors[key]
        self._early_errors[name, now] = error

    def check(self) -> None:
        """Raise LockstepError if a rank is gone."""
        self.require()
        for name, wire in self._wires.items():
            if wire.is_closed():
                raise self.fail(f"{name} has ended")

    def require(self) -> None:
        """Raise the LockstepError that was raised before, if there was one."""
        if self._failure is not None:
            raise LockstepError(*self._failure.args) from self._failure

    def fail(self, reason: str) -> LockstepError:
        """Send no command from now on. Returns the error that later calls raise."""
        if self._failure is None:
            self._failure = LockstepError(f"{reason}; create a new engine")
            self.on_failure(reason)
        return self._failure

    def end(self, error: BaseException) -> None:
        """Make the other ranks raise `error` instead of waiting for a command; then close."""
        message = pickle.dumps((None, (encode_error(error),), {}), pickle.HIGHEST_PROTOCOL)
        for name in self._wires.keys() - self._cut_off:
            with suppress(TimeoutError, WireClosedError):
                self._wires[name].send(message, _LAST_WORD_S)
        self.close()

    def close(self) -> None:
        """Close all wires, which ends the other ranks. A second call does nothing."""
        if self._failure is None:
            self._failure = LockstepError("the engine is shut down; create a new engine")
        for wire in self._wires.values():
            wire.close()


class FollowerChannel:
    """The end of another rank."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self._rank, self._wire = rank, wire

    def receive(self, timeout_s: float | None = None) -> Received:
        """Wait for the next command.

        Raises LockstepError if rank 0 is gone or sends nothing in time, and the error that rank 0
        has ended with.
        """
        try:
            command, args, kwargs = pickle.loads(self._wire.receive(timeout_s))
        except TimeoutError:
            raise LockstepError(f"rank 0 gave no command for {timeout_s:g} s") from None
        except WireClosedError as error:
            raise LockstepError(f"rank 0 has ended ({error})") from error
        if command is None:
            raise decode_error(*args)
        return Received(command, args, kwargs)

    def check(self) -> None:
        """Raise LockstepError if rank 0 is gone."""
        if self._wire.is_closed():
            raise LockstepError("rank 0 has ended")

    @property
    def has_command(self) -> bool:
        """Whether `receive` would return at once."""
        return self._wire.has_message()

    def answer(self, value: Any) -> None:
        """Answer the oldest unanswered command. An exception is sent as this rank's error."""
        if isinstance(value, BaseException):
            encoded = encode_error(value)
            encoded["message"] = f"rank {self._rank}: {encoded['message']}"
            value = decode_error(encoded)
        try:
            self._wire.send(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None)
        except WireClosedError:
            while True:
                self.receive(0.0)  # raises the error that rank 0 has sent, or that it is lost

    def leave(self, reason: str) -> None:
        """Send rank 0 the reason why this rank answers nothing more; then close. A second call does
        nothing."""
        with suppress(TimeoutError, WireClosedError):
            self._wire.send(pickle.dumps(LockstepError(reason)), _LAST_WORD_S)
        self._wire.close()


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first answer that is an error, if there is one."""
    for answer in answers:
        if isinstance(answer, RolloutError):
            raise answer
