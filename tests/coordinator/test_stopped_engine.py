"""An engine process that is stopped for longer than its lease, and registers again late."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import DynamicInferenceRequest, SamplingParams
from rollout.coordinator.agent.agent import EngineAgent, serve
from rollout.coordinator.client import inference_client
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.client.streams import RequestStream
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.link import Link
from rollout.coordinator.protocol.messages import EngineReply, EngineReplyPartial
from rollout.requests.token_runs import TokenRun
from rollout.weights.transports.registry import WeightFetcher
from rollout.wire import Message
from tests.processes import PROCESSES
from tests.tiny_models import (
    BLOCK_SIZE,
    IS_LONG,
    Margins,
    generate_all,
    prompt_of,
    tiny_engine,
    tiny_model,
)
from tests.waiting import until_async

pytestmark = pytest.mark.distributed
WAIT_S = 300.0
LEASE_S = 3.0
LIMITS = CoordinatorLimits(engine_lease_s=LEASE_S, heartbeat_s=0.2, report_interval_tokens=1)
MODEL_SEED = 30
NUM_ROUNDS = 6 if IS_LONG else 1
NUM_REQUESTS, NUM_TOKENS = 8, 240
# Until the test lets the engines hurry, a request takes so many steps of this: it has begun long
# before it ends.
STEP_S = 0.05


class SlowAgent(EngineAgent):
    """Steps slowly until there is a file `may_hurry`, and not at all while there is a file `hold`:
    an event could be held by who is stopped. It says by a file `is_held` that it is in a step."""

    may_hurry: Path
    hold: Path
    is_held: Path

    def step(self) -> Any:
        if not self.may_hurry.exists():
            time.sleep(STEP_S)
        while self.hold.exists():
            self.is_held.touch()
            time.sleep(STEP_S)
        return super().step()


def engine_process(address: str, number: int, pipe: Connection, folder: Path) -> None:
    SlowAgent.may_hurry = folder / "may_hurry"
    SlowAgent.hold, SlowAgent.is_held = folder / f"hold-{number}", folder / f"is_held-{number}"
    agent = SlowAgent(
        tiny_engine(tiny_model("qwen3", seed=MODEL_SEED)),
        engine_id=bytes([number]) * 16,
        block_size_tokens=BLOCK_SIZE,
        max_requests=64,
        settings={},
        fetch=WeightFetcher(),
    )
    with Link(address, handshake=agent.registration, status=agent.status) as link:
        link.wait_registered(WAIT_S)
        pipe.send("ready")
        serve(agent, link)


@contextmanager
def fleet(
    schedule: Path, folder: Path
) -> Iterator[tuple[DataParallelInferenceCoordinator, list[BaseProcess]]]:
    """A coordinator in a thread, and two engines in processes by the number in their ids."""
    coordinator = DataParallelInferenceCoordinator(
        *(None, 2, None),
        prefix_caching_coordinator_policy="round_robin",
        schedule_output_path=str(schedule),
        limits=LIMITS,
    )
    thread = threading.Thread(target=coordinator.start)
    thread.start()
    processes, pipes = [], []
    for number in range(2):
        ours, theirs = PROCESSES.Pipe()
        arguments = (coordinator.address, number, theirs, folder)
        process = PROCESSES.Process(target=engine_process, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(WAIT_S)
        yield coordinator, processes
    finally:
        for process in processes:
            process.kill()
            process.join()
        coordinator.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Received:
    """Counts all tokens and replies that a client's link receives, before the client reads them."""

    def __init__(self) -> None:
        self.tokens: Counter[tuple[int, int]] = Counter()  # by request id and position
        self.replies: Counter[int] = Counter()

    def link(self, *arguments: Any, **options: Any) -> Link:
        """A client's link, whose messages are counted as they are received."""
        link = Link(*arguments, **options)
        receive = link.receive

        def counted_receive(timeout_s: float = 0.0) -> list[Message]:
            messages = receive(timeout_s)
            self._count(messages)
            return messages

        link.receive = counted_receive  # type: ignore[method-assign]
        return link

    def _count(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, EngineReplyPartial):
                positions = range(message.tokens.offset, message.tokens.end)
                self.tokens.update((message.request_id, position) for position in positions)
            elif isinstance(message, EngineReply):
                self.replies[message.request_id] += 1

    @property
    def num_duplicates(self) -> int:
        counts = [*self.tokens.values(), *self.replies.values()]
        return sum(counts) - len(counts)


async def read(stream: RequestStream, has_begun: asyncio.Event) -> DynamicInferenceRequest:
    """Return the record, whose tokens must be the streamed ones."""
    streamed: list[int] = []
    async for item in stream:
        if not isinstance(item, TokenRun):
            assert item.merge().generated_tokens == streamed
            return item.merge()
        assert item.offset == len(streamed), "a token twice, or none"
        streamed += item.token_ids.tolist()
        if len(streamed) > NUM_TOKENS // 8:
            has_begun.set()
    raise AssertionError("the stream ended without a record")


