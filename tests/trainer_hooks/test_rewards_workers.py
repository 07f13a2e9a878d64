"""RewardRunner with workers: results, event loops, and the end of its processes."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import ConfigError
from tests.trainer_hooks.reward_functions import lengths, unruly, waits_for_file
from trainer_hooks.rewards import RewardRunner


def obey_column(answer: Sequence[Any]) -> Any:
    """Return, yield or raise what the column says."""
    if isinstance(answer[0], Exception):
        raise answer[0]
    return (each for each in answer) if answer[0] == "yield" else answer[0]


async def score_one(runner: RewardRunner, completion: str, **columns: Any) -> float:
    rewards = await runner.score(["?"], [completion], [[1]], {k: [v] for k, v in columns.items()})
    return rewards[0]


def test_reward_function_with_wrong_results_in_a_process_is_a_config_error() -> None:
    async def work() -> None:
        with RewardRunner(obey_column, workers=1, max_attempts=1) as runner:
            assert await score_one(runner, "x", answer=[0.5]) == 0.5
            for wrong, named in (
                (None, "returned None"),
                (1.5, "returned 1.5"),
                ([1.0, 2.0], "2 rewards for 1 completions"),
                (ConfigError("of the user"), "of the user"),
            ):
                with pytest.raises(ConfigError, match=named):
                    await score_one(runner, "x", answer=wrong)
            assert math.isnan(await score_one(runner, "x", answer=ValueError("as the column says")))
            assert runner.num_failed_calls == 1

    asyncio.run(work())


def test_reward_worker_that_the_system_refuses_is_a_failed_call_that_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        with RewardRunner(lengths, workers=1, max_attempts=2) as runner:
            with monkeypatch.context() as patch:
                patch.setattr("sys.executable", "/no/such/python")
                assert math.isnan(await score_one(runner, "x"))
            assert "cannot be started" in str(runner.last_error)
            assert runner.num_failed_calls == 2
            assert await score_one(runner, "xyz") == 3.0

    asyncio.run(work())


def test_reward_workers_serve_one_event_loop_after_another() -> None:
    async def epoch() -> list[float]:
        return await asyncio.gather(*[score_one(runner, "x" * i) for i in range(3)])

    with RewardRunner(lengths, workers=1) as runner:
        assert [asyncio.run(epoch()) for _ in range(2)] == [[0.0, 1.0, 2.0]] * 2


def children() -> set[int]:
    """Return the living child processes of this process."""
    pids = set()
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid() and state != "Z":
                pids.add(int(pid))
    return pids


def test_closed_reward_runner_starts_no_process_for_waiting_calls() -> None:
    async def work() -> None:
        before = children()
        runner = RewardRunner(unruly, workers=1)
        calls = [
            asyncio.ensure_future(score_one(runner, each)) for each in ("hang", "fine", "fine")
        ]
        while not children() - before:
            await asyncio.sleep(0)
        runner.close()
        assert all(math.isnan(reward) for reward in await asyncio.gather(*calls))
        assert children() == before
        assert "closed" in str(runner.last_error)

    asyncio.run(work())


def test_warn_after_s_names_a_hanging_call_in_a_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang() -> list[float]:
        with RewardRunner(waits_for_file, 1, warn_after_s=1e-3) as runner:
            file = str(tmp_path / "go")
            call = asyncio.ensure_future(runner.score(["?"], [file], [[1]], {}))
            while not any("waits_for_file still runs" in r.getMessage() for r in caplog.records):
                await asyncio.sleep(0.01)
            Path(file).touch()
            return await call

    assert asyncio.run(asyncio.wait_for(hang(), 100.0)) == [1.0]
