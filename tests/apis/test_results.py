"""What the reports of several engines come to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rollout.coordinator.client.fleet_stats import engine_stats, stats_by_engine
from tests.tiny_models import tiny_engine, tiny_model


def report(**changes: Any) -> dict[str, Any]:
    """An engine's answer, as it arrives: tuples are lists."""
    stats = tiny_engine(tiny_model()).stats()
    values = asdict(stats)
    values |= {"state": "RUNNING", "policy_staleness": [0] * 9, "kv_staleness": [0] * 9}
    return values | changes


def test_stats_of_a_fleet_are_sums_and_the_least_longest_sequence() -> None:
    first = report(num_finished=3, max_sequence_length=64, policy_staleness=[5, 1] + [0] * 7)
    second = report(num_finished=4, max_sequence_length=40, policy_staleness=[2, 0] + [1] * 7)
    results = {"state": "PAUSED", "weights_version": 7, "ranks": {"0": first, "1": second}}
    stats = engine_stats(results)
    assert (stats.state.name, stats.weights_version) == ("PAUSED", 7)
    assert (stats.num_finished, stats.max_sequence_length) == (7, 40)
    assert stats.policy_staleness == (7, 1, 1, 1, 1, 1, 1, 1, 1)
    assert stats.kv_staleness == (0,) * 9
    assert [use.label for use in stats.ranks] == ["0.0", "1.0"]


def test_a_fleet_without_engines_has_stats_of_nothing() -> None:
    stats = engine_stats({"state": "RUNNING", "weights_version": 0, "ranks": {}})
    assert (stats.num_blocks_total, stats.max_sequence_length, stats.kv_staleness) == (0, 0, ())


def test_each_engine_of_a_fleet_has_its_own_stats_in_order_of_rank() -> None:
    ranks = {str(rank): report(num_running=rank) for rank in (10, 2)}
    ranks["2"]["state"] = "SUSPENDED"
    engines = stats_by_engine({"ranks": {**ranks, "3": None}})
    shown = [(rank, stats.state.name, stats.num_running) for rank, stats in engines.items()]
    assert shown == [(2, "SUSPENDED", 2), (10, "RUNNING", 10)]
    assert engines[2].policy_staleness == (0,) * 9
