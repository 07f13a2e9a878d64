"""The protocol of contestants' processes and the ratios of rounds, with peers that do nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.models import num_parameters
from benchmarks.peers import parse_arguments
from benchmarks.peers_environments import OURS, run_environment
from benchmarks.peers_models import MODELS
from benchmarks.peers_process import PeerError, WorkerProcess, run_logged
from benchmarks.peers_report import Comparison, as_json, as_markdown, draw
from benchmarks.peers_rounds import Contestant, ContestRounds, Tournament, equal_share, judged
from benchmarks.peers_worker import cpu_seconds
from benchmarks.peers_workloads import contests

TIMEOUT_S = 60.0
CONTESTS = contests(100, is_small=True)
Start = Callable[..., Contestant]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a fake contestant with a habit."""
    with ExitStack() as stack:

        def started(name: str, habit: str = "", *, is_int8: bool = False) -> Contestant:
            command = [sys.executable, "-m", "tests.benchmarks.fake_peer", habit or "repeats"]
            worker = WorkerProcess(command, run_environment(OURS, 1), tmp_path / f"{name}.log")
            stack.enter_context(worker)
            return Contestant(name=name, worker=worker, is_ours=name == "rollout", is_int8=is_int8)

        yield started


def generate(contestant: Contestant, timeout_s: float = TIMEOUT_S) -> list[list[int]]:
    return contestant.generate(CONTESTS["W2"].workload, 0, timeout_s).tokens


def tournament(*contestants: Contestant) -> Tournament:
    return Tournament(contestants, {}, TIMEOUT_S, lambda what: None)


def test_reply_has_the_tokens_and_both_clocks(start: Start) -> None:
    workload = CONTESTS["W1"].workload
    answer = start("rollout").generate(workload, 0, TIMEOUT_S)
    assert answer.tokens == [
        [prompt[-1]] * length
        for prompt, length in zip(workload.prompts, workload.output_lens, strict=True)
        for _ in range(workload.num_samples)
    ]
    assert sorted(answer.seconds) == ["cpu", "wall"]


def test_what_a_peer_prints_goes_to_its_log(start: Start, tmp_path: Path) -> None:
    generate(start("rollout"))
    assert "what an engine prints" in (tmp_path / "rollout.log").read_text()


def test_process_goes_on_after_a_request_that_failed(start: Start) -> None:
    contestant = start("rollout", "refuses")
    load = {"verb": "load", "model": "m", "precision": "bfloat16", "num_threads": 1}
    with pytest.raises(PeerError, match="RuntimeError: no bfloat16 on this processor"):
        contestant.worker.ask(load, TIMEOUT_S)
    with pytest.raises(PeerError, match="unknown verb 'sing'"):
        contestant.worker.ask({"verb": "sing"}, TIMEOUT_S)
    assert len(generate(contestant)) == 5


def test_model_is_converted_in_the_precision_asked_for(start: Start, tmp_path: Path) -> None:
    request = {"verb": "convert", "model": "/m/tiny", "target": str(tmp_path), "precision": "int8"}
    assert start("rollout").worker.ask(request, TIMEOUT_S) == {}
    assert (tmp_path / "int8").read_text() == "tiny"


def test_peer_that_returns_other_lengths_is_refused(start: Start) -> None:
    with pytest.raises(PeerError, match="did not generate what W2 asks for"):
        generate(start("rollout", "says more"))


def test_lost_process_is_told_with_its_last_words(start: Start) -> None:
    with pytest.raises(PeerError, match=r"its process ended \(3\): .*a last word"):
        generate(start("rollout", "dies"))


def test_answer_that_is_no_json_is_shown(start: Start) -> None:
    with pytest.raises(PeerError, match="answered generate with b'not JSON', not JSON"):
        generate(start("rollout", "babbles"))


def test_peer_without_an_answer_is_given_up_and_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print(end='', flush=True); time.sleep(1000)"]
    worker = WorkerProcess(command, {}, tmp_path / "log")
    with pytest.raises(PeerError, match=r"no answer to load within 0.1 s"), worker:
        worker.ask({"verb": "load"}, 0.1)
    assert worker.exit_code == -9


def test_process_has_ended_when_it_is_left(start: Start) -> None:
    with start("rollout").worker as worker:
        assert worker.exit_code is None
    assert worker.exit_code is not None


def test_installer_that_fails_or_takes_too_long_is_reported(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "print('no such release'); raise SystemExit(7)"]
    with pytest.raises(PeerError, match="exit code 7: no such release"):
        run_logged(failing, tmp_path / "log", TIMEOUT_S, {})
    with pytest.raises(PeerError, match=r"not installed within 0.1 s"):
        run_logged(["sleep", "1000"], tmp_path / "log", 0.1, {})


def test_cpu_seconds_contain_those_of_running_children() -> None:
    read_fd, write_fd = os.pipe()
    work = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", work], stdin=read_fd, stdout=subprocess.PIPE
    ) as child:
        os.close(read_fd)
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds() - before >= 0.3
        os.close(write_fd)


