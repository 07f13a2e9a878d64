"""Three engines behind a coordinator get new weights under load: all of them, or none."""

from __future__ import annotations

import time

import pytest

from rollout import AsyncLLM
from tests.apis.fleets import Load, weights, with_fleet
from tests.apis.history_oracle import HistoryOracle
from tests.tiny_models import IS_LONG

pytestmark = pytest.mark.distributed
MODES = ("persist", "offload", "recompute", "in flight")
ROUNDS = MODES * (6 if IS_LONG else 1)


async def update(llm: AsyncLLM, version: int, mode: str) -> None:
    """One round of a training loop."""
    trained = weights(version).state_dict()
    if mode == "in flight":
        report = await llm.update_weights(trained, version, in_flight=True)
    else:
        await llm.pause()
        await llm.suspend(mode)
        report = await llm.update_weights(trained, version)
        await llm.resume()
        await llm.unpause()
    assert report.version == version


def test_suspend_update_resume_rounds_lose_and_repeat_no_request() -> None:
    async def work(llm: AsyncLLM) -> None:
        load = Load(llm, width=9, num_tokens=100)
        start = time.perf_counter()
        for version, mode in enumerate(ROUNDS, start=1):
            await load.more(2)
            await update(llm, version, mode)
        await load.more(3)
        requests = await load.end()
        seconds = time.perf_counter() - start

        recomputed = {v for v, mode in enumerate(ROUNDS, start=1) if mode == "recompute"}
        oracle = HistoryOracle(weights, recomputed)
        for request in requests:
            oracle.check(request)
        oracle.margins.check()
        seen = [set(request.policy_versions.tolist()) for request in requests]
        assert set.union(*seen) <= set(range(len(ROUNDS) + 1))
        assert max(request.completed_at_version for request in requests) == len(ROUNDS)
        num_mixed = sum(len(versions) > 1 for versions in seen)
        assert num_mixed > len(ROUNDS), "updates came while requests were under way"
        print(
            f"\n{len(ROUNDS)} updates over 3 engines in {seconds:.1f} s: {len(requests)} requests "
            f"({num_mixed} of several versions, at most {max(map(len, seen))}), "
            f"{oracle.margins.num_tokens} tokens checked, {len(oracle.margins.exceptions)} rounded"
        )

    with_fleet(3, work)
