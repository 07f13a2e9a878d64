"""The protocol of contestants' processes and the ratios of rounds, with peers that do nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.models import num_parameters
from benchmarks.peers import lines, parse_arguments
from benchmarks.peers_environments import OURS, run_environment
from benchmarks.peers_models import MODELS
from benchmarks.peers_process import PeerError, WorkerProcess, run_logged
from benchmarks.peers_rounds import Contestant, Display, Tournament, equal_share
from benchmarks.peers_worker import cpu_seconds
from benchmarks.peers_workloads import Contest, contests

TIMEOUT_S = 60.0
NUM_ROUNDS = 3
CONTESTS = contests(100, "small")
Start = Callable[..., Contestant]


class Heard:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.num_plays: Counter[str] = Counter()

    def show(self, text: str) -> None:
        self.texts.append(text)

    def advance(self, contest: Contest, num_plays: int) -> None:
        self.num_plays[contest.name] += num_plays


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a fake contestant with a habit."""
    with ExitStack() as stack:

        def started(name: str, habit: str = "", *, is_int8: bool = False) -> Contestant:
            command = [sys.executable, "-m", "tests.benchmarks.fake_peer", habit or "repeats"]
            worker = WorkerProcess(command, run_environment(OURS, 1), tmp_path / f"{name}.log")
            stack.enter_context(worker)
            return Contestant(name=name + " int8" * is_int8, worker=worker, is_int8=is_int8)

        yield started


def generate(contestant: Contestant, timeout_s: float = TIMEOUT_S) -> list[list[int]]:
    return contestant.generate(CONTESTS["W2"].workload, 0, timeout_s).tokens


def tournament(ours: Contestant, *names: str, display: Display | None = None) -> Tournament:
    return Tournament(
        ours,
        [CONTESTS[name] for name in names],
        num_rounds=NUM_ROUNDS,
        is_exact=True,
        timeout_s=TIMEOUT_S,
        display=display or Heard(),
    )


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
    load = {"method": "load", "model": "m", "precision": "bfloat16", "num_threads": 1}
    with pytest.raises(PeerError, match="RuntimeError: no bfloat16 on this processor"):
        contestant.worker.ask(load, TIMEOUT_S)
    with pytest.raises(PeerError, match="unknown method 'sing'"):
        contestant.worker.ask({"method": "sing"}, TIMEOUT_S)
    assert len(generate(contestant)) == 5


def test_model_is_converted_in_the_precision_asked_for(start: Start, tmp_path: Path) -> None:
    request = {
        "method": "convert",
        "model": "/m/tiny",
        "target": str(tmp_path),
        "precision": "int8",
    }
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
        worker.ask({"method": "load"}, 0.1)
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


def test_peer_with_other_greedy_tokens_leaves_unless_its_weights_are_int8(start: Start) -> None:
    peers = [start("same"), start("other", "counts"), start("narrow", "counts", is_int8=True)]
    contest = tournament(start("rollout"), "W1")
    contest.play(peers)
    assert contest.equal_greedy_share == {
        "same": 1.0,
        "other": pytest.approx(1 / 16),
        "narrow int8": pytest.approx(1 / 16),
    }
    assert contest.left_out == {"other": "only 6% of its greedy tokens are ours"}
    assert contest.results["W1"].peers == ["same", "narrow int8"]


