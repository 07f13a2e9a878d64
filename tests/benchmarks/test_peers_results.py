"""Ratios of rounds, runs that are merged, and the page of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import main
from benchmarks.peers_report import as_markdown, draw
from benchmarks.peers_results import Comparison, Seconds, WorkloadResult, as_json, merged, read_json


def taken(**cpu: float) -> Seconds:
    """A round; by wall clock everyone takes twice as long."""
    return {
        name.replace("_", " "): {"cpu": seconds, "wall": 2 * seconds}
        for name, seconds in cpu.items()
    }


def workload(*groups: list[Seconds]) -> WorkloadResult:
    return WorkloadResult(
        summary="three requests", counted="output", num_counted=12, groups=list(groups)
    )


def comparison(model: str = "small", threads: int = 1, **workloads: WorkloadResult) -> Comparison:
    return Comparison(
        date="2026-01-01",
        machine={
            "cpu": "CPU",
            "cpu_family_model": "1/2",
            "instruction_set": "AVX2",
            "num_cores": 2,
            "threads": threads,
            "torch": "2",
            "python": "3",
            "ops": "Ops",
            "attention": "Attention",
        },
        model=model,
        num_parameters=1000,
        dtype="float32",
        versions={"quick": "1.0", "slow": "2.0"},
        left_out={"broken": "W1: its process ended (3)"},
        equal_greedy_share={"quick": 1.0, "slow": 1.0},
        load_averages=[0.5, 1.0],
        workloads=workloads,
    )


def test_ratio_is_to_the_best_peer_of_the_round_by_each_clock() -> None:
    seconds: Seconds = {
        "rollout": {"cpu": 2.0, "wall": 4.0},
        "quick": {"cpu": 3.0, "wall": 6.0},
        "threaded": {"cpu": 4.0, "wall": 2.0},
        "narrow int8": {"cpu": 1.0, "wall": 1.0},
    }
    result = workload([seconds])
    assert result.best_peers("cpu") == [(pytest.approx(1.5), "quick")]
    assert result.best_peers("wall") == [(pytest.approx(0.5), "threaded")]
    assert result.ratios_to("narrow int8", "cpu") == [pytest.approx(0.5)]
    assert result.speed("narrow int8", "cpu") == 12


def test_peers_of_different_groups_are_compared_by_our_speed_beside_each() -> None:
    first = [taken(rollout=1, quick=2), taken(rollout=1, quick=3)]
    second = [taken(rollout=2, slow=3)]  # ours was disturbed; this peer stopped after a round
    result = workload(first, second)
    assert result.best_peers("cpu") == [(1.5, "slow"), (3.0, "quick")]
    assert result.speed("rollout", "cpu") == 12


def test_later_run_replaces_the_rounds_of_its_peers_only() -> None:
    before = workload([taken(rollout=1, quick=2)], [taken(rollout=1, slow=4)])
    after = workload([taken(rollout=1, quick=5)])
    (one,) = merged(
        [comparison(W1=before, W2=before)], [replace(comparison(W1=after), date="2026-01-02")]
    )
    assert one.workloads["W1"].ratios_to("quick", "cpu") == [5]
    assert one.workloads["W1"].ratios_to("slow", "cpu") == [4]
    assert one.workloads["W2"] == before
    assert one.date == "2026-01-02"


def test_later_run_of_one_peer_leaves_those_that_were_in_memory_beside_it() -> None:
    together = [taken(rollout=1, quick=2, slow=4), taken(rollout=1, quick=2)]
    before, after = workload(together), workload([taken(rollout=1, quick=5)])
    (one,) = merged([comparison(W1=before)], [comparison(W1=after)])
    result = one.workloads["W1"]
    assert result.ratios_to("slow", "cpu") == [4]
    assert result.ratios_to("quick", "cpu") == [5]
    assert result.groups == [[taken(rollout=1, slow=4)], [taken(rollout=1, quick=5)]]


def test_comparisons_of_other_models_and_threads_stay_apart() -> None:
    result = workload([taken(rollout=1, quick=2)])
    large, small = comparison("large", W1=result), comparison(W1=result)
    threaded = comparison(threads=2, W1=result)
    together = merged([threaded, large], [small])
    assert [one.key for one in together] == [
        ("large", "float32", 1),
        ("small", "float32", 1),
        ("small", "float32", 2),
    ]


def test_peer_that_played_after_all_is_no_longer_left_out() -> None:
    result = workload([taken(rollout=1, broken=2)])
    (one,) = merged([comparison(W1=workload([taken(rollout=1, quick=2)]))], [comparison(W1=result)])
    assert one.left_out == {}


def test_page_names_everyone_and_every_reason(tmp_path: Path) -> None:
    result = workload(
        [taken(rollout=1, quick=2, slow=8), taken(rollout=1, quick=4)],
        [taken(rollout=1, narrow_int8=1)] * 2,
    )
    comparisons = [comparison(W1=result), comparison(threads=2, W1=result)]
    page = as_markdown(comparisons, "plot.png")
    assert "| small | float32 | 1 | W1 | **3.00** | 2.00-4.00 | 3.00 | 2.00-4.00 | quick |" in page
    assert "| small | float32 | 2 | W1 | 3.00 | 2.00-4.00 | **3.00** | 2.00-4.00 | quick |" in page
    assert "| quick | CPU | 2.00 | 4.00 | 3.00 | 4.5 |" in page
    assert "| slow | CPU | 8.00 |  | 8.00 | 1.5 |" in page
    assert "| narrow int8 | wall | 1.00 | 1.00 | 1.00 | 6.0 |" in page
    assert "| broken | W1: its process ended (3) |" in page
    draw(comparisons, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_files_of_two_days_are_merged_into_the_page_of_the_later_one(tmp_path: Path) -> None:
    result = workload([taken(rollout=1, quick=2)])
    runs = [comparison(W1=result), replace(comparison("large", W1=result), date="2026-01-02")]
    paths = [tmp_path / f"{run.model}.json" for run in runs]
    for path, run in zip(paths, runs, strict=True):
        path.write_text(json.dumps(as_json([run])))
    folder = tmp_path / "results"
    assert main(["--merge", *map(str, paths), "--output", str(folder)]) == 0
    names = [f"2026-01-02-peers-cpu-avx2.{ending}" for ending in ("json", "md", "png")]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert read_json(folder / names[0]) == merged(runs, [])
    assert (folder / names[1]).read_text().count("\n## ") == 2


def test_file_to_merge_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--merge", str(tmp_path / "none.json")])
    assert "none.json is not a file" in capsys.readouterr().err
