"""AsyncRolloutProducer killed at any moment and resumed trains each prompt once per epoch."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_time import run_virtually
from tests.tiny_models import IS_LONG
from tests.trainer_hooks.producer.fake_llm import FakeLLM, random_delays
from trainer_hooks.producer import AsyncRolloutProducer

NUM_PROMPTS, NUM_EPOCHS = 9, 2


@settings(max_examples=300 if IS_LONG else 20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(0, 2),
    extra=st.integers(0, 2),
    is_saved_before_training=st.booleans(),
    order=st.sampled_from(["admission", "ready"]),
)
def test_killed_producer_finishes_each_prompt_once_per_epoch(
    seed: int, bound: int, extra: int, is_saved_before_training: bool, order: Any
) -> None:
    rng = random.Random(seed)
    saved: tuple[Any, Counter[tuple[int, int]], int] = (None, Counter(), 0)

    async def reward(completion_ids: Any, level: list[int]) -> list[float | None]:
        await asyncio.sleep(rng.random() * 3.0)
        if level[0] == 4:
            return [None] * len(level)  # it fails at every attempt
        return [1.0 if level[0] == 5 else float(i) for i in range(len(level))]

    async def run_job(until_s: float) -> bool:
        """Run the job for `until_s` seconds. Returns whether it ended."""
        nonlocal saved
        state, done, version = saved[0], saved[1].copy(), saved[2]
        llm = FakeLLM(random_delays(rng, 5.0), weights_version=version)
        producer = AsyncRolloutProducer(
            llm,
            [{"prompt": [i, i], "level": i} for i in range(NUM_PROMPTS)],
            reward,
            2,
            2,
            bound,
            seed=1,
            num_epochs=NUM_EPOCHS,
            max_attempts=2,
            oversample_groups=extra,
            order=order,
            max_reissues=1,
            drop_zero_variance=True,
        )
        if state is not None:
            producer.load_state_dict(state)

        def save(last_batch_trained: bool) -> None:
            nonlocal saved
            state = producer.state_dict(last_batch_trained)
            saved = json.loads(json.dumps(state)), done.copy(), llm.weights_version

        async def train() -> bool:
            async for batch in producer:
                if is_saved_before_training:
                    save(last_batch_trained=False)
                await asyncio.sleep(rng.random() * 4.0)
                done.update((group.ticket.epoch, group.ticket.index) for group in batch.groups)
                await llm.push()
                if rng.random() < 0.5:
                    save(last_batch_trained=True)
            save(last_batch_trained=True)
            return True

        try:
            async with producer:
                return await asyncio.wait_for(train(), until_s)
        except asyncio.TimeoutError:
            return False

    async def work() -> int:
        num_runs = 1
        while not await run_job(10_000.0 if num_runs > 12 else rng.random() * 60.0):
            num_runs += 1
        return num_runs

    run_virtually(work())
    state, done, _ = saved
    trainable = set(range(NUM_PROMPTS)) - {4, 5}
    assert done == Counter((e, i) for e in range(NUM_EPOCHS) for i in trainable)
    assert state["consumed"] == {"trained": 2 * 7, "failed": 2, "filtered": 2}
    assert state["unfinished"] == []
