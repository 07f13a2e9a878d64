"""The threads of a job's trainer and engines: all CPUs in sequence, or equal parts at once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from threading import Thread

import pytest
import torch

from trainer_hooks.train import threads
from trainer_hooks.train.job import JobSettings, compose_settings
from trainer_hooks.train.threads import Threads, threads_of, use_threads


@cache
def composed(mode: str) -> JobSettings:
    return compose_settings([f"mode={mode}"], "demo")


def settings(
    mode: str, trainer: int | None = None, engine: int | None = None, num_engines: int = 1
) -> JobSettings:
    job = composed(mode)
    return replace(
        job,
        num_engines=num_engines if mode == "async" else 0,
        trainer=replace(job.trainer, num_threads=trainer),
        engine=replace(job.engine, num_threads=engine),
    )


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_usable_cpus", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)  # of a machine that a cgroup limits


@pytest.mark.parametrize("mode", ["sync", "colocated"])
def test_threads_of_a_trainer_and_its_suspended_engine_are_all_cpus_each(mode: str) -> None:
    assert threads_of(settings(mode)) == Threads(trainer=8, engine=8)
    assert threads_of(settings(mode, trainer=2, engine=3)) == Threads(trainer=2, engine=3)


@pytest.mark.parametrize(
    ("trainer", "engine", "num_engines", "expected"),
    [
        (None, None, 1, (4, 4)),
        (None, None, 3, (2, 2)),
        (None, None, 20, (1, 1)),
        (6, None, 1, (6, 2)),
        (None, 1, 2, (6, 1)),
        (None, 8, 1, (1, 8)),
        (8, 8, 1, (8, 8)),
    ],
)
def test_threads_of_processes_that_run_at_once_share_the_cpus(
    trainer: int | None, engine: int | None, num_engines: int, expected: tuple[int, int]
) -> None:
    found = threads_of(settings("async", trainer, engine, num_engines))
    assert (found.trainer, found.engine) == expected


def test_threads_of_engines_on_other_hosts_are_left_to_their_launcher() -> None:
    job = settings("async")
    elsewhere = replace(job, launcher=replace(job.launcher, path="rollout.launch.ray:RayLauncher"))
    assert threads_of(elsewhere) == Threads(trainer=None, engine=None)


def test_use_threads_holds_in_its_own_thread_whatever_another_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    before, seen = torch.get_num_threads(), []

    def train() -> None:
        use_threads(3)
        other = Thread(target=use_threads, args=(2,))
        other.start()
        other.join()
        seen.append(torch.get_num_threads())

    trainer = Thread(target=train)
    trainer.start()
    trainer.join()
    assert seen == [3]
    torch.set_num_threads(before)
    assert torch.get_num_threads() == before
