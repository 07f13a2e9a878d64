"""Engines that join, refuse updates and die, in a fleet that goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import AsyncLLM, DynamicInferenceRequest, WeightUpdateError
from tests.apis.engine_children import NUM_STEPS_OF_THE_KILLED, engine_child
from tests.apis.fleets import CONFIG, DEADLINE_S, Load, directory, params, until, weights
from tests.apis.history_oracle import HistoryOracle, num_resumed
from tests.apis.leftovers import fleet_pids
from tests.apis.shells import shell_engine
from tests.lora_adapters import merged, random_adapter
from tests.tiny_models import IS_LONG, Margins, prompt_of, tiny_engine

pytestmark = pytest.mark.distributed
REPORT_INTERVAL = 16  # tokens; the coordinator's default
Work = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


class Fleet:
    """An AsyncLLM with two engines, and the event loop that runs it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        config = CONFIG.replace(reject_non_finite_weights=False)
        self._llm = AsyncLLM(directory(), None, config, data_parallel_size=2)

    def run(self, work: Work) -> None:
        """Once the engine that the test before has ended is known to be gone."""

        async def alone() -> None:
            await self._llm.start()
            await until_served(self._llm, self._llm.weights_version, 2)
            await work(self._llm)

        self._loop.run_until_complete(asyncio.wait_for(alone(), DEADLINE_S))

    def close(self) -> None:
        self._loop.run_until_complete(self._llm.shutdown())
        self._loop.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """One for all tests: each leaves its two engines running, with later weights."""
    made = Fleet()
    yield made
    made.close()


async def served(llm: AsyncLLM) -> dict[int, int]:
    """Return the weights version of each engine, by rank."""
    ranks = (await llm.client.engine_stats()).by_rank
    return {int(rank): stats.weights_version for rank, stats in ranks.items()}


async def until_served(llm: AsyncLLM, version: int, count: int) -> None:
    """Wait until exactly so many engines are connected, and all serve a version."""

    async def is_so() -> bool:
        return list((await served(llm)).values()) == [version] * count

    await until(is_so, f"{count} engines serve version {version}", every_s=0.2)


async def update(llm: AsyncLLM, version: int) -> str:
    """Commit a version in flight. Returns the checksum, which all engines report."""
    report = await llm.update_weights(weights(version).state_dict(), version, in_flight=True)
    return report.checksum


async def give_work_to(llm: AsyncLLM, count: int = 12) -> int:
    """Send enough requests that every engine gets some, and check them. Returns the number of
    tokens."""
    requests = await asyncio.gather(
        *(llm.generate(prompt_of(9, seed=i), params(i)) for i in range(count))
    )
    for request in requests:
        assert set(request.policy_versions.tolist()) == {llm.weights_version}
    return check_all(requests)


def check_all(requests: Iterable[DynamicInferenceRequest]) -> int:
    """Check every token. Returns the number of tokens."""
    oracle = HistoryOracle(weights)
    for request in requests:
        oracle.check(request)
    oracle.margins.check()
    return oracle.margins.num_tokens


def num_moved(requests: Iterable[DynamicInferenceRequest]) -> int:
    """Return how many requests moved to another engine."""
    return sum(num_resumed(request) > 0 for request in requests)


@pytest.mark.slow
def test_an_engine_from_a_shell_joins_and_leaves_while_updates_go_on(fleet: Fleet) -> None:
    async def work(llm: AsyncLLM) -> None:
        version, joined_at = llm.weights_version, 0
        load = Load(llm, width=3, num_tokens=60, rest_s=0.5)
        with shell_engine(llm.address) as shell:
            while not joined_at or version < joined_at + 3:
                version += 1
                await update(llm, version)
                told = await served(llm)
                assert set(told.values()) == {version}
                if len(told) == 3:
                    joined_at = joined_at or version
                assert shell.poll() is None, shell.communicate()
                await load.more(1)
            shell.send_signal(signal.SIGTERM)
            _, log = await asyncio.to_thread(shell.communicate, timeout=60)
            assert shell.returncode == 128 + signal.SIGTERM, log
        requests = await load.end()
        assert len(await served(llm)) == 2
        print(
            f"\nversion {joined_at} of {version} was its first; {len(requests)} requests, of which "
            f"{num_moved(requests)} moved when it left; {check_all(requests)} tokens checked"
        )

    fleet.run(work)


def test_an_update_refused_by_one_engine_is_committed_by_none(fleet: Fleet) -> None:
    async def work(llm: AsyncLLM) -> None:
        version = llm.weights_version + 1
        with engine_child(llm.address, directory(), CONFIG) as child:
            await child.word("here")
            await until_served(llm, version - 1, 3)
            checksum = await update(llm, version)
            assert await child.word("Commit") == (version, checksum)
            load = Load(llm, width=3, num_tokens=60, rest_s=0.5)
            await load.more(2)
            spoiled = {k: v.clone() for k, v in weights(version + 1).state_dict().items()}
            spoiled["model.norm.weight"][3] = float("nan")
            for in_flight in (True, False):
                if not in_flight:
                    await llm.pause()
                with pytest.raises(
                    WeightUpdateError, match=r"rank \d: 'model.norm.weight' holds NaN or infinity"
                ):
                    await llm.update_weights(spoiled, version + 1, in_flight)
                assert await child.word("Rollback") == (version, checksum)
                assert await served(llm) == dict.fromkeys(range(3), version)
            await llm.unpause()
            await load.more(4)
            # Tokens of all engines are those of the old weights: nothing of the new ones is there.
            num_tokens = check_all(await load.end())
            checksum = await update(llm, version + 1)
            assert await child.word("Commit") == (version + 1, checksum)
            await until_served(llm, version + 1, 3)
            num_tokens += await give_work_to(llm)
        print(f"\ntwo updates that one engine refused: {num_tokens} tokens checked around them")

    fleet.run(work)


