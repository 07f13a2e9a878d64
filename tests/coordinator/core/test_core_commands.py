"""Commands through the coordinator's core: each answered once, the state changed by all or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout.control.commands import (
    ChecksumWeights,
    Command,
    ControlMessage,
    IncrementStaleness,
    Pause,
    Resume,
    SetGenerationEpoch,
    Shutdown,
    Stats,
    Stop,
    Suspend,
    Unpause,
)
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.coordinator.protocol.messages import (
    Ack,
    Disconnect,
    EngineReply,
    Nack,
)
from rollout.wire import MAX_PLAIN_DEPTH
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine, source_of
from tests.coordinator.fake_fleet import LIMITS, FakeFleet

Kind = type[Command[Any]]
WAY_TO: dict[str, list[Kind]] = {
    "RUNNING": [],
    "PAUSED": [Pause],
    "SUSPENDED": [Pause, Suspend],
    "STOPPING": [Pause, Stop],
}
# The state after each command in each state; None where it is refused.
AFTER: dict[str, dict[Kind, str | None]] = {
    "RUNNING": {
        Pause: "PAUSED",
        Unpause: "RUNNING",
        Suspend: None,
        Resume: None,
        Stop: None,
        SetGenerationEpoch: None,
        IncrementStaleness: None,
    },
    "PAUSED": {
        Pause: "PAUSED",
        Unpause: "RUNNING",
        Suspend: "SUSPENDED",
        Resume: "PAUSED",
        Stop: "STOPPING",
        SetGenerationEpoch: "PAUSED",
        IncrementStaleness: "PAUSED",
    },
    "SUSPENDED": {
        Pause: None,
        Unpause: None,
        Suspend: "SUSPENDED",
        Resume: "PAUSED",
        Stop: "STOPPING",
        SetGenerationEpoch: "SUSPENDED",
        IncrementStaleness: "SUSPENDED",
    },
    "STOPPING": {
        Pause: None,
        Unpause: None,
        Suspend: None,
        Resume: None,
        Stop: "STOPPING",
        SetGenerationEpoch: None,
        IncrementStaleness: None,
    },
}


def fleet_in(
    state: str, num_engines: int = 2, **options: Any
) -> tuple[FakeFleet, FakeClient, list[FakeEngine]]:
    fleet = FakeFleet(**options)
    client = fleet.client()
    engines = [fleet.engine() for _ in range(num_engines)]
    fleet.run()
    for kind in WAY_TO[state]:
        assert isinstance(fleet.give(client, client.command(kind)), Ack)
    assert fleet.core.state.name == state
    return fleet, client, engines


def error_of(answer: Ack | Nack | None) -> str:
    assert isinstance(answer, Nack)
    return str(answer.error.message)


@pytest.mark.parametrize("num_engines", [0, 2])
@pytest.mark.parametrize("state", WAY_TO)
@pytest.mark.parametrize("kind", AFTER["RUNNING"])
def test_every_command_in_every_state_is_done_or_refused_with_the_legal_ones(
    state: str, kind: Kind, num_engines: int
) -> None:
    fleet, client, engines = fleet_in(state, num_engines)
    arguments = {"version": 5} if kind is SetGenerationEpoch else {}
    answer = fleet.give(client, client.command(kind, **arguments))
    after = AFTER[state][kind]
    assert fleet.core.state.name == (after or state)
    expected = "STOPPED" if fleet.core.state.name == "STOPPING" else fleet.core.state.name
    assert all(engine.state == expected for engine in engines)
    if after is None:
        assert f"while {expected}: all engines must be " in error_of(answer)
        assert "; legal commands now: " in error_of(answer)
    else:
        assert isinstance(answer, Ack)
        assert answer.result["state"] == after


@pytest.mark.parametrize("state", WAY_TO)
def test_shutdown_is_legal_in_every_state_and_ends_it(state: str) -> None:
    fleet, client, engines = fleet_in(state)
    assert isinstance(fleet.give(client, client.command(Shutdown)), Ack)
    assert fleet.core.is_over
    assert [engine.state for engine in engines] == ["STOPPED", "STOPPED"]


def test_shutdown_reaches_an_engine_that_has_no_work_yet() -> None:
    fleet, client, _ = fleet_in("PAUSED", 1)
    fleet.give(client, client.update(source_of(2), version=2))
    late = fleet.engine()
    fleet.move_one(late)
    assert list(fleet.core.ranks()) == [0]
    assert isinstance(fleet.give(client, client.command(Shutdown)), Ack)
    assert late.state == "STOPPED"
    assert fleet.core.is_over


def test_the_state_changes_with_the_last_confirmation() -> None:
    fleet, client, (first, second) = fleet_in("RUNNING")
    command = client.command(Pause)
    fleet.send(client, command)
    fleet.run(client, first)
    assert fleet.core.state is CoordinatorState.RUNNING
    assert client.answer(command) is None
    fleet.run(second)
    assert fleet.core.state is CoordinatorState.PAUSED
    fleet.run()
    answer = client.answer(command)
    assert isinstance(answer, Ack)
    assert set(answer.result["ranks"]) == {"0", "1"}


def test_commands_of_two_clients_run_in_order_one_at_a_time() -> None:
    fleet, client, _ = fleet_in("RUNNING")
    other = fleet.client()
    fleet.run()
    pipelined = [client.command(kind) for kind in (Pause, Suspend, Unpause, Resume, Unpause)]
    fleet.send(client, *pipelined)
    fleet.run(client)
    pause = other.command(Pause)
    fleet.send(other, pause)
    fleet.run()
    answers = [client.answer(command) for command in pipelined]
    assert [type(answer) for answer in answers] == [Ack, Ack, Nack, Ack, Ack]
    assert isinstance(other.answer(pause), Ack)
    assert fleet.core.state is CoordinatorState.PAUSED


def test_a_repeated_command_is_the_same_command() -> None:
    fleet, client, (first, _) = fleet_in("PAUSED")
    command = client.command(IncrementStaleness)
    fleet.send(client, command, command)
    fleet.run()
    fleet.redial(client)
    fleet.give(client, command)
    assert fleet.core.weights_version == first.version == 1
    first_answer, *others = client.answers[command.command_id]
    assert isinstance(first_answer, Ack)
    assert others
    assert all(other == first_answer for other in others)


@pytest.mark.parametrize("depth", [MAX_PLAIN_DEPTH - 2, MAX_PLAIN_DEPTH])
def test_a_report_that_an_answer_cannot_nest_is_left_out_of_it(depth: int) -> None:
    fleet, client, (first, _) = fleet_in("RUNNING")
    first.ignores = {"Pause"}
    fleet.give(client, pause := client.command(Pause))
    (asked,) = [message for message in first.seen if isinstance(message, Pause)]
    report: dict[str, Any] = {}
    for _ in range(depth - 1):
        report = {"deeper": report}
    first.state = "PAUSED"
    fleet.send(first, Ack(command_id=asked.command_id, result=report))
    fleet.run()
    answer = client.answer(pause)
    assert isinstance(answer, Ack)
    assert answer.result is not None
    assert answer.result["state"] == "PAUSED"
    assert answer.result["ranks"] == ({"0": report, "1": None} if depth < MAX_PLAIN_DEPTH else {})


def test_an_engine_that_dies_is_not_waited_for() -> None:
    fleet, client, (first, second) = fleet_in("RUNNING")
    command = client.command(Pause)
    fleet.send(client, command)
    fleet.run(client, first)
    fleet.cut(second)
    fleet.pass_time(LIMITS.engine_lease_s + 1)
    fleet.run()
    answer = client.answer(command)
    assert isinstance(answer, Ack)
    assert answer.result["lost_ranks"] == [1]
    assert fleet.core.state is CoordinatorState.PAUSED


def test_a_command_past_its_deadline_names_the_ranks_that_are_silent() -> None:
    fleet, client, (_, second) = fleet_in("RUNNING")
    second.ignores = {"Pause"}
    command = client.command(Pause, deadline_s=3.0)
    assert fleet.give(client, command) is None
    queued = client.command(Unpause, deadline_s=1.0)
    fleet.send(client, queued)
    fleet.run()
    fleet.pass_time(4)
    fleet.run()
    assert "no answer in time from rank 1; the fleet stays RUNNING" in error_of(
        client.answer(command)
    )
    assert "not begun in time" in error_of(client.answer(queued))


@pytest.mark.parametrize("name", ["set_generation_epoch", "update_weights", "shutdown"])
def test_a_command_whose_deadline_passes_while_another_runs_is_not_begun(
    name: str,
) -> None:
    fleet, client, (_, second) = fleet_in("PAUSED")
    second.ignores = {"Suspend"}
    suspend = client.command(Suspend, deadline_s=3.0)
    queued: ControlMessage[Any]
    if name == "update_weights":
        queued = client.update(source_of(5), deadline_s=3.0)
    elif name == "set_generation_epoch":
        queued = client.command(SetGenerationEpoch, version=5, deadline_s=3.0)
    else:
        queued = client.command(Shutdown, deadline_s=3.0)
    fleet.send(client, suspend, queued)
    fleet.run()
    fleet.now += 4
    fleet.run()
    assert "no answer in time from rank 1" in error_of(client.answer(suspend))
    assert f"{name}: not begun in time" in error_of(client.answer(queued))
    assert list(fleet.core.ranks()) == [0, 1]
    assert fleet.core.weights_version == 0
    assert not fleet.core.is_over


@pytest.mark.parametrize(
    ("state", "kind", "reverse"),
    [
        ("RUNNING", Pause, Unpause),
        ("PAUSED", Unpause, Pause),
        ("PAUSED", Suspend, Resume),
        ("SUSPENDED", Resume, Suspend),
    ],
)
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_command_that_one_engine_refuses_leaves_the_state_and_can_go_either_way(
    state: str, kind: Kind, reverse: Kind, goes_on: bool
) -> None:
    fleet, client, (first, second) = fleet_in(state)
    second.refuses = {kind.__name__}
    assert "rank 1: " in error_of(fleet.give(client, client.command(kind)))
    assert fleet.core.state.name == second.state == state
    assert first.state != state
    second.refuses = set()
    assert isinstance(fleet.give(client, client.command(kind if goes_on else reverse)), Ack)
    assert first.state == second.state == fleet.core.state.name
    assert (fleet.core.state.name == state) is not goes_on


def test_engines_that_do_not_confirm_an_epoch_are_removed_and_register_again() -> None:
    fleet, client, (first, second) = fleet_in("PAUSED")
    second.refuses = {"SetGenerationEpoch"}
    answer = fleet.give(client, client.command(SetGenerationEpoch, version=4))
    assert "rank 1: " in error_of(answer)
    assert fleet.core.weights_version == first.version == 4
    assert list(fleet.core.ranks()) == [0]
    assert second.must_register
    second.refuses = set()
    fleet.redial(second)
    fleet.run()
    assert second.version == 4
    assert second.state == "PAUSED"
    assert list(fleet.core.ranks()) == [0, 1]


def test_an_epoch_that_all_refuse_changes_nothing() -> None:
    fleet, client, engines = fleet_in("PAUSED")
    for engine in engines:
        engine.refuses = {"SetGenerationEpoch"}
    fleet.give(client, client.command(IncrementStaleness))
    assert fleet.core.weights_version == 0
    assert list(fleet.core.ranks()) == [0, 1]


@pytest.mark.parametrize("version", [0, -3])
def test_an_epoch_must_be_above_the_current_one(version: int) -> None:
    fleet, client, _ = fleet_in("PAUSED")
    command = client.command(SetGenerationEpoch, version=version)
    assert "above the current version 0" in error_of(fleet.give(client, command))


def test_a_fleet_that_is_resumed_in_part_stays_suspended_until_all_is_back() -> None:
    fleet, client, engines = fleet_in("PAUSED")
    both = {"release": ("kv_cache", "weights")}
    fleet.give(client, client.command(Suspend, **both))
    fleet.give(client, client.command(Resume, only="weights"))
    assert fleet.core.state is CoordinatorState.SUSPENDED
    for engine in engines:
        engine.state = "SUSPENDED"  # the fake knows no parts
    fleet.give(client, client.command(Resume, only="kv_cache"))
    assert fleet.core.state is CoordinatorState.PAUSED


def test_fleet_keeps_the_resources_that_several_suspends_released() -> None:
    fleet, client, _ = fleet_in("PAUSED")
    for owner in ("kv_cache", "weights"):
        order = client.command(Suspend, release=[owner])
        assert isinstance(fleet.give(client, order), Ack)
    fleet.give(client, client.command(Resume, only="kv_cache"))
    assert fleet.core.state is CoordinatorState.SUSPENDED


def test_stop_fails_unfinished_requests_and_accepts_no_more() -> None:
    fleet, client, _ = fleet_in("PAUSED")
    fleet.send(client, client.submission([9]))
    fleet.run()
    fleet.give(client, client.command(Stop))
    fleet.send(client, client.submission([9]))
    late = fleet.engine()
    fleet.run()
    for asked in client.asked.values():
        assert asked.replies[0].error is not None
    assert not late.has_entered


def test_too_many_commands_are_refused() -> None:
    fleet, client, (first, _) = fleet_in("RUNNING", limits=replace(LIMITS, max_queued_commands=2))
    first.ignores = {"Pause"}
    commands = [client.command(Pause) for _ in range(4)]
    fleet.send(client, *commands)
    fleet.run()
    assert "wait already" in error_of(client.answer(commands[3]))


def test_closing_answers_everything_and_disconnects() -> None:
    fleet, client, (first, _) = fleet_in("RUNNING")
    first.ignores = {"Pause"}
    pause, waiting = client.command(Pause), client.command(Unpause)
    fleet.send(client, pause, waiting, client.submission([5]))
    fleet.run()
    fleet.route(fleet.core.close("the end"))
    fleet.run()
    assert "the end" in error_of(client.answer(pause))
    assert "the end" in error_of(client.answer(waiting))
    (reply,) = client.asked[0].replies
    assert isinstance(reply, EngineReply)
    assert reply.is_failed
    assert all(Disconnect(reason="the end") in peer.seen for peer in (client, first))


def test_the_disconnect_of_an_end_carries_any_reason() -> None:
    fleet, client, _ = fleet_in("RUNNING")
    fleet.route(fleet.core.close("a\udcff" + "x" * 2000))
    fleet.run()
    (disconnect,) = [message for message in client.seen if isinstance(message, Disconnect)]
    assert disconnect.reason.startswith("a\\udcffx")


def test_a_command_runs_to_its_end_after_its_client_has_left() -> None:
    fleet, client, (first, second) = fleet_in("RUNNING")
    fleet.send(client, client.command(Pause), Disconnect())
    fleet.run(client)
    fleet.run()
    assert fleet.core.state is CoordinatorState.PAUSED
    assert first.state == second.state == "PAUSED"


def test_old_answers_are_forgotten() -> None:
    fleet, client, _ = fleet_in("PAUSED", limits=replace(LIMITS, max_answers=3))
    for _ in range(9):
        fleet.give(client, client.command(Pause))
    fleet.redial(client)
    before = len(client.seen)
    fleet.run()
    assert sum(isinstance(m, Ack) for m in client.seen[before:]) == 3


def test_update_with_any_command_between_keeps_order() -> None:
    fleet, client, engines = fleet_in("PAUSED")
    update, unpause = client.update(source_of(1)), client.command(Unpause)
    fleet.send(client, update, unpause)
    fleet.run()
    assert isinstance(client.answer(update), Ack)
    assert isinstance(client.answer(unpause), Ack)
    assert [engine.version for engine in engines] == [1, 1]


def test_stats_are_answered_while_an_update_waits_for_votes() -> None:
    fleet, client, engines = fleet_in("PAUSED")
    engines[0].ignores = {"Prepare"}
    update, stats = client.update(source_of(1)), client.command(Stats)
    fleet.send(client, update, stats)
    fleet.run()
    answer = client.answer(stats)
    assert isinstance(answer, Ack)
    assert set(answer.result["ranks"]) == {"0", "1"}
    assert client.answer(update) is None


def test_stats_say_how_many_requests_no_engine_has() -> None:
    fleet, client, _ = fleet_in("RUNNING", num_engines=0)

    def num_queued() -> object:
        answer = fleet.give(client, client.command(Stats))
        assert isinstance(answer, Ack)
        return answer.result["num_queued"]

    assert num_queued() == 0
    fleet.send(client, client.submission([4, 4, 4]), client.submission([4]))
    assert num_queued() == 4
    fleet.engine()
    fleet.run()
    assert num_queued() == 0, "an engine has them"


def test_checksums_are_asked_while_no_update_runs() -> None:
    fleet, client, engines = fleet_in("PAUSED")
    engines[0].ignores = {"Prepare"}
    update, checksums = client.update(source_of(1)), client.command(ChecksumWeights)
    fleet.send(client, update, checksums)
    fleet.run()
    assert client.answer(checksums) is None
    assert not any(type(message).__name__ == "ChecksumWeights" for message in engines[1].seen)
