"""Weights versions across restarts."""

from pathlib import Path

from trainer_hooks.checkpoint import WeightsVersionCounter


def test_versions_rise_by_one_from_the_floor(tmp_path: Path) -> None:
    counter = WeightsVersionCounter(tmp_path / "version", floor=4)
    assert [counter.reserve(), counter.reserve()] == [5, 6]
    assert counter.highest == 6


def test_a_restart_goes_on_above_the_highest_version_ever_reserved(tmp_path: Path) -> None:
    path = tmp_path / "run" / "version"
    killed = WeightsVersionCounter(path)
    for _ in range(12):
        killed.reserve()
    assert WeightsVersionCounter(path, floor=10).reserve() == 13


def test_an_older_file_does_not_lower_the_floor(tmp_path: Path) -> None:
    path = tmp_path / "version"
    WeightsVersionCounter(path).reserve()
    assert WeightsVersionCounter(path, floor=30).reserve() == 31