def work_of(round_number: int) -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            prompt_of(3 + 2 * i, seed=round_number),
            SamplingParams(
                num_tokens_to_generate=NUM_TOKENS,
                seed=100 * round_number + i,
                temperature=(1.0, 0.0)[i % 2],
                return_log_probs=True,
            ),
        )
        for i in range(NUM_REQUESTS)
    ]


def assert_undisturbed(requests: list[DynamicInferenceRequest], margins: Margins) -> None:
    """Return the tokens of one engine that is never stopped, and of the model itself."""
    model = tiny_model("qwen3", seed=MODEL_SEED)
    inputs = [(r.prompt_tokens.tolist(), r.sampling_params) for r in requests]
    for request, expected in zip(requests, generate_all(tiny_engine(model), inputs), strict=True):
        if margins.compare(model, request, expected.generated_tokens, expected.sampling_params):
            assert request.generated_log_probs is not None
            np.testing.assert_allclose(
                request.generated_log_probs, expected.generated_log_probs, atol=1e-4
            )
        margins.compare_with_oracle(model, request)


@pytest.mark.slow
def test_an_engine_process_stopped_past_its_lease_registers_again_and_gets_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, may_hurry, margins = tmp_path / "schedule.json", tmp_path / "may_hurry", Margins()
    requests: list[DynamicInferenceRequest] = []

    async def one_round(
        number: int,
        coordinator: DataParallelInferenceCoordinator,
        processes: list[BaseProcess],
        client: InferenceClient,
    ) -> None:
        counters, have_begun = coordinator.counters, []
        lost, stale = counters.num_engines_lost, counters.num_stale
        stopped = number % len(processes)
        hold, is_held = tmp_path / f"hold-{stopped}", tmp_path / f"is_held-{stopped}"
        readers = []
        may_hurry.unlink(missing_ok=True)
        for prompt, params in work_of(number):
            have_begun.append(asyncio.Event())
            readers.append(asyncio.create_task(read(client.stream(prompt, params), have_begun[-1])))
        await asyncio.wait_for(asyncio.gather(*(e.wait() for e in have_begun)), WAIT_S)
        is_held.unlink(missing_ok=True)
        hold.touch()
        await until_async(is_held.exists, "the step in which it is stopped")
        pid = processes[stopped].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        hold.unlink()
        may_hurry.touch()
        try:
            assert not any(reader.done() for reader in readers), "it was stopped too late"
            requests.extend(await asyncio.wait_for(asyncio.gather(*readers), WAIT_S))
            # The others' end says that the coordinator gave it up; its own lease ends by then, too.
            await asyncio.sleep(max(0.0, stopped_at + LEASE_S + 0.1 - time.monotonic()))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert counters.num_engines_lost > lost
        # On a machine that is slow enough the other one may have been given up as well.
        await until_async(
            lambda: counters.num_engines_joined == len(processes) + counters.num_engines_lost,
            "the registration of all that were given up",
        )
        await until_async(lambda: counters.num_stale > stale, "its late words")
        await client.engine_stats()  # both engines answer behind their credit

    received = Received()
    monkeypatch.setattr(inference_client, "Link", received.link)

    async def work(
        coordinator: DataParallelInferenceCoordinator, processes: list[BaseProcess]
    ) -> None:
        async with InferenceClient(coordinator.address) as client:
            for number in range(NUM_ROUNDS):
                await one_round(number, coordinator, processes, client)
            again = [client.add_request(p, s) for p, s in work_of(NUM_ROUNDS)]
            records = await asyncio.wait_for(asyncio.gather(*again), WAIT_S)
            requests.extend(record.merge() for record in records)
            counters = coordinator.counters
            print(
                f"\n{NUM_ROUNDS} stops: {counters.num_requests} requests, "
                f"{counters.num_reassigned} moved, {counters.num_stale} late messages dropped, "
                f"received {received.tokens.total()} tokens & {received.replies.total()} replies, "
                f"{received.num_duplicates} of them twice"
            )
            assert counters.num_reassigned >= NUM_ROUNDS * NUM_REQUESTS // 2
            assert received.num_duplicates == 0 < received.tokens.total()
            assert received.replies.total() == counters.num_requests == len(requests)

    with fleet(schedule, tmp_path) as (coordinator, processes):
        asyncio.run(asyncio.wait_for(work(coordinator, processes), 10 * WAIT_S))
    assert_undisturbed(requests, margins)
    margins.check()
    print(f"{margins.num_tokens} tokens compared, {len(margins.exceptions)} within rounding")
    ranks = [r["rank_index"] for r in json.loads(schedule.read_text())["records"]]
    assert set(ranks[-NUM_REQUESTS:]) == {0, 1}
