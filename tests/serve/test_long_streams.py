"""Two thousand streams in ten minutes, a tenth of them disconnected, leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.apis.leftovers import fleet_pids
from tests.serve.raw_client import request_bytes
from tests.serve.served import Served, served_directory
from tests.serve.test_limits import num_in_engines, until
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed

NUM_STREAMS, SECONDS = 2000, 600.0
CUT_EVERY = 10
SAMPLE_S = 15.0
# The ring of samples for the page is full by half-time; what grows on is a leak.
MAX_GROWTH_BYTES = 8 * 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


async def read_stream(served: Served, index: int) -> bool:
    """Whether it was read to its end; every tenth is cut off in its midst."""
    body = {
        "prompt": prompt_of(20 + index % 30, index),
        "max_tokens": 16 + index * 7 % 48,
        "stream": True,
        "seed": index,
        "logprobs": 1,
        "n": 1 + index % 3,
    }
    reader, writer = await asyncio.open_connection(served.host, served.port)
    try:
        asked = request_bytes("/v1/completions", body)
        writer.write(asked.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"))
        if index % CUT_EVERY == 0:
            await reader.readuntil(b"data: ")
            return False
        return b"data: [DONE]" in await reader.read(-1)
    finally:
        writer.close()


async def all_streams(served: Served, resident: list[dict[str, int]]) -> int:
    """Start them evenly over the time; returns how many were whole."""
    pids = {"server and clients": os.getpid()}
    pids |= {f"process {i}": pid for i, pid in enumerate(fleet_pids())}
    start, last_sample = time.monotonic(), -SAMPLE_S
    streams = []
    for index in range(NUM_STREAMS):
        due = index * SECONDS / NUM_STREAMS
        await asyncio.sleep(max(0.0, start + due - time.monotonic()))
        streams.append(asyncio.ensure_future(read_stream(served, index)))
        if time.monotonic() - last_sample >= SAMPLE_S:
            last_sample = time.monotonic()
            resident.append({name: resident_bytes(pid) for name, pid in pids.items()})
    return sum(await asyncio.gather(*streams))


@pytest.mark.slow
def test_long_runs_of_streams_leave_no_request_or_task() -> None:
    served = served_directory()
    resident: list[dict[str, int]] = []

    async def num_tasks() -> int:
        return len(asyncio.all_tasks())

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    try:
        served.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
        time.sleep(0.2)
        tasks, descriptors = served.do(num_tasks()), num_open()
        num_whole = asyncio.run(all_streams(served, resident))
        assert num_whole == NUM_STREAMS - NUM_STREAMS // CUT_EVERY
        until(lambda: num_in_engines(served) == 0, "the engines are idle")
        assert not served.llm.has_unfinished()
        until(lambda: served.do(num_tasks()) <= tasks, "all tasks have ended")
        until(lambda: num_open() <= descriptors, "all descriptors are closed")
        stats = served.do(served.llm.stats())
        assert stats.num_blocks_used == 0
    finally:
        served.close()
    half = resident[len(resident) // 2 :]
    for name in half[0]:
        first, last = half[0][name], half[-1][name]
        sizes = [f"{size / 2**20:.1f}" for size in (resident[0][name], first, last)]
        print(f"{name}: {' MiB at first, '.join(sizes[:2])} at half-time, {sizes[2]} at the end")
    growth = {name: half[-1][name] - half[0][name] for name in half[0]}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