def test_ratio_is_to_the_best_peer_of_the_round_by_each_clock() -> None:
    names = ("rollout", "quick", "threaded", "narrow")
    contestants = [
        Contestant(
            name=name,
            worker=None,  # type: ignore[arg-type]
            is_ours=name == "rollout",
            is_int8=name == "narrow",
        )
        for name in names
    ]
    seconds = {
        "rollout": {"cpu": 2.0, "wall": 4.0},
        "quick": {"cpu": 3.0, "wall": 6.0},
        "threaded": {"cpu": 4.0, "wall": 2.0},
        "narrow": {"cpu": 1.0, "wall": 1.0},
    }
    played = judged(contestants, 12, seconds)
    assert played.best_peer == {"cpu": "quick", "wall": "threaded"}
    assert played.ratio == {"cpu": pytest.approx(1.5), "wall": pytest.approx(0.5)}
    assert played.tokens_per_second["cpu"]["narrow"] == 12


def test_peer_with_other_greedy_tokens_leaves_unless_its_weights_are_int8(start: Start) -> None:
    peers = [start("same"), start("other", "counts"), start("narrow", "counts", is_int8=True)]
    contest = tournament(start("rollout"), *peers)
    shares = contest.compare_greedy(CONTESTS["W1"], is_exact=True)
    assert shares == {"same": 1.0, "other": pytest.approx(1 / 5), "narrow": pytest.approx(1 / 5)}
    assert contest.left_out == {"other": "only 20% of its greedy tokens are ours"}
    assert [c.name for c in contest.contestants] == ["rollout", "same", "narrow"]


def test_tokens_after_the_first_other_one_do_not_count() -> None:
    assert equal_share([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == pytest.approx(3 / 6)


def test_peer_that_fails_leaves_and_the_rounds_go_on(start: Start) -> None:
    contest = tournament(start("rollout"), start("good"), start("bad", "dies"))
    played = ContestRounds(contest=CONTESTS["W3"])
    contest.play_round(played)
    contest.play_round(played)
    assert [sorted(r.tokens_per_second["cpu"]) for r in played.rounds] == [["good", "rollout"]] * 2
    assert contest.left_out["bad"].startswith("W3: its process ended (3)")


def test_nothing_is_compared_without_ours_or_without_a_peer(start: Start) -> None:
    with pytest.raises(PeerError, match="rollout: W3: its process ended"):
        tournament(start("rollout", "dies"), start("peer")).warm_up(CONTESTS["W3"])
    with pytest.raises(PeerError, match="no peer is left"):
        tournament(start("rollout")).play_round(ContestRounds(contest=CONTESTS["W3"]))


def test_every_round_has_prompts_of_its_own() -> None:
    for contest in CONTESTS.values():
        first, second = contest.of_round(0), contest.of_round(1)
        assert first == contest.of_round(0)
        assert first.prompts != second.prompts
        assert [*map(len, first.prompts)] == [*map(len, second.prompts)]
    assert CONTESTS["W4"].num_counted == 32
    assert CONTESTS["W3"].num_counted == 6


def test_page_names_everyone_and_every_reason(start: Start, tmp_path: Path) -> None:
    contest = tournament(start("rollout"), start("good"), start("bad", "dies"))
    played = [ContestRounds(contest=CONTESTS[name]) for name in ("W1", "W4")]
    for each in played:
        contest.play_round(each)
    comparison = Comparison(
        date="2026-01-01",
        machine={
            "cpu": "CPU",
            "cpu_family_model": "1/2",
            "instruction_set": "AVX2",
            "num_cores": 2,
            "threads": 1,
            "torch": "2",
            "python": "3",
            "ops": "Ops",
            "attention": "Attention",
        },
        model="small",
        num_parameters=1000,
        dtype="float32",
        clock="cpu",
        versions={"rollout": "this tree", "good": "1.0", "bad": "2.0"},
        left_out=contest.left_out,
        equal_greedy_share={"good": 1.0},
        contests=played,
    )
    page = as_markdown(comparison, "plot.png")
    assert "| bad | W1: its process ended (3)" in page
    assert page.count("\n| good |") == 4
    assert str(tmp_path) not in page
    written = json.loads(json.dumps(as_json(comparison)))
    assert written["workloads"]["W4"]["median_ratio"]["cpu"] == played[1].ratios("cpu")[0]
    draw(comparison, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_models_have_the_sizes_of_their_names_and_room_for_the_prefill() -> None:
    assert {name: spec.max_position_embeddings for name, spec in MODELS.items()} == dict.fromkeys(
        ("small", "4M", "44M", "0.5B"), 4096
    )
    for name, expected in {"4M": 4e6, "44M": 44e6, "0.5B": 0.5e9}.items():
        assert num_parameters(MODELS[name]) == pytest.approx(expected, rel=0.02)


def test_arguments_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--threads", "0"])
    assert "--threads 0 must be at least 1" in capsys.readouterr().err
    assert parse_arguments(["--small"]).models == ["small"]
