"""A killed coordinator process: its clients and engines get CoordinatorLostError."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import pytest

from rollout import SamplingParams
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.net.link import Link
from rollout.errors import CoordinatorLostError
from tests.coordinator.test_link import registration, status
from tests.processes import PROCESSES

pytestmark = pytest.mark.distributed
WAIT_S = 120.0
# Far below the lease of 30 s, and what a busy machine may add to a fraction of a second.
AT_ONCE_S = 10.0


@contextmanager
def coordinator() -> Iterator[tuple[BaseProcess, str]]:
    here, there = PROCESSES.Pipe()
    ready = PROCESSES.Event()
    process = PROCESSES.Process(
        target=DataParallelInferenceCoordinator.entrypoint, args=(there, ready, 1, None)
    )
    process.start()
    try:
        assert here.poll(WAIT_S)
        address = here.recv()
        assert ready.wait(WAIT_S)
        yield process, address
    finally:
        process.kill()
        process.join()
        here.close()


def test_pending_futures_fail_at_once_when_the_coordinator_is_killed() -> None:
    async def work(process: BaseProcess, address: str) -> None:
        async with InferenceClient(address) as client:
            # Without an engine nothing of it ends.
            params = SamplingParams(num_tokens_to_generate=5)
            pending = [client.add_request([1], params) for _ in range(100)]
            stats = await client.engine_stats()  # which says that all have arrived
            assert stats.state == "RUNNING"
            stream = client.stream([1], params)
            process.kill()
            killed_at = time.monotonic()
            for future in pending:
                with pytest.raises(CoordinatorLostError, match="connections are refused"):
                    await future
            with pytest.raises(CoordinatorLostError):
                await stream.__anext__()
            seconds = time.monotonic() - killed_at
            print(f"\nall failed {seconds:.3f} s after the SIGKILL")
            assert seconds < AT_ONCE_S
            with pytest.raises(CoordinatorLostError, match="connections are refused"):
                client.unpause_engines()

    with coordinator() as (process, address):
        asyncio.run(work(process, address))


def test_an_engine_ends_some_time_after_its_coordinator_is_killed() -> None:
    with (
        coordinator() as (process, address),
        Link(address, handshake=registration, status=status, give_up_s=1.0) as link,
    ):
        link.wait_registered(WAIT_S)
        link.receive()
        process.kill()
        killed_at = time.monotonic()
        with pytest.raises(CoordinatorLostError, match="unreachable for 1"):
            link.receive(WAIT_S)
        assert 1.0 <= time.monotonic() - killed_at < AT_ONCE_S
