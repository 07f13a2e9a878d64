"""Weight updates over all engines, and engines that join and leave during them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollout.control.commands import Pause, Stats, Suspend
from rollout.coordinator.core.fleet import Fleet
from rollout.coordinator.protocol.messages import (
    Ack,
    Commit,
    Nack,
    Prepare,
    RegisterAck,
    Rollback,
    UpdateWeights,
)
from rollout.weights.source import LoraTerms, WeightsSource
from tests.coordinator.core.test_core_commands import error_of, fleet_in
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine, source_of
from tests.coordinator.fake_fleet import LIMITS, FakeFleet

TERMS = LoraTerms(rank=1, alpha=1.0, use_rslora=False, ranks={}, alphas={})


def versions(engines: list[FakeEngine]) -> list[int]:
    return [engine.version for engine in engines]


def test_an_update_is_committed_by_all_and_answered_by_the_last() -> None:
    fleet, client, engines = fleet_in("PAUSED", 3)
    answer = fleet.give(client, client.update(source_of(7), version=7))
    assert isinstance(answer, Ack)
    assert answer.result["weights_version"] == 7
    assert set(answer.result["ranks"]) == {"0", "1", "2"}
    assert versions(engines) == [7, 7, 7]
    assert fleet.core.weights_version == 7


def test_update_weights_needs_a_paused_fleet_unless_in_flight() -> None:
    fleet, client, engines = fleet_in("RUNNING")
    assert "while RUNNING" in error_of(fleet.give(client, client.update(source_of(1))))
    assert isinstance(fleet.give(client, client.update(source_of(1), in_flight=True)), Ack)
    assert versions(engines) == [1, 1]


def test_a_version_that_is_not_above_the_current_one_is_refused() -> None:
    fleet, client, engines = fleet_in("PAUSED")
    fleet.give(client, client.update(source_of(3), version=3))
    answer = fleet.give(client, client.update(source_of(3), version=3))
    assert "above the current version 3" in error_of(answer)
    assert not [m for engine in engines for m in engine.seen[-3:] if isinstance(m, Prepare)]


def test_one_vote_against_rolls_all_back_and_names_the_rank() -> None:
    fleet, client, engines = fleet_in("PAUSED", 3)
    engines[1].refuses = {"Prepare"}
    answer = fleet.give(client, client.update(source_of(1)))
    assert "rank 1: Prepare refused" in error_of(answer)
    assert versions(engines) == [0, 0, 0]
    assert all(engine.prepared is None for engine in engines)
    engines[1].refuses = set()
    assert isinstance(fleet.give(client, client.update(source_of(1))), Ack)
    assert versions(engines) == [1, 1, 1]


def test_a_missing_vote_rolls_the_update_back_at_its_deadline() -> None:
    fleet, client, engines = fleet_in("PAUSED", 2)
    engines[1].ignores = {"Prepare"}
    update = client.update(source_of(1), deadline_s=3.0)
    fleet.give(client, update)
    fleet.pass_time(4)
    fleet.run()
    assert "no vote in time from rank 1" in error_of(client.answer(update))
    assert engines[0].prepared is None
    assert list(fleet.core.ranks()) == [0, 1]


def test_an_engine_that_fails_before_its_vote_rolls_the_update_back() -> None:
    fleet, client, engines = fleet_in("PAUSED", 2)
    engines[1].ignores = {"Prepare"}
    update = client.update(source_of(1))
    fleet.give(client, update)
    fleet.cut(engines[1])
    fleet.pass_time(LIMITS.engine_lease_s + 1)
    fleet.run()
    assert "rank 1 was lost before its vote" in error_of(client.answer(update))
    assert versions(engines) == [0, 0]
    assert engines[0].prepared is None


def test_an_engine_that_fails_after_its_vote_gets_the_weights_when_it_registers_again() -> None:
    fleet, client, engines = fleet_in("PAUSED", 3)
    engines[1].ignores = {"Commit"}
    update = client.update(source_of(1))
    fleet.give(client, update)
    assert client.answer(update) is None
    fleet.cut(engines[1])
    fleet.pass_time(LIMITS.engine_lease_s + 1)
    fleet.run()
    answer = client.answer(update)
    assert isinstance(answer, Ack)
    assert answer.result["lost_ranks"] == [1]
    assert versions(engines) == [1, 0, 1]
    fleet.redial(engines[1])
    fleet.run()
    assert versions(engines) == [1, 1, 1]
    assert list(fleet.core.ranks()) == [0, 1, 2]


def test_an_engine_that_registers_again_before_the_decision_gets_the_weights_later() -> None:
    fleet, client, engines = fleet_in("PAUSED", 2)
    engines[1].ignores = {"Prepare"}
    update = client.update(source_of(1))
    fleet.give(client, update)  # the first has voted
    fleet.redial(engines[0])
    fleet.run()
    assert engines[0].has_entered
    assert list(fleet.core.ranks()) == [1]  # it is let in once the update has ended
    engines[1].ignores = set()
    prepare = next(m for m in engines[1].seen if isinstance(m, Prepare))
    fleet.send(engines[1], *engines[1].receive(prepare))
    fleet.run()
    assert isinstance(client.answer(update), Ack)
    assert versions(engines) == [1, 1]
    assert list(fleet.core.ranks()) == [0, 1]


def test_an_engine_that_fails_or_misses_its_commit_is_removed_and_registers_again() -> None:
    for fault in ("refuses", "ignores"):
        fleet, client, engines = fleet_in("PAUSED", 2)
        setattr(engines[1], fault, {"Commit"})
        update = client.update(source_of(1))
        fleet.give(client, update)
        fleet.pass_time(LIMITS.command_deadline_s + LIMITS.commit_grace_s)
        fleet.run()
        assert isinstance(client.answer(update), Ack)
        assert list(fleet.core.ranks()) == [0]
        assert engines[1].must_register
        fleet.redial(engines[1])
        fleet.run()
        assert versions(engines) == [1, 1]


def committing_amid_a_step(
    longest_step_s: float = 0.0,
) -> tuple[FakeFleet, FakeClient, list[FakeEngine], UpdateWeights]:
    """Return a decided update of two engines. The first one is in a step with a request, and gets
    the Commit only when the step ends. `longest_step_s`: the value that it reports."""
    fleet, client, engines = fleet_in("RUNNING", 2)
    engines[0].longest_step_s = longest_step_s
    fleet.send(client, client.submission([99]))
    fleet.run()
    update = client.update(source_of(1), in_flight=True, deadline_s=1.0)
    fleet.send(client, update)
    fleet.run(client, engines[1])
    fleet.move_one(engines[0])  # it votes yes
    engines[0].is_in_step = True
    fleet.run()
    assert versions(engines) == [0, 1]
    return fleet, client, engines, update


def assert_rank_0_is_removed(fleet: FakeFleet, client: FakeClient, update: UpdateWeights) -> None:
    fleet.run()
    assert list(fleet.core.ranks()) == [1]
    answer = client.answer(update)
    assert isinstance(answer, Ack)
    assert answer.result["lost_ranks"] == [0]


def test_an_engine_with_steps_longer_than_the_grace_is_not_removed() -> None:
    fleet, client, engines, update = committing_amid_a_step()
    step_s = LIMITS.progress_deadline_s - 2
    assert step_s > 3 * LIMITS.commit_grace_s
    fleet.pass_time(step_s)
    engines[0].num_steps += 1  # it takes the commit, and begins the first step under it
    fleet.pass_time(step_s)
    assert list(fleet.core.ranks()) == [0, 1]
    assert client.answer(update) is None
    fleet.send(engines[0], *engines[0].end_step())
    fleet.run()
    answer = client.answer(update)
    assert isinstance(answer, Ack)
    assert answer.result["lost_ranks"] == []
    assert versions(engines) == [1, 1]


def test_an_engine_that_makes_no_step_for_the_progress_deadline_is_removed_amid_a_commit() -> None:
    fleet, client, _, update = committing_amid_a_step()
    fleet.pass_time(LIMITS.progress_deadline_s + 2)
    assert_rank_0_is_removed(fleet, client, update)


def test_an_engine_whose_measured_steps_are_longer_than_the_deadline_commits_in_its_time() -> None:
    fleet, client, engines, update = committing_amid_a_step(longest_step_s=30.0)
    fleet.pass_time(4 * LIMITS.progress_deadline_s)  # which is less than four such steps
    assert list(fleet.core.ranks()) == [0, 1]
    fleet.send(engines[0], *engines[0].end_step())
    fleet.run()
    answer = client.answer(update)
    assert isinstance(answer, Ack)
    assert answer.result["lost_ranks"] == []
    fleet, client, _, update = committing_amid_a_step(longest_step_s=30.0)
    fleet.pass_time(4 * 30.0 + 2)
    assert_rank_0_is_removed(fleet, client, update)


def test_asking_for_stats_does_not_prolong_a_commit_that_hangs() -> None:
    fleet, client, _, update = committing_amid_a_step()
    for _ in range(int(LIMITS.progress_deadline_s) + 2):
        fleet.send(client, client.command(Stats, deadline_s=0.5))
        fleet.run(client)
        fleet.pass_time(1)
    assert_rank_0_is_removed(fleet, client, update)


def test_an_engine_that_steps_on_but_never_commits_is_removed() -> None:
    fleet, client, engines, update = committing_amid_a_step()
    for _ in range(2 * int(LIMITS.progress_deadline_s) + 4):
        engines[0].num_steps += 1
        fleet.pass_time(1)
    assert_rank_0_is_removed(fleet, client, update)


def test_votes_with_different_checksums_roll_all_back() -> None:
    fleet, client, engines = fleet_in("PAUSED", 2)
    prepared = replace(source_of(1), checksum="")
    update = client.update(prepared)
    fleet.send(client, update)
    fleet.run(client)
    for engine, checksum in zip(engines, ("one", "other"), strict=True):
        fleet.run_to(engine)
        message = engine.seen[-1]
        assert isinstance(message, Prepare)
        fleet.send(engine, Ack(command_id=message.command_id, result={"checksum": checksum}))
    fleet.run()
    assert "different checksums: 'one' by rank 0, 'other' by rank 1" in error_of(
        client.answer(update)
    )
    assert fleet.core.weights_version == 0


@pytest.mark.parametrize("checksum", [["a"], {"a": 1}, 7])
def test_a_vote_whose_checksum_is_not_text_rolls_the_update_back(checksum: object) -> None:
    fleet, client, (engine,) = fleet_in("PAUSED", 1)
    update = client.update(replace(source_of(1), checksum=""))
    fleet.send(client, update)
    fleet.run(client)
    fleet.run_to(engine)
    prepare = engine.seen[-1]
    assert isinstance(prepare, Prepare)
    fleet.send(engine, Ack(command_id=prepare.command_id, result={"checksum": checksum}))
    fleet.run()
    assert f"rank 0 names the checksum {checksum!r}" in error_of(client.answer(update))
    assert fleet.core.weights_version == 0
    assert engine.prepared is None


def test_a_late_joiner_gets_state_and_weights_before_it_gets_work() -> None:
    fleet, client, _ = fleet_in("PAUSED", 1)
    fleet.give(client, client.update(source_of(2), version=2))
    fleet.give(client, client.command(Suspend))
    late = fleet.engine()
    fleet.move_one(late)
    assert list(fleet.core.ranks()) == [0]
    fleet.run()
    (ack,) = [m for m in late.seen if isinstance(m, RegisterAck)]
    assert (ack.state, ack.weights) == ("SUSPENDED", source_of(2))
    assert (late.version, late.state) == (2, "SUSPENDED")
    assert list(fleet.core.ranks()) == [0, 1]


def test_a_late_joiner_gets_the_full_weights_below_an_adapter_too() -> None:
    def sources_of_a_late_joiner(*pushes: WeightsSource) -> tuple[object, object]:
        fleet, client, _ = fleet_in("PAUSED", 1)
        for source in pushes:
            assert isinstance(fleet.give(client, client.update(source)), Ack)
        late = fleet.engine()
        fleet.run()
        (ack,) = [m for m in late.seen if isinstance(m, RegisterAck)]
        return ack.weights, ack.base_weights

    first, second, third = (replace(source_of(v), lora=TERMS) for v in (1, 2, 3))
    assert sources_of_a_late_joiner(first, second) == (second, None)
    assert sources_of_a_late_joiner(source_of(1), second, third) == (third, source_of(1))
    assert sources_of_a_late_joiner(source_of(1), second, source_of(3)) == (source_of(3), None)


def test_a_late_joiner_waits_for_the_next_push_where_weights_are_not_kept() -> None:
    fleet, client, (first,) = fleet_in("RUNNING", 1)
    fleet.give(client, client.update(replace(source_of(1), is_kept=False), in_flight=True))
    late = fleet.engine()
    fleet.run()
    (ack,) = [m for m in late.seen if isinstance(m, RegisterAck)]
    assert (ack.state, ack.weights) == ("PAUSED", None)
    assert list(fleet.core.ranks()) == [0], "it gets no work"
    adapter = replace(source_of(2), lora=TERMS, is_kept=False)
    assert isinstance(fleet.give(client, client.update(adapter, in_flight=True)), Ack)
    assert late.version == 0, "an adapter alone is of no use to it"
    fleet.give(client, client.update(replace(source_of(3), is_kept=False), in_flight=True))
    for engine in (first, late):
        (prepare,) = [m for m in engine.seen if isinstance(m, Prepare) and m.version == 3]
        assert prepare.source.num_members == 2
    fleet.run()
    assert late.must_register, "it has the weights, and asks what else it must be"
    fleet.redial(late)
    fleet.run()
    assert (late.version, late.state) == (3, "RUNNING")
    assert list(fleet.core.ranks()) == [0, 1]


def test_a_late_joiner_gets_an_adapter_on_the_initial_weights() -> None:
    fleet, client, _ = fleet_in("RUNNING", 1)
    adapter = replace(source_of(1), lora=TERMS, is_kept=False)
    fleet.give(client, client.update(adapter, in_flight=True))
    late = fleet.engine()
    fleet.run()
    assert list(fleet.core.ranks()) == [0]
    fleet.give(client, client.update(replace(adapter), version=2, in_flight=True))
    fleet.redial(late)
    fleet.run()
    assert (late.version, late.state) == (2, "RUNNING")
    assert list(fleet.core.ranks()) == [0, 1]


def fleet_that_awaits_a_push(*, lora: bool = False) -> tuple[FakeFleet, FakeClient]:
    """All engines were started again after a push that nobody keeps, while requests ran. Full
    weights were pushed, then an adapter if `lora`."""
    fleet, client, engines = fleet_in("RUNNING", 2)
    sources = [source_of(1), *([replace(source_of(2), lora=TERMS)] if lora else [])]
    for source in sources:
        fleet.give(client, client.update(replace(source, is_kept=False), in_flight=True))
    fleet.send(client, *(client.submission([9]) for _ in range(2)))
    fleet.run()
    for engine in engines:
        fleet.cut(engine)
    fleet.pass_time(LIMITS.engine_lease_s + 1)
    for _ in engines:
        fleet.engine()
    fleet.run()
    assert fleet.core.ranks() == {}
    return fleet, client


def test_requests_fail_in_time_where_only_a_push_brings_an_engine_that_serves() -> None:
    fleet, client = fleet_that_awaits_a_push()
    fleet.pass_time(LIMITS.push_wait_s - 1)
    fleet.send(client, client.submission([9]))
    fleet.run()
    assert not any(asked.replies for asked in client.asked.values())
    fleet.pass_time(2)
    fleet.run()
    assert [len(asked.replies) for asked in client.asked.values()] == [1, 1, 0]
    (reply,) = client.asked[0].replies
    assert reply.error is not None
    assert "Push the weights and submit again" in reply.error.message
    assert reply.error.is_transient
    update = client.update(replace(source_of(2), is_kept=False), in_flight=True)
    assert isinstance(fleet.give(client, update), Ack)
    fleet.finish()
    (reply,) = client.asked[2].replies
    assert not reply.is_failed, "the push has brought the engines back"


def test_requests_wait_for_a_push_that_is_under_way() -> None:
    fleet, client = fleet_that_awaits_a_push()
    engines = [peer for peer in fleet.peers.values() if isinstance(peer, FakeEngine)]
    engines[0].ignores = {"Prepare"}
    fleet.pass_time(LIMITS.push_wait_s - 1)
    fleet.give(client, client.update(replace(source_of(2), is_kept=False), in_flight=True))
    fleet.pass_time(LIMITS.command_deadline_s - 1)
    assert not any(asked.replies for asked in client.asked.values()), "longer than push_wait_s"
    fleet.pass_time(LIMITS.push_wait_s - 1)
    assert not any(asked.replies for asked in client.asked.values()), "it has failed: from anew"
    fleet.pass_time(4)
    fleet.run()
    assert all(len(asked.replies) == 1 for asked in client.asked.values())


def test_requests_go_on_waiting_where_an_engine_serves_or_is_coming() -> None:
    fleet, client = fleet_that_awaits_a_push()
    fleet.engine(version=1, checksum="sum1")
    fleet.run()
    assert len(fleet.core.ranks()) == 1
    fleet.pass_time(LIMITS.push_wait_s + 1)
    fleet.finish()
    assert [reply.is_failed for asked in client.asked.values() for reply in asked.replies] == [
        False,
        False,
    ]


def test_an_adapter_for_engines_that_lack_its_base_is_refused_with_the_remedy() -> None:
    fleet, client = fleet_that_awaits_a_push(lora=True)
    adapter = replace(source_of(3), lora=TERMS, is_kept=False)
    nack = fleet.give(client, client.update(adapter, in_flight=True))
    assert isinstance(nack, Nack)
    assert "all 2 engines lack the full weights of this adapter" in nack.error.message
    assert "push the full weights first" in nack.error.message
    assert not nack.error.is_transient, "the same push fails again"


def test_requests_of_an_engine_that_missed_a_push_go_on_elsewhere() -> None:
    fleet, client, (first, second) = fleet_in("RUNNING", 2)
    fleet.send(client, *(client.submission([9]) for _ in range(2)))
    fleet.run()
    assert [len(engine.held) for engine in (first, second)] == [1, 1]
    fleet.pass_time(LIMITS.engine_lease_s + 1, silent=[second])
    fleet.give(client, client.update(replace(source_of(1), is_kept=False), in_flight=True))
    fleet.redial(second)
    fleet.run()
    assert list(fleet.core.ranks()) == [0]
    fleet.finish()
    assert all(len(asked.replies) == 1 for asked in client.asked.values())


def test_update_weights_without_engines_is_refused() -> None:
    fleet = FakeFleet()
    client = fleet.client()
    fleet.run()
    fleet.give(client, client.command(Pause))
    nack = fleet.give(client, client.update(source_of(4), version=4))
    assert isinstance(nack, Nack)
    assert "no engine is ready to verify version 4" in nack.error.message
    assert nack.error.is_transient
    engine = fleet.engine()
    fleet.run()
    assert (engine.version, engine.state) == (0, "PAUSED")
    assert isinstance(fleet.give(client, client.update(source_of(4), version=4)), Ack)
    assert (engine.version, engine.checksum) == (4, "sum4")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"version": 9}, "versions only rise"),
        ({"checksum": "other"}, "have the checksum 'other'"),
        ({"version": -1, "checksum": "other"}, "never published; start"),
    ],
)
def test_an_engine_with_other_weights_and_nowhere_to_get_the_right_ones_is_refused(
    state: dict[str, object], reason: str
) -> None:
    fleet, _, _ = fleet_in("RUNNING", 1)
    engine = fleet.engine(**state)
    fleet.run()
    (nack,) = engine.seen
    assert isinstance(nack, Nack)
    assert reason in error_of(nack)
    assert list(fleet.core.ranks()) == [0]


@pytest.mark.parametrize(
    ("routed", "own", "is_taken"),
    [(16, 16, True), (16, 4, True), (16, 32, False), (None, 32, True)],
)
def test_an_engine_whose_blocks_do_not_divide_those_of_the_routing_is_refused(
    routed: int | None, own: int, is_taken: bool
) -> None:
    fleet = FakeFleet(block_size_tokens=routed)
    engine = fleet.engine(block_size_tokens=own)
    fleet.run()
    assert bool(fleet.core.ranks()) is is_taken
    if not is_taken:
        (nack,) = engine.seen
        assert "start it with block_size_tokens=16" in error_of(nack)


def test_an_engine_whose_settings_differ_from_the_first_ones_is_refused_with_both_values() -> None:
    fleet = FakeFleet()
    first = fleet.engine(settings={"rope.theta": "10000.0", "max_sequence_length": "512"})
    fleet.run()
    alike = fleet.engine(settings=dict(reversed(first.settings.items())))
    other = fleet.engine(settings={**first.settings, "max_sequence_length": "256"})
    silent = fleet.engine()
    fleet.run()
    assert set(fleet.core.ranks().values()) == {first.engine_id, alike.engine_id}
    (nack,) = other.seen
    assert "the engine has max_sequence_length=256, the fleet 512" in error_of(nack)
    (nack,) = silent.seen
    assert "rope.theta=None, the fleet 10000.0; max_sequence_length=None" in error_of(nack)


def test_of_two_engines_that_wait_and_differ_one_is_admitted() -> None:
    fleet = FakeFleet(deterministic_mode=True)
    engines = [fleet.engine(settings={"rms_norm_eps": value}) for value in ("1e-06", "1e-05")]
    fleet.run()
    assert list(fleet.core.ranks().values()) == [engines[0].engine_id]
    (nack,) = [message for message in engines[1].seen if isinstance(message, Nack)]
    assert "rms_norm_eps=1e-05, the fleet 1e-06" in error_of(nack)


def test_an_undecided_vote_is_rolled_back_when_the_engine_registers_again() -> None:
    fleet, _, _ = fleet_in("PAUSED", 1)
    prepare = Prepare(command_id=77, version=5, source=source_of(5))
    late = fleet.engine(prepared=prepare)
    fleet.run()
    assert late.prepared is None
    assert isinstance(late.seen[1], Rollback)
    assert not [m for m in late.seen if isinstance(m, Commit)]


def test_ranks_are_the_lowest_free_and_kept_for_returning_engines() -> None:
    fleet, _, engines = fleet_in("RUNNING", 3)
    fleet.cut(engines[0])
    fleet.cut(engines[1])
    fleet.pass_time(LIMITS.engine_lease_s + 1)
    fleet.redial(engines[1])
    fleet.run()
    assert fleet.core.ranks() == {1: engines[1].engine_id, 2: engines[2].engine_id}
    other = fleet.engine()
    fleet.run()
    assert fleet.core.ranks()[0] == other.engine_id


def test_in_deterministic_mode_ranks_follow_the_ids_and_not_the_arrival() -> None:
    fleet = FakeFleet(deterministic_mode=True, data_parallel_size=3)
    engines = [FakeEngine(b"x%d" % i, bytes([i]) * 16) for i in (2, 0, 1)]
    for engine in engines[:2]:
        fleet.attach(engine, engine.registration())
    fleet.run()
    assert not fleet.core.ranks()
    fleet.attach(engines[2], engines[2].registration())
    fleet.run()
    assert fleet.core.ranks() == {
        0: engines[1].engine_id,
        1: engines[2].engine_id,
        2: engines[0].engine_id,
    }


def test_an_engine_that_measures_long_steps_may_take_four_times_as_long_for_one() -> None:
    step_s = LIMITS.progress_deadline_s * 10

    def ranks_after(seconds: float) -> list[int]:
        """`first` has measured short steps, `second` long ones; both are amid a step."""
        fleet, client, (first, second) = fleet_in("RUNNING")
        first.longest_step_s, second.longest_step_s = 0.5, step_s
        fleet.send(client, client.submission([99]), client.submission([99]))
        fleet.run()
        fleet.pass_time(1)
        fleet.pass_time(seconds)
        return list(fleet.core.ranks())

    assert ranks_after(LIMITS.progress_deadline_s - 3) == [0, 1]
    assert ranks_after(LIMITS.progress_deadline_s + 2) == [1]
    assert ranks_after(4 * step_s - 3) == [1]
    assert ranks_after(4 * step_s + 2) == []


def test_an_engine_without_progress_is_removed_unless_it_has_no_work() -> None:
    fleet, client, (first, _) = fleet_in("RUNNING")
    fleet.send(client, client.submission([99]), client.submission([99]))
    fleet.run()
    for _ in range(int(LIMITS.progress_deadline_s) + 2):
        fleet.send(first, *first.step(1))
        fleet.run()
        fleet.pass_time(1)
    fleet.run()
    assert list(fleet.core.ranks()) == [0]
    assert len(first.held) == 2
    fleet.give(client, client.command(Pause))
    fleet.pass_time(LIMITS.progress_deadline_s + 5)
    assert list(fleet.core.ranks()) == [0]


def test_fleet_keeps_the_weights_and_settings_of_the_first_engine() -> None:
    fleet = Fleet()
    fleet.join(3, "", {"dtype": "float32"})
    assert fleet.join(2, "sum", {"dtype": "bfloat16"}).checksum == "sum", "the first that is known"
    assert fleet.difference({"dtype": "float32"}) == ""
    fleet.renumber(4)
    assert (fleet.weights_version, fleet.weights_checksum) == (4, "sum")
