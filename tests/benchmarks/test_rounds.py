"""Rounds, tallies, traces and workloads, with contestants that do nothing."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.contestants import Generated, timed
from benchmarks.floor import StepRows, StepTrace
from benchmarks.models import M45, SMALL, num_parameters, transformers_model
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.rounds import Contest, play_round
from benchmarks.workloads import Workload, workloads

THREE_PROMPTS = Workload(
    name="W",
    summary="",
    prompts=((1,), (2,), (3,)),
    output_lens=(1, 4, 2),
    num_samples=2,
    wants_logprobs=False,
)


class Busy:
    """Burns CPU time, then hands out `extra` tokens more than it was asked for."""

    def __init__(
        self, name: str, seconds: float, *, extra: int = 0, knows_lengths: bool = False
    ) -> None:
        self.name, self.seconds, self.extra = name, seconds, extra
        self.knows_lengths = knows_lengths

    def run(self, workload: Workload, seed: int) -> Generated:
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        rows = [
            [0] * (length + self.extra)
            for length in workload.output_lens
            for _ in range(workload.num_samples)
        ]
        return Generated(tokens=rows, logprobs=None)


def test_only_tokens_that_were_asked_for_count() -> None:
    assert THREE_PROMPTS.num_tokens == 2 * (1 + 4 + 2)
    assert THREE_PROMPTS.shortened(2).output_lens == (1, 2, 2)


def test_contestant_that_returns_other_tokens_is_refused() -> None:
    with pytest.raises(RuntimeError, match="liar did not generate what W asks for"):
        timed(Busy("liar", 0.0, extra=1), THREE_PROMPTS, seed=0)


def test_round_takes_the_best_peer_and_drops_those_far_behind() -> None:
    peers = [
        Busy("good", 0.04),
        Busy("bad", 0.12),
        Busy("sorted", 0.02, knows_lengths=True),
    ]
    contest = Contest(workload=THREE_PROMPTS, ours=Busy("rollout", 0.02), peers=peers)
    play_round(contest, lambda name: None)
    (played,) = contest.rounds
    assert played.best_peer == "good"
    assert played.ratio == pytest.approx(2, rel=0.2)
    assert played.best_peer_knowing_lengths == "sorted"
    assert played.ratio_knowing_lengths == pytest.approx(1, rel=0.2)
    assert [peer.name for peer in contest.peers] == ["good", "sorted"]


def test_order_of_contestants_turns_round() -> None:
    contest = Contest(
        workload=THREE_PROMPTS, ours=Busy("rollout", 0.01), peers=[Busy("peer", 0.01)]
    )
    called: list[str] = []
    play_round(contest, called.append)
    play_round(contest, called.append)
    assert called == ["rollout", "peer", "peer", "rollout"]


def test_trace_gives_one_of_equal_runs_without_the_logits_of_forks() -> None:
    trace = StepTrace()
    for prefill, decode, sampled in [(8, 0, 4), (0, 4, 4)] * 3:
        trace.log(
            {
                "engine/last_step/num_prefill_tokens": prefill,
                "engine/last_step/num_decode_tokens": decode,
                "engine/last_step/num_sampled_tokens": sampled,
            }
        )
    run = trace.take_runs(3, num_forked=3)
    assert run == [StepRows(num_tokens=8, num_logits=1), StepRows(num_tokens=4, num_logits=4)]
    assert trace.take_runs(1, num_forked=0) == []


def test_workloads_are_the_same_each_time() -> None:
    first, again = (workloads(M45.vocab_size, is_small=False) for _ in range(2))
    assert first == again
    assert first["W1"].num_tokens == 8 * 8 * 64
    lengths = first["W2"].output_lens
    assert len(lengths) == 32
    assert min(lengths) >= 8
    assert max(lengths) <= 256


def test_parameter_count_is_that_of_the_transformers_model() -> None:
    assert num_parameters(SMALL) == transformers_model(SMALL).num_parameters()
    assert num_parameters(M45) == 43_917_824


def test_program_restarts_with_one_thread_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: started.append(env))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    restart_with_one_thread()
    assert started[0]["OMP_NUM_THREADS"] == "1"
    for name, value in started[0].items():
        monkeypatch.setenv(name, value)
    restart_with_one_thread()
    assert len(started) == 1
