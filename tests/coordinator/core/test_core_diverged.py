"""Engines that may be in different states after a failed command: the core relies on no state
until all engines have confirmed a command."""

from __future__ import annotations

import pytest

from rollout.control.commands import Pause, Resume, Suspend
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.coordinator.protocol.messages import (
    Ack,
    Nack,
)
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine
from tests.coordinator.fake_fleet import LIMITS, FakeFleet

BOTH = {"release": ["kv_cache", "weights"]}


def suspended_late() -> tuple[FakeFleet, FakeClient, list[FakeEngine]]:
    """A paused fleet whose engines were asked to suspend, and did not say so in time."""
    fleet = FakeFleet()
    client, engines = fleet.client(), [fleet.engine(), fleet.engine()]
    fleet.run()
    assert isinstance(fleet.give(client, client.command(Pause)), Ack)
    for engine in engines:
        engine.ignores.add("Suspend")
    late = client.command(Suspend, **BOTH)
    fleet.send(client, late)
    fleet.run()
    fleet.pass_time(LIMITS.command_deadline_s + 1)
    fleet.run()
    assert isinstance(client.answer(late), Nack)
    for engine in engines:
        engine.ignores.clear()
    return fleet, client, engines


def assert_partial_resume_is_refused(fleet: FakeFleet, client: FakeClient) -> None:
    partial = client.command(Resume, only="weights")
    refusal = fleet.give(client, partial)
    assert isinstance(refusal, Nack)
    message = str(refusal.error.message)
    assert fleet.core.state.name in message
    assert "resume all" in message
    assert "legal commands now" in message
    assert isinstance(fleet.give(client, client.command(Resume)), Ack)
    assert fleet.core.state is CoordinatorState.PAUSED


def test_a_diverged_fleet_refuses_a_partial_resume() -> None:
    fleet, client, _ = suspended_late()
    assert_partial_resume_is_refused(fleet, client)


def test_a_suspend_after_a_failed_one_leaves_the_fleet_diverged() -> None:
    fleet, client, _ = suspended_late()
    assert isinstance(fleet.give(client, client.command(Suspend)), Ack)
    assert fleet.core.state is CoordinatorState.SUSPENDED
    assert_partial_resume_is_refused(fleet, client)


def test_a_whole_resume_makes_partial_ones_possible_again() -> None:
    fleet, client, _ = suspended_late()
    for kind, arguments in (
        *((Resume, {}), (Suspend, BOTH)),
        *((Resume, {"only": "weights"}), (Resume, {"only": "kv_cache"})),
    ):
        command = client.command(kind, **arguments)
        assert isinstance(fleet.give(client, command), Ack), kind
    assert fleet.core.state is CoordinatorState.PAUSED


@pytest.mark.parametrize(
    ("released", "state"), [(["weights"], "RUNNING"), (["kv_cache"], "SUSPENDED")]
)
def test_an_engine_that_joins_a_suspended_fleet_makes_it_diverged(
    released: list[str], state: str
) -> None:
    """A fresh engine gives its KV up; one that was away may have missed a partial resume."""
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine()
    fleet.run()
    fleet.give(client, client.command(Pause))
    fleet.give(client, client.command(Suspend, release=released))
    fleet.engine(state=state)
    fleet.run()
    assert_partial_resume_is_refused(fleet, client)


def test_a_fresh_engine_that_joins_fits_a_fleet_without_kv() -> None:
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine()
    fleet.run()
    fleet.give(client, client.command(Pause))
    fleet.give(client, client.command(Suspend, **BOTH))
    fleet.engine()
    fleet.run()
    for owner in ("weights", "kv_cache"):
        command = client.command(Resume, only=owner)
        assert isinstance(fleet.give(client, command), Ack)
    assert fleet.core.state is CoordinatorState.PAUSED
