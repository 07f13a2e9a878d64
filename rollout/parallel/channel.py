"""Channel: what rank 0 has the other ranks of an engine do, and what they answer, by a deadline.

Rank 0 sends orders, a verb with arguments, and each other rank answers each order once, in their
order: with a value, or with the error that it raised. Orders and answers are pickled: both ends are
processes of one engine, over sockets that nobody else can open. Whoever leaves first may say why.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout.errors import LockstepError, RolloutError, decode_error, encode_error
from rollout.parallel.wire import Wire, WireLostError

_ENDED = "ended"  # the last order of rank 0, which nobody answers
_LAST_WORD_S = 1.0
_NUM_KEPT = 16  # orders; steps in flight are fewer


class LeadChannel:
    """Rank 0's end, to all other ranks. One thread at a time waits for answers.

    Once it has raised LockstepError, it raises that at every call: what a rank does that was not
    heard of in time is unknown.
    """

    def __init__(self, wires: Mapping[str, Wire], *, timeout_s: float) -> None:
        """`wires`: from the name of a rank, which errors give, to it; in the order of ranks.
        `timeout_s`: for each answer."""
        self._wires, self.timeout_s = dict(wires), timeout_s
        self._num_sent = 0
        self._num_answered = dict.fromkeys(self._wires, 0)
        self._early_errors: dict[tuple[str, int], RolloutError] = {}
        self._cut_off: set[str] = set()  # ranks that may have half of an order
        self._lost: LockstepError | None = None

    def send(self, verb: str, *arguments: Any) -> int:
        """Have all ranks do `verb`. Returns the number of the order, for `answers`."""
        self.require()
        message = pickle.dumps((verb, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        self._num_sent += 1
        for name, wire in self._wires.items():
            self._cut_off.add(name)
            try:
                wire.send(message, self.timeout_s)
            except TimeoutError:
                raise self.lose(f"{name} took no order ({verb}) for {self.timeout_s:g} s") from None
            except WireLostError as error:
                why = self._last_word(wire) or str(error)
                raise self.lose(f"{name} is lost ({why}) before {verb!r}") from error
            except BaseException as error:  # Ctrl-C: half of an order may be on its way
                self.lose(f"{verb!r} was cut off by {error!r}")
                raise
            self._cut_off.discard(name)
        return self._num_sent

    def _last_word(self, wire: Wire) -> str:
        """What a rank that has gone has said of it, "" for nothing."""
        with suppress(TimeoutError, WireLostError):
            while True:
                answer = pickle.loads(wire.receive(0.0))
                if isinstance(answer, LockstepError):
                    return str(answer)
        return ""

    def answers(
        self, order: int | None = None, timeout_s: float | None = None, what: str = "answer"
    ) -> list[Any]:
        """Wait for the answers to an order, None for the latest: one of each rank, in their order,
        where an answer that is a RolloutError is what the rank raised. Of orders before it, whose
        answers come first, errors are kept for those who ask for them, and answers are dropped:
        None is returned then, as it is for an order that was waited for. Raises
        LockstepError at the deadline, of this call if `timeout_s` is given; it says `what` the rank
        did not do.
        """
        self.require()
        order = self._num_sent if order is None else order
        timeout_s = timeout_s or self.timeout_s
        late, deadline = f"did not {what} in time ({timeout_s:g} s)", time.monotonic() + timeout_s
        return [self._answer(name, order, deadline, late) for name in self._wires]

    def _answer(self, name: str, order: int, deadline: float, late: str) -> Any:
        answer = self._early_errors.pop((name, order), None)
        while self._num_answered[name] < order:
            try:
                left_s = max(0.0, deadline - time.monotonic())
                answer = pickle.loads(self._wires[name].receive(left_s))
            except TimeoutError:
                raise self.lose(f"{name} {late}") from None
            except WireLostError as error:
                raise self.lose(f"{name} is lost ({error})") from error
            self._num_answered[name] += 1
            if isinstance(answer, LockstepError):
                raise self.lose(f"{name} is lost ({answer})")
            if isinstance(answer, RolloutError) and self._num_answered[name] < order:
                self._keep(name, answer)
        return answer

    def _keep(self, name: str, error: RolloutError) -> None:
        """Keep an error that comes before the answer that is waited for, unless it is old."""
        now = self._num_answered[name]
        for key in [key for key in self._early_errors if key[1] < now - _NUM_KEPT]:
            del self._early_errors[key]
        self._early_errors[name, now] = error

    def check(self) -> None:
        """Raise LockstepError if a rank is gone."""
        self.require()
        for name, wire in self._wires.items():
            if wire.is_lost():
                raise self.lose(f"{name} is lost")

    def require(self) -> None:
        """Raise LockstepError if that was raised before."""
        if self._lost is not None:
            raise LockstepError(*self._lost.args) from self._lost

    def lose(self, reason: str) -> LockstepError:
        """No order is sent from now on. Returns what is raised instead."""
        if self._lost is None:
            self._lost = LockstepError(f"{reason}; the engine must be made anew")
        return self._lost

    def end(self, error: BaseException) -> None:
        """Let the other ranks raise `error` instead of waiting for an order, and close this."""
        word = pickle.dumps((_ENDED, (encode_error(error),)), protocol=pickle.HIGHEST_PROTOCOL)
        for name in self._wires.keys() - self._cut_off:
            with suppress(TimeoutError, WireLostError):
                self._wires[name].send(word, _LAST_WORD_S)
        self.close()

    def close(self) -> None:
        """The other ranks end. A second call does nothing."""
        self.lose("the engine is shut down")
        for wire in self._wires.values():
            wire.close()


class FollowerChannel:
    """The end of another rank."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self._rank, self._wire = rank, wire

    def order(self, timeout_s: float | None = None) -> tuple[str, Sequence[Any]]:
        """Wait for the next order: verb and arguments. Raises LockstepError if rank 0 is gone or
        gives none in time, and the error that rank 0 has ended with.
        """
        try:
            verb, arguments = pickle.loads(self._wire.receive(timeout_s))
        except TimeoutError:
            raise LockstepError(f"rank 0 gave no order for {timeout_s:g} s") from None
        except WireLostError as error:
            raise LockstepError(f"rank 0 is lost ({error})") from error
        if verb == _ENDED:
            raise decode_error(*arguments)
        return verb, arguments

    def check(self) -> None:
        """Raise LockstepError if rank 0 is gone."""
        if self._wire.is_lost():
            raise LockstepError("rank 0 is lost")

    @property
    def has_order(self) -> bool:
        """Whether `order` would return at once."""
        return self._wire.has_message()

    def answer(self, value: Any) -> None:
        """Answer the order that is not answered yet. An exception is told as such."""
        if isinstance(value, BaseException):
            encoded = encode_error(value)
            encoded["message"] = f"rank {self._rank}: {encoded['message']}"
            value = decode_error(encoded)
        try:
            self._wire.send(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None)
        except WireLostError:
            while True:
                self.order(0.0)  # raises what rank 0 has said at its end, or that it is lost

    def leave(self, reason: str) -> None:
        """Tell rank 0 that this rank answers nothing any more, and why. A second call does
        nothing."""
        with suppress(TimeoutError, WireLostError):
            self._wire.send(pickle.dumps(LockstepError(reason)), _LAST_WORD_S)
        self._wire.close()


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first answer that is an error, if there is one."""
    for answer in answers:
        if isinstance(answer, RolloutError):
            raise answer
