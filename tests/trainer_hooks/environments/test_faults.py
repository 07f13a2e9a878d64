"""Environment faults fail only their rollouts: all others have the tokens of a run without
faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.virtual_time import run_virtually
from rollout.step.seeds import mix_seed
from tests.trainer_hooks.environments.chat_tokenizer import chat_tokenizer
from tests.trainer_hooks.environments.scripted_llm import ScriptedLLM, call
from trainer_hooks import AsyncRolloutProducer, TrainingBatch
from trainer_hooks.environments import (
    EnvironmentRollouts,
    EpisodeLimits,
    ModelTurn,
    ToolCallError,
    ToolEnvironment,
    tool,
)
from trainer_hooks.rollouts import Rollout

TOKENIZER = chat_tokenizer()
GROUP_SIZE, BATCH_GROUPS = 8, 4
FAULTS = ("reset", "raise", "hang", "reward", "state", "refused", "unknown", "malformed")
FATAL = FAULTS[:5]


class Faults:
    """The fault of each sample of each prompt, and an event that ends the hangs."""

    def __init__(self, share: int) -> None:
        """One sample in `share` has a fault; 0 for none."""
        self._share = share
        self.is_over = asyncio.Event()
        self.seen: Counter[str] = Counter()
        self.num_open = 0

    def of(self, key: int) -> str | None:
        if not self._share or mix_seed(key, 1) % self._share:
            return None
        return FAULTS[mix_seed(key, 2) % len(FAULTS)]


class Dice(ToolEnvironment):
    """Adds the numbers that the model rolls. Its first call names its rollout.

    All methods are async, so that time limits run in virtual time.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        faults.num_open += 1

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._fault: str | None = None
        self.total = 0

    async def step(self, turn: ModelTurn) -> Any:
        await asyncio.sleep(0.1)
        if self._fault == "raise":
            raise ValueError("lost")
        while self._fault == "hang" and not self._faults.is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):  # nothing ends it but the test
                await self._faults.is_over.wait()
        return super().step(turn)

    @tool
    def begin(self, key: int) -> str:
        """Begin."""
        fault = self._faults.of(key)
        self._fault = fault
        if fault is not None:
            self._faults.seen[fault] += 1
        if fault == "reset":
            raise KeyError("reset")
        return "begun"

    @tool
    def roll(self, value: int) -> int:
        """Add a value."""
        if self._fault == "refused":
            raise ToolCallError("the dice fell under the table")
        self.total += value
        return self.total

    async def reward(self) -> float:
        if self._fault == "reward":
            raise ZeroDivisionError
        return float(self.total % 7)

    async def state(self) -> Mapping[str, Any]:
        return {"total": object() if self._fault == "state" else self.total}

    async def close(self) -> None:
        self._faults.num_open -= 1


def play(faults: Faults) -> ScriptedLLM:
    """Return an LLM that begins, rolls three times and ends; some turns call a wrong tool."""

    def script(prompt: str, seed: int) -> str:
        turn = prompt.count("<|im_start|>assistant") - 1
        if turn == 0:
            return call("begin", json.dumps({"key": seed}))
        key = int(prompt.partition('{"key": ')[2].partition("}")[0])
        if turn == 2 and faults.of(key) == "unknown":
            return call("throw")
        if turn == 2 and faults.of(key) == "malformed":
            return call("roll", "{value")
        return call("roll", json.dumps({"value": seed % 6})) if turn < 4 else f"So {seed % 100}."

    return ScriptedLLM(script)


def run(faults: Faults, num_groups: int) -> list[TrainingBatch]:
    async def make() -> Dice:
        return Dice(faults)

    async def work() -> list[TrainingBatch]:
        llm = play(faults)
        rows = [{"prompt": f"Roll {i}."} for i in range(num_groups)]
        limits = EpisodeLimits(max_turns=6, step_timeout_s=1.0)
        async with EnvironmentRollouts(make, TOKENIZER, limits) as rollout_fn:
            async with AsyncRolloutProducer(
                llm, rows, None, GROUP_SIZE, BATCH_GROUPS, num_groups, rollout_fn,
                num_epochs=1, max_attempts=1, min_valid_samples=0,
            ) as producer:  # fmt: skip
                batches = [batch async for batch in producer]
            faults.is_over.set()
        assert faults.num_open == 0, "every instance was closed"
        return batches

    return run_virtually(work())


def rollouts_of(batches: Sequence[TrainingBatch]) -> dict[tuple[int, int], Rollout]:
    return {
        (group.ticket.index, i): rollout
        for batch in batches
        for group in batch.groups
        for i, rollout in enumerate(group.rollouts)
    }


def check(num_groups: int, share: int) -> int:
    """Compare a run with faults to one without. Returns the number of faults."""
    none, some = Faults(0), Faults(share)
    expected, batches = rollouts_of(run(none, num_groups)), run(some, num_groups)
    got, ends = rollouts_of(batches), Counter[str]()
    assert sorted(got) == sorted(expected)
    for place, rollout in got.items():
        first = TOKENIZER.decode(rollout.requests[0].generated_tokens, skip_special_tokens=True)
        fault = some.of(json.loads(first[11:-12])["arguments"]["key"])
        if fault in FATAL:
            ends[str(rollout.failure)] += 1
            assert not rollout.succeeded(), (fault, rollout.state)
            continue
        assert rollout.succeeded(), rollout.state
        if fault is None:
            assert rollout.tokens_T.tolist() == expected[place].tokens_T.tolist()
            assert rollout.reward == expected[place].reward
        else:
            assert rollout.state["num_bad_tool_calls"] >= 1
    counted: Counter[str] = Counter()
    for batch in batches:
        prefix = "rollouts/num_failures/"
        counted.update(
            {k.removeprefix(prefix): v for k, v in batch.metrics.items() if k.startswith(prefix)}
        )
        failed = [not r.succeeded() for group in batch.groups for r in group.rollouts]
        assert batch.rollouts.rewards_R.isnan().tolist() == failed
        assert batch.rollouts.mask_BT.any(dim=1).tolist() == [not each for each in failed]
    assert counted == ends
    return sum(some.seen.values())


def test_environment_faults_fail_only_their_rollouts() -> None:
    assert check(num_groups=12, share=4) >= 10


@pytest.mark.slow
def test_a_thousand_environment_faults_fail_only_their_rollouts() -> None:
    assert check(num_groups=520, share=4) >= 1000