@pytest.mark.slow
def test_an_engine_gets_no_work_before_it_has_the_very_weights_that_were_committed(
    fleet: Fleet,
) -> None:
    async def work(llm: AsyncLLM) -> None:
        version = llm.weights_version + 1
        checksum = await update(llm, version)
        load = Load(llm, width=6, num_tokens=20, rest_s=0.1)
        with engine_child(llm.address, directory(), CONFIG, "gets other weights") as child:
            assert "the tensors that arrived have the checksum" in await child.word("warned")
            await load.more(6)
            assert len(await served(llm)) == 2
            os.kill(child.process.pid or 0, signal.SIGUSR1)
            assert await child.word("work") == (version, checksum)
            check_all(await load.end())

    fleet.run(work)


@pytest.mark.slow
def test_an_engine_that_joins_late_merges_the_adapter_into_the_fleets_base(fleet: Fleet) -> None:
    async def work(llm: AsyncLLM) -> None:
        version = llm.weights_version + 1
        await update(llm, version)
        base = {name: p.detach() for name, p in weights(version).named_parameters()}
        for seed in (1, 2):
            adapter = random_adapter(base, seed=seed)
            report = await llm.update_weights(adapter, in_flight=True)
        full = tiny_engine(weights(version)).stage_weights(merged(base, adapter))
        assert report.checksum == full.checksum
        with engine_child(llm.address, directory(), CONFIG):
            # It commits what it has staged only with the checksum of the fleet.
            await until_served(llm, version + 2, 3)
        await until_served(llm, version + 2, 2)
        await update(llm, version + 3)

    fleet.run(work)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["dies after its vote", "dies at the commit"][: 1 + IS_LONG])
def test_an_engine_that_dies_after_its_vote_gets_the_update_when_it_rejoins(
    fleet: Fleet, when: str
) -> None:
    async def work(llm: AsyncLLM) -> None:
        version = llm.weights_version + 1
        load = Load(llm, width=3, num_tokens=60, rest_s=0.5)
        with engine_child(llm.address, directory(), CONFIG, when) as child:
            await child.word("work")
            # The decision must not come before the death: it waits for this one's vote.
            slow = fleet_pids()[1]
            if when == "dies after its vote":
                os.kill(slow, signal.SIGSTOP)
            try:
                updated = asyncio.ensure_future(update(llm, version))
                assert await child.death() == -signal.SIGKILL
                assert not updated.done()
            finally:
                os.kill(slow, signal.SIGCONT)
            checksum = await updated
        assert await served(llm) == {0: version, 1: version}
        with engine_child(llm.address, directory(), CONFIG) as again:
            assert await again.word("work") == (version, checksum)
            await load.more(6)
            await until_served(llm, version, 3)
        requests = await load.end()
        print(
            f"\n{len(requests)} requests, {num_moved(requests)} moved by the death, "
            f"{check_all(requests)} tokens checked"
        )

    fleet.run(work)


def test_requests_of_a_killed_engine_continue_from_the_reported_tokens(
    fleet: Fleet, tmp_path: Path
) -> None:
    async def work(llm: AsyncLLM) -> None:
        jobs = [(prompt_of(9, seed=i), params(i, 250)) for i in range(18)]
        undisturbed = await asyncio.gather(*(llm.generate(*job) for job in jobs))
        diary = tmp_path / "diary"
        with engine_child(llm.address, directory(), CONFIG, "waits to be killed", diary) as child:
            await child.word("here")
            await until_served(llm, llm.weights_version, 3)
            tasks = [asyncio.ensure_future(llm.generate(*job)) for job in jobs]
            await child.word("work")
            num_steps = NUM_STEPS_OF_THE_KILLED
            await until(lambda: diary.read_text().count("\n") == num_steps, "its last step")
            child.process.kill()
            await child.death()
            requests = await asyncio.gather(*tasks)
        margins = Margins()
        for request, reference in zip(requests, undisturbed, strict=True):
            margins.compare(weights(llm.weights_version), request, reference.generated_tokens)
        margins.check()
        had = json.loads(diary.read_text().splitlines()[-1])
        known = {str(request.seed): num_resumed(request) for request in requests}
        twice = {seed: had[seed] - known[seed] for seed in had}
        assert len(had) >= 3, "it died with work"
        assert min(twice.values()) >= 0
        assert max(twice.values()) <= REPORT_INTERVAL
        print(
            f"\nkilled with {len(had)} requests and {sum(had.values())} tokens, of which "
            f"{sum(twice.values())} were sampled twice, at most {max(twice.values())} of a request "
            f"({sorted(twice.values())}); {margins.num_tokens} tokens as undisturbed, "
            f"{len(margins.exceptions)} by rounding alone"
        )

    fleet.run(work)
