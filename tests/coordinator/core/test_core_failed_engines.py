"""Failed engines: the requests that a failure counts against, and those that continue."""

from __future__ import annotations

from dataclasses import replace

from rollout.coordinator.protocol.messages import Attempt, Disconnect
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine
from tests.coordinator.fake_fleet import LIMITS, FakeFleet


def lose(fleet: FakeFleet, engine: FakeEngine) -> None:
    """It is killed, and the next probe says so."""
    fleet.cut(engine)
    fleet.pass_time(1)
    fleet.run()


def failed(client: FakeClient) -> list[int]:
    return [i for i, asked in client.asked.items() if any(r.is_failed for r in asked.replies)]


def test_a_request_that_kills_engine_after_engine_fails_and_no_other_does() -> None:
    """Request 0 kills its engine in the first step, before anything of that step is reported."""
    fleet = FakeFleet()
    client = fleet.client()
    engines = [fleet.engine(max_requests=8)]
    fleet.run()
    fleet.send(client, *(client.submission([6]) for _ in range(40)))
    fleet.run()
    num_lost = 0
    for _ in range(400):
        engines = [engine for engine in engines if fleet.is_attached(engine)]
        if len(engines) < 2:
            engines.append(fleet.engine(max_requests=8))
            fleet.run()
        for engine in list(engines):
            if 0 in engine.held:
                lose(fleet, engine)
                num_lost += 1
            else:
                fleet.send(engine, *engine.step())
                fleet.run()
        if all(asked.replies for asked in client.asked.values()):
            break
    assert failed(client) == [0]
    assert num_lost == LIMITS.max_lost_attempts
    assert all(len(asked.replies) == 1 for asked in client.asked.values())


def test_requests_that_wait_at_a_failed_engine_are_not_suspects() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_lost_attempts=1))
    client, engine = fleet.client(), fleet.engine()
    fleet.run()
    fleet.send(client, *(client.submission([9]) for _ in range(4)))
    fleet.run()
    engine.num_waiting = 2  # the last two of them
    fleet.pass_time(1)
    first = engine.held[0]
    first.num_tokens = 2
    fleet.send(engine, engine.report(0, 0))
    fleet.run()
    lose(fleet, engine)
    assert failed(client) == [0, 1]


def test_no_request_is_a_suspect_when_an_engine_does_not_confirm_a_command() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_lost_attempts=1))
    client, engine = fleet.client(), fleet.engine()
    fleet.run()
    fleet.send(client, client.submission([9]))
    fleet.run()
    fleet.send(engine, Disconnect(reason="its weights are broken", is_fault=True))
    fleet.run()
    assert not failed(client)


def test_progress_clears_a_request_of_earlier_losses() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_lost_attempts=2))
    client = fleet.client()
    fleet.send(client, client.submission([40]))
    for _ in range(6):
        engine = fleet.engine()
        fleet.run()
        fleet.send(engine, *engine.step())
        fleet.run()
        lose(fleet, engine)
    assert not failed(client)


def test_an_engine_that_is_killed_is_noticed_by_the_next_probe() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    fleet.send(client, client.submission([9]))
    fleet.run()
    fleet.cut(first)
    deadline = fleet.core.next_deadline()
    assert deadline is not None
    assert deadline <= fleet.now + LIMITS.probe_interval_s
    fleet.now = deadline
    fleet.run()
    assert list(fleet.core.ranks()) == [1]
    assert len(second.held) == 1


def test_requests_that_may_be_why_run_on_one_engine_each() -> None:
    """Three requests whose engines were lost twice: the next loss must name one of them."""
    fleet = FakeFleet()
    client = fleet.client()
    fleet.send(client, *(client.submission([20]) for _ in range(3)))
    for _ in range(2):
        engine = fleet.engine()
        fleet.run()
        suspects = tuple(
            Attempt(request_id=i, attempt=held.attempt) for i, held in engine.held.items()
        )
        assert len(suspects) == 3
        fleet.send(engine, Disconnect(is_fault=True, suspects=suspects))
        fleet.run()
        fleet.cut(engine)
    first, second = fleet.engine(), fleet.engine()
    fleet.run()
    assert [len(first.held), len(second.held)] == [1, 1]
    fleet.send(first, *first.step())
    fleet.run()
    assert [len(first.held), len(second.held)] == [2, 1], "progress makes room for the next"
    fleet.finish()
    assert not failed(client)
