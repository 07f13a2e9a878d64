"""Requests wait in the coordinator until an engine has room: by priority, then arrival."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import pytest

from rollout.coordinator.core.dispatcher import GroupQueue
from rollout.coordinator.core.request_table import Group
from rollout.coordinator.protocol.messages import AssignRequest, Credit
from rollout.coordinator.routing.policies import LoadBalancedPolicy, RoundRobinPolicy
from tests.coordinator.fake_engine import FakeEngine
from tests.coordinator.fake_fleet import FakeFleet


def sizes(*engines: FakeEngine) -> list[int]:
    return [len(engine.held) for engine in engines]


def waiting_fleet() -> tuple[FakeFleet, FakeEngine]:
    """192 requests in front of an engine that runs 16."""
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine(max_requests=16)
    fleet.run()
    fleet.send(client, *(client.submission([40]) for _ in range(192)))
    fleet.run()
    return fleet, engine


def test_an_engine_is_assigned_max_requests_and_num_ahead() -> None:
    fleet, engine = waiting_fleet()
    assert sizes(engine) == [16 + 8]
    assert len(fleet.part("RequestTable").requests) == 192


def test_an_engine_that_joins_gets_from_the_queue_at_once() -> None:
    fleet, first = waiting_fleet()
    second = fleet.engine(max_requests=16)
    fleet.run()
    assert sizes(first, second) == [24, 24]
    fleet.finish()
    (client,) = (p for p in fleet.peers.values() if not isinstance(p, FakeEngine))
    assert all(len(asked.replies) == 1 for asked in client.asked.values())
    counts = [sum(isinstance(m, AssignRequest) for m in e.seen) for e in (first, second)]
    assert min(counts) > 80, "one of two equal engines did most of the work"


def test_groups_are_dispatched_by_priority_then_arrival() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine(max_requests=1)
    fleet.run()
    priorities = [0] * 12 + [1, 5, 1]
    fleet.send(client, *(client.submission([4], priority=p) for p in priorities))
    fleet.run()
    assert sizes(engine) == [9]
    fleet.finish()
    seen = [m.samples[0].request_id for m in engine.seen if isinstance(m, AssignRequest)]
    assert seen == [*range(9), 13, 12, 14, 9, 10, 11]


def test_requests_of_low_priority_do_not_starve() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine(max_requests=1)
    fleet.run()
    fleet.send(client, *(client.submission([2]) for _ in range(9)))
    fleet.run()
    fleet.send(client, client.submission([2], priority=-1))
    for _ in range(4):
        fleet.send(client, *(client.submission([2]) for _ in range(18)))
        fleet.run()
        fleet.step_all()
    seen = [m.samples[0].request_id for m in engine.seen if isinstance(m, AssignRequest)]
    assert seen.index(9) == 15, "every sixteenth is the one that waits for longest"
    assert sizes(engine) == [9]


def test_a_group_is_assigned_to_one_engine_with_room_for_one_sample() -> None:
    fleet = FakeFleet()
    client, first = fleet.client(), fleet.engine(max_requests=4)
    fleet.run()
    fleet.send(client, client.submission([9] * 11), client.submission([9] * 6))
    fleet.run()
    assert sizes(first) == [17]
    fleet.send(client, client.submission([9]))
    fleet.run()
    assert sizes(first) == [17], "it holds more than it may"
    second = fleet.engine(max_requests=4)
    fleet.run()
    assert sizes(first, second) == [17, 1]


def test_credit_above_max_held_assigns_no_more_than_max_held() -> None:
    fleet, engine = waiting_fleet()
    session = engine.session
    for num_granted in (engine.num_granted, 10**9):
        fleet.send(engine, Credit(num_granted=num_granted, session=session))
    fleet.run()
    assert sizes(engine) == [24]


def test_credit_of_an_earlier_registration_grants_nothing() -> None:
    fleet, engine = waiting_fleet()
    late = Credit(num_granted=engine.num_granted, session=engine.session)
    engine.held.clear()
    engine.num_waiting = 8  # it accepts nothing more
    fleet.redial(engine)
    fleet.send(engine, late)
    fleet.run()
    assert sizes(engine) == [0]
    assert fleet.core.counters.num_stale == 1
    engine.num_waiting = 0
    fleet.send(engine, *engine.credit())
    fleet.run()
    assert sizes(engine) == [24]


class WrongRankPolicy(RoundRobinPolicy):
    """Chooses `wrong`, whoever has room."""

    wrong: object = 7

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        return self.wrong  # type: ignore[return-value]


@pytest.mark.parametrize("wrong", [7, -1, None, [0]])
def test_a_policy_that_chooses_a_rank_without_room_is_named_and_disturbs_nothing(
    wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    policy = WrongRankPolicy()
    policy.wrong = wrong
    fleet = FakeFleet(policy)
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    fleet.send(client, *(client.submission([4]) for _ in range(4)))
    fleet.run()
    assert sizes(first, second) == [2, 2], "the least loaded of the engines with room gets it"
    fleet.finish()
    assert [len(asked.replies) for asked in client.asked.values()] == [1] * 4
    (logged,) = caplog.records
    assert "WrongRankPolicy" in logged.getMessage()
    assert repr(wrong) in logged.getMessage()


def test_requests_that_wait_are_aborted_without_an_engine() -> None:
    fleet, engine = waiting_fleet()
    (client,) = (p for p in fleet.peers.values() if not isinstance(p, FakeEngine))
    num_seen = len(engine.seen)
    fleet.send(client, client.abort_all())
    fleet.run(client)
    assert sum(bool(asked.replies) for asked in client.asked.values()) == 192 - 24
    assert len(engine.seen) == num_seen
    fleet.run()
    assert len(fleet.part("RequestTable").requests) == 0
    assert not fleet.part("GroupQueue").groups


@pytest.mark.parametrize("template_tokens", [64, 512])
def test_a_common_template_spreads_and_more_in_common_stays_together(template_tokens: int) -> None:
    """Prompts of equal length behind one template, each asked for twice: the first answer of a
    prompt makes its engine the one for the second."""
    fleet = FakeFleet(LoadBalancedPolicy(), block_size_tokens=16)
    client = fleet.client()
    engines = [fleet.engine(max_requests=4096) for _ in range(4)]
    fleet.run()
    own = np.random.default_rng(5).integers(0, 50_000, (1000, 64))
    template = np.arange(template_tokens)
    prompts = [np.concatenate([template, row]).astype(np.int32) for row in own]
    fleet.send(client, *(client.submission([16], prompt_tokens=prompt) for prompt in prompts))
    fleet.run()
    outstanding = sizes(*engines)
    assert sum(outstanding) == 1000
    assert max(outstanding) <= 1.3 * 250, outstanding
    home = {request_id: engine for engine in engines for request_id in engine.held}
    fleet.finish()
    order = np.random.default_rng(6).permutation(1000)
    fleet.send(client, *(client.submission([16], prompt_tokens=prompts[index]) for index in order))
    fleet.run()
    again = {request_id: engine for engine in engines for request_id in engine.held}
    num_at_home = sum(again[1000 + place] is home[index] for place, index in enumerate(order))
    assert num_at_home >= 900, num_at_home
    assert max(sizes(*engines)) <= 1.3 * 250


def test_group_queue_keeps_the_order_and_bounded_memory_when_groups_return() -> None:
    queue, draw, waiting = GroupQueue(), random.Random(0), dict[int, Group]()
    known: list[Group] = []
    sizes: list[int] = []
    for number in range(4000):
        what = draw.random() if waiting else 0.0
        if what < 0.6 and len(waiting) < 20:
            if what < 0.4:
                known.append(Group(number, np.empty(0, np.int32), draw.randrange(3), False, [], 0))
            group = draw.choice(known[-50:])
            queue.add(group)
            waiting[group.group_id] = group
        elif what < 0.8:
            group_id = draw.choice(list(waiting))
            queue.discard(group_id)
            del waiting[group_id]
        else:
            first = min(waiting.values(), key=lambda group: (-group.priority, group.group_id))
            taken = queue.take()
            assert taken in (first, waiting[min(waiting)])
            del waiting[taken.group_id]
        assert queue.groups == waiting
        sizes.append(len(pickle.dumps(queue)) - len(pickle.dumps(waiting)))
    assert max(sizes) < 1.5 * max(sizes[:1000])