def test_tokens_after_the_first_other_one_do_not_count() -> None:
    assert equal_share([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == pytest.approx(3 / 6)


def test_peer_that_fails_leaves_and_the_rounds_go_on(start: Start) -> None:
    contest = tournament(start("rollout"), "W2", "W3")
    contest.play([start("good"), start("bad", "dies at W3")])
    assert contest.left_out["bad"].startswith("W3: its process ended (3)")
    first, second = contest.results["W2"].groups[0], contest.results["W3"].groups[0]
    assert sorted(first[0]) == ["bad", "good", "rollout"]
    assert [sorted(seconds) for seconds in second] == [["good", "rollout"]] * NUM_ROUNDS
    assert len(contest.load_averages) == len(first) + len(second)


def test_peer_far_behind_the_best_plays_one_round(start: Start) -> None:
    contest = tournament(start("rollout"), "W3")
    contest.play(
        [start("good"), start("slow", "dawdles"), start("narrow", "dawdles", is_int8=True)]
    )
    result = contest.results["W3"]
    assert len(result.ratios_to("slow", "wall")) == 1
    assert len(result.ratios_to("narrow int8", "wall")) == NUM_ROUNDS


def test_peer_of_a_later_group_is_compared_with_those_of_earlier_ones(start: Start) -> None:
    contest = tournament(start("rollout"), "W3")
    contest.play([start("good")])
    contest.play([start("slow", "dawdles")])
    assert [len(group) for group in contest.results["W3"].groups] == [NUM_ROUNDS, 1]
    assert contest.results["W3"].best_peers("wall")[0][1] == "good"


def test_display_hears_of_all_plays_whether_they_take_place_or_not(start: Start) -> None:
    display = Heard()
    contest = tournament(start("rollout"), "W2", "W3", display=display)
    contest.play([start("good"), start("slow", "dawdles"), start("bad", "dies at W3")])
    assert display.num_plays == {"W2": 4 * NUM_ROUNDS, "W3": 4 * NUM_ROUNDS}
    assert "W3, round 1: good" in display.texts


def test_nothing_is_compared_without_ours(start: Start) -> None:
    with pytest.raises(PeerError, match="rollout: greedy: its process ended"):
        tournament(start("rollout", "dies"), "W3").play([start("peer")])


def test_without_a_peer_there_are_no_rounds(start: Start) -> None:
    contest = tournament(start("rollout"), "W3")
    contest.play([start("bad", "dies")])
    assert contest.results["W3"].groups == []


def test_every_round_has_prompts_of_its_own() -> None:
    for contest in CONTESTS.values():
        first, second = contest.of_round(0), contest.of_round(1)
        assert first == contest.of_round(0)
        assert first.prompts != second.prompts
        assert [*map(len, first.prompts)] == [*map(len, second.prompts)]
    assert CONTESTS["W4"].num_counted == 32
    assert CONTESTS["W3"].num_counted == 6


def test_models_have_the_sizes_of_their_names_and_room_for_the_prefill() -> None:
    assert {name: spec.max_position_embeddings for name, spec in MODELS.items()} == dict.fromkeys(
        ("small", "4M", "44M", "0.5B"), 4096
    )
    for name, expected in {"4M": 4e6, "44M": 44e6, "0.5B": 0.5e9}.items():
        assert num_parameters(MODELS[name]) == pytest.approx(expected, rel=0.02)


def test_arguments_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--threads", "0"])
    assert "--threads: 0 must be at least 1" in capsys.readouterr().err
    assert parse_arguments(["--small"]).models == ["small"]


def test_large_model_has_the_same_streams_with_fewer_tokens_and_no_second_peer_in_memory() -> None:
    arguments = parse_arguments(["--threads", "1", "--dtypes", "float32"])
    by_model = {line.model: line for line in lines(arguments)}
    assert [contest.name for contest in by_model["0.5B"].contests] == ["W1", "W3"]
    assert [contest.name for contest in by_model["44M"].contests] == ["W1", "W2", "W3", "W4"]
    full, reduced = (by_model[name].contests[0].workload for name in ("44M", "0.5B"))
    assert len(full.prompts) * full.num_samples == len(reduced.prompts) * reduced.num_samples
    assert full.num_tokens > reduced.num_tokens
    assert [len(group) for group in by_model["0.5B"].groups] == [1] * 4
    assert [len(group) for group in by_model["44M"].groups] == [4]


def test_everything_is_estimated_to_take_as_long_as_its_lines() -> None:
    arguments = parse_arguments([])
    small, large = (
        next(line for line in lines(arguments) if line.model == model) for model in ("4M", "44M")
    )
    assert 30 < small.total_seconds(5) < large.total_seconds(5) < 3600
