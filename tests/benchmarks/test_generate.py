"""The benchmark runs, and its numbers add up. How fast anything is, is not tested."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generate import main, parse_arguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    main(["--small", "--rounds", "2", "--output", str(folder)])
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.slow
@pytest.mark.parametrize("name", ["W1", "W2"])
def test_ratio_is_to_the_fastest_peer_of_the_same_round(written: dict[str, Any], name: str) -> None:
    workload = written["workloads"][name]
    assert len(workload["rounds"]) == 2
    for played in workload["rounds"]:
        seconds = played["cpu_seconds"]
        peers = [s for who, s in seconds.items() if who != "rollout" and "sorted" not in who]
        assert played["ratio"] == pytest.approx(min(peers) / seconds["rollout"])
        for who, speed in played["tokens_per_cpu_second"].items():
            assert speed == pytest.approx(workload["num_tokens"] / seconds[who])


@pytest.mark.slow
def test_ratio_to_batches_sorted_by_length_is_kept_apart(written: dict[str, Any]) -> None:
    for played in written["workloads"]["W2"]["rounds"]:
        sorted_peers = [s for who, s in played["cpu_seconds"].items() if "sorted" in who]
        expected = min(sorted_peers) / played["cpu_seconds"]["rollout"]
        assert played["ratio_knowing_lengths"] == pytest.approx(expected)
    assert written["workloads"]["W1"]["rounds"][0]["ratio_knowing_lengths"] is None


@pytest.mark.slow
def test_summary_is_of_the_rounds(written: dict[str, Any]) -> None:
    for workload in written["workloads"].values():
        ratios = [played["ratio"] for played in workload["rounds"]]
        assert workload["smallest_ratio"] == min(ratios)
        assert workload["median_ratio"] == pytest.approx(sum(ratios) / 2)


@pytest.mark.slow
def test_steps_lie_above_their_floor(written: dict[str, Any]) -> None:
    assert [step["batch"] for step in written["decode_steps"]] == [1, 64]
    for step in written["decode_steps"]:
        assert step["ratio"] > 1
    for workload in written["workloads"].values():
        assert workload["over_floor"] > 1


@pytest.mark.slow
def test_log_probs_are_those_of_the_transformers_model(written: dict[str, Any]) -> None:
    assert written["largest_logprob_error"] < 1e-4


@pytest.mark.slow
def test_page_has_every_contestant_and_no_host_name(folder: Path, written: dict[str, Any]) -> None:
    (path,) = folder.glob("*.md")
    page = path.read_text()
    for workload in written["workloads"].values():
        for who in workload["rounds"][0]["cpu_seconds"]:
            assert f"| {who} |" in page
    assert platform.node() not in page + json.dumps(written) + path.name


def test_arguments_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--rounds", "0"])
    assert "--rounds: 0 must be at least 1" in capsys.readouterr().err
