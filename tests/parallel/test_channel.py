"""Orders and answers between rank 0 and another rank, in two real processes."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollout.errors import LockstepError, RemoteError, WeightUpdateError
from rollout.parallel.channel import FollowerChannel, LeadChannel, raise_first
from rollout.parallel.wire import SocketWire, WireLostError
from tests.processes import PROCESSES


def _follow(theirs: socket.socket) -> None:
    """A rank whose verbs are those of the tests."""
    channel = FollowerChannel(1, SocketWire(theirs))
    while True:
        verb, arguments = channel.order()
        if verb == "end":
            return
        if verb == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        answer: Any = arguments[:1]  # what is large goes one way only
        if verb == "refuse":
            answer = WeightUpdateError("no such tensor")
        elif verb == "fail":
            answer = ZeroDivisionError("division by zero")
        channel.answer(answer)


@contextmanager
def lead_of_one(timeout_s: float = 60.0) -> Iterator[tuple[LeadChannel, Any]]:
    ours, theirs = socket.socketpair()
    process = PROCESSES.Process(target=_follow, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    channel = LeadChannel(
        {f"rank 1 (process {process.pid})": SocketWire(ours)}, timeout_s=timeout_s
    )
    try:
        yield channel, process
    finally:
        channel.close()
        process.kill()
        process.join()


def test_each_order_is_answered_once_and_in_order() -> None:
    with lead_of_one() as (channel, _):
        orders = [channel.send("echo", number, b"x" * 300_000) for number in range(4)]
        for number, order in enumerate(orders):
            assert channel.answers(order) == [(number,)]


def test_answers_that_nobody_waited_for_are_dropped() -> None:
    with lead_of_one() as (channel, _):
        for number in range(5):
            channel.send("echo", number)
        assert channel.answers() == [(4,)]


def test_an_error_is_kept_for_those_who_ask_later_and_no_other_answer_is() -> None:
    with lead_of_one() as (channel, _):
        refused, *echoed = channel.send("refuse"), channel.send("echo", 1), channel.send("echo", 2)
        assert channel.answers(echoed[1]) == [(2,)]
        assert channel.answers(echoed[0]) == [None]
        with pytest.raises(WeightUpdateError, match="no such tensor"):
            raise_first(channel.answers(refused))
        assert channel.answers(refused) == [None]


def test_an_error_of_a_rank_is_its_answer_and_names_the_rank() -> None:
    with lead_of_one() as (channel, _):
        channel.send("refuse")
        with pytest.raises(WeightUpdateError, match="rank 1: no such tensor"):
            raise_first(channel.answers())
        channel.send("fail")
        with pytest.raises(RemoteError, match="ZeroDivisionError: rank 1: division by zero"):
            raise_first(channel.answers())
        channel.send("echo", 7)
        assert channel.answers() == [(7,)]


def test_a_rank_that_is_killed_is_named_and_the_channel_is_lost() -> None:
    with lead_of_one() as (channel, process):
        channel.check()
        process.kill()
        process.join()
        with pytest.raises(LockstepError, match=rf"rank 1 \(process {process.pid}\) is lost"):
            channel.check()
        for call in (channel.check, channel.answers, lambda: channel.send("echo")):
            with pytest.raises(LockstepError, match="is lost; the engine must be made anew"):
                call()


def test_a_rank_that_ends_instead_of_answering_is_named() -> None:
    with lead_of_one() as (channel, _):
        channel.send("end")
        with pytest.raises(LockstepError, match=r"rank 1 .* is lost"):
            channel.answers()


def test_a_rank_that_is_stopped_is_named_at_the_deadline() -> None:
    with lead_of_one(timeout_s=0.5) as (channel, _):
        channel.send("stop")
        with pytest.raises(LockstepError, match=r"did not answer in time \(0\.5 s\)"):
            channel.answers()


def test_a_rank_that_takes_no_orders_is_named_at_the_deadline() -> None:
    with lead_of_one(timeout_s=0.5) as (channel, _):
        channel.send("stop")
        with pytest.raises(LockstepError, match=r"took no order \(echo\) for 0\.5 s"):
            channel.send("echo", b"x" * 10_000_000)


def test_an_end_without_rank_0_hears_of_it() -> None:
    ours, theirs = socket.socketpair()
    channel = FollowerChannel(1, SocketWire(theirs))
    ours.close()
    with pytest.raises(LockstepError, match="rank 0 is lost"):
        channel.order()


def test_a_message_cut_off_by_an_interrupt_is_read_on() -> None:
    ours, theirs = socket.socketpair()
    wire = SocketWire(ours)
    message = pickle.dumps(list(range(100)))
    framed = len(message).to_bytes(8, "little") + message
    theirs.sendall(framed[:50])
    with pytest.raises(TimeoutError):
        wire.receive(0.01)
    assert not wire.has_message()
    theirs.sendall(framed[50:] + framed)
    assert wire.receive(1.0) == message
    assert wire.has_message()
    theirs.close()
    assert not wire.is_lost()
    assert wire.receive(1.0) == message
    assert wire.is_lost()
    with pytest.raises(WireLostError):
        wire.receive(1.0)


# ---- last words


@contextmanager
def both_ends(timeout_s: float = 60.0) -> Iterator[tuple[LeadChannel, FollowerChannel]]:
    """Of two ranks in this process."""
    ours, theirs = socket.socketpair()
    lead = LeadChannel({"rank 1": SocketWire(ours)}, timeout_s=timeout_s)
    follower = FollowerChannel(1, SocketWire(theirs))
    try:
        yield lead, follower
    finally:
        lead.close()
        follower.leave("the test is over")


def test_rank_0_says_at_its_end_what_the_others_raise() -> None:
    with both_ends() as (lead, follower):
        lead.send("echo", 1)
        lead.end(WeightUpdateError("no such tensor"))
        assert follower.order() == ("echo", (1,))
        with pytest.raises(WeightUpdateError, match="no such tensor"):
            follower.answer(1)
        with pytest.raises(LockstepError, match="rank 0 is lost"):
            follower.order()
        with pytest.raises(LockstepError, match="must be made anew"):
            lead.send("echo", 2)


def test_a_rank_that_leaves_says_why_to_an_order_before_and_after() -> None:
    with both_ends() as (lead, follower):
        lead.send("echo", 1)
        follower.leave("it has shut down")
        with pytest.raises(LockstepError, match=r"rank 1 is lost \(it has shut down\)"):
            lead.answers()
    with both_ends() as (lead, follower):
        follower.leave("it has shut down")
        with pytest.raises(LockstepError, match=r"rank 1 is lost \(it has shut down\)"):
            lead.send("echo", 1)


def test_an_order_that_does_not_come_is_given_up_at_the_deadline() -> None:
    with (
        both_ends() as (_, follower),
        pytest.raises(LockstepError, match=r"rank 0 gave no order for 0\.01 s"),
    ):
        follower.order(0.01)


def test_an_answer_that_does_not_come_is_given_up_at_the_deadline_of_its_call() -> None:
    with both_ends() as (lead, _):
        lead.send("verb")
        with pytest.raises(LockstepError, match=r"rank 1 did not call generate in time \(0\.01 s"):
            lead.answers(timeout_s=0.01, what="call generate")
