"""Commands and answers between rank 0 and another rank, in two real processes."""

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
from rollout.parallel.wire import SocketWire, WireClosedError
from tests.processes import PROCESSES


class Target:
    """The object of a rank, with the commands of the tests."""

    has_ended = False

    def echo(self, number: int, padding: bytes = b"") -> int:
        return number  # what is large goes one way only

    def refuse(self) -> None:
        raise WeightUpdateError("no such tensor")

    def fail(self) -> None:
        raise ZeroDivisionError("division by zero")

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def end(self) -> None:
        self.has_ended = True


def _follow(theirs: socket.socket) -> None:
    """Run the commands of the tests."""
    channel, target = FollowerChannel(1, SocketWire(theirs)), Target()
    while True:
        received = channel.receive()
        try:
            answer = received(target)
        except Exception as error:
            answer = error
        if target.has_ended:
            return
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


def test_send_returns_what_results_waits_for_in_any_number() -> None:
    with lead_of_one() as (channel, _):
        commands = [channel.send(Target.echo, number, b"x" * 300_000) for number in range(4)]
        for number, sent in enumerate(commands):
            assert channel.results(sent) == [number]


def test_answers_of_the_latest_command_drop_earlier_results() -> None:
    with lead_of_one() as (channel, _):
        for number in range(5):
            channel.send(Target.echo, number)
        assert channel.answers() == [4]


def test_answers_keep_an_early_error_and_no_early_result() -> None:
    with lead_of_one() as (channel, _):
        refused = channel.send(Target.refuse)
        first, second = (channel.send(Target.echo, number) for number in (1, 2))
        assert channel.answers(second) == [2]
        assert channel.answers(first) == [None]
        with pytest.raises(WeightUpdateError, match="no such tensor"):
            raise_first(channel.answers(refused))
        assert channel.answers(refused) == [None]


def test_results_raise_the_error_of_a_rank_with_its_number() -> None:
    with lead_of_one() as (channel, _):
        channel.send(Target.refuse)
        with pytest.raises(WeightUpdateError, match="rank 1: no such tensor"):
            raise_first(channel.answers())
        channel.send(Target.fail)
        with pytest.raises(RemoteError, match="ZeroDivisionError: rank 1: division by zero"):
            raise_first(channel.answers())
        channel.send(Target.echo, 7)
        assert channel.answers() == [7]


def test_check_names_a_killed_rank_and_every_later_call_raises() -> None:
    with lead_of_one() as (channel, process):
        channel.check()
        process.kill()
        process.join()
        with pytest.raises(LockstepError, match=rf"rank 1 \(process {process.pid}\) has ended"):
            channel.check()
        for call in (channel.check, channel.answers, lambda: channel.send(Target.end)):
            with pytest.raises(LockstepError, match="has ended; create a new engine"):
                call()


def test_answers_name_a_rank_that_ends() -> None:
    with lead_of_one() as (channel, _):
        channel.send(Target.end)
        with pytest.raises(LockstepError, match=r"rank 1 .* has ended"):
            channel.answers()


def test_answers_name_a_stopped_rank_at_the_deadline() -> None:
    with lead_of_one(timeout_s=0.5) as (channel, _):
        channel.send(Target.stop)
        with pytest.raises(LockstepError, match=r"did not answer in time \(0\.5 s\)"):
            channel.answers()


def test_send_names_a_rank_that_reads_nothing_at_the_deadline() -> None:
    with lead_of_one(timeout_s=0.5) as (channel, _):
        channel.send(Target.stop)
        with pytest.raises(LockstepError, match=r"read no command \(echo\) for 0\.5 s"):
            channel.send(Target.echo, 1, b"x" * 10_000_000)


def test_receive_without_rank_0_raises_lockstep_error() -> None:
    ours, theirs = socket.socketpair()
    channel = FollowerChannel(1, SocketWire(theirs))
    ours.close()
    with pytest.raises(LockstepError, match="rank 0 has ended"):
        channel.receive()


def test_wire_receive_continues_a_message_after_a_timeout() -> None:
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
    assert not wire.is_closed()
    assert wire.receive(1.0) == message
    assert wire.is_closed()
    with pytest.raises(WireClosedError):
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


def test_end_makes_the_other_ranks_raise_its_error() -> None:
    with both_ends() as (lead, follower):
        lead.send(Target.echo, 1)
        lead.end(WeightUpdateError("no such tensor"))
        received = follower.receive()
        assert (received.command, received.args) == (Target.echo, (1,))
        with pytest.raises(WeightUpdateError, match="no such tensor"):
            follower.answer(1)
        with pytest.raises(LockstepError, match="rank 0 has ended"):
            follower.receive()
        with pytest.raises(LockstepError, match="create a new engine"):
            lead.send(Target.echo, 2)


def test_leave_gives_rank_0_the_reason_before_and_after_a_command() -> None:
    with both_ends() as (lead, follower):
        lead.send(Target.echo, 1)
        follower.leave("it has shut down")
        with pytest.raises(LockstepError, match=r"rank 1 has ended \(it has shut down\)"):
            lead.answers()
    with both_ends() as (lead, follower):
        follower.leave("it has shut down")
        with pytest.raises(LockstepError, match=r"rank 1 has ended \(it has shut down\)"):
            lead.send(Target.echo, 1)


def test_receive_raises_at_its_deadline() -> None:
    with (
        both_ends() as (_, follower),
        pytest.raises(LockstepError, match=r"rank 0 sent no command for 0\.01 s"),
    ):
        follower.receive(0.01)


def test_answers_raise_at_the_deadline_of_the_call_and_name_what_is_missing() -> None:
    with both_ends() as (lead, _):
        lead.send(Target.end)
        with pytest.raises(LockstepError, match=r"rank 1 did not call generate in time \(0\.01 s"):
            lead.answers(timeout_s=0.01, what="call generate")
