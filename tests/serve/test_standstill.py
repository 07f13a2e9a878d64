"""A server whose process stops for longer than its lease shuts down with the reason."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout import AsyncLLM
from rollout.coordinator.core.context import CoordinatorLimits
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, until
from tests.serve.raw_client import connected, request_bytes

pytestmark = pytest.mark.distributed

# An AsyncLLM in a process of its own, as `rollout serve` has it, whose client has a short lease.
PROGRAM = """
import asyncio, sys
from rollout import AsyncLLM, ServeConfig
from rollout.coordinator.core.context import CoordinatorLimits

async def main():
    if sys.argv[2] == "joined":
        llm = await AsyncLLM.connect(sys.argv[1])
    else:
        limits = CoordinatorLimits(client_lease_s=2.0)
        options = {"limits": limits}
        llm = AsyncLLM(sys.argv[1], coordinator_options=options, num_threads=1,
                       max_sequence_length=512, buffer_size_gb=0.02, block_size_tokens=8)
    async with llm:
        if sys.argv[2] != "blocking":
            await llm.serve(ServeConfig(port=0), blocking=False)
            print(llm.serving.address[1], llm.address, flush=True)
            while llm.serving.lost is None:
                await asyncio.sleep(0.05)
            raise llm.serving.lost
        serving = asyncio.ensure_future(llm.serve(ServeConfig(port=0)))
        while llm.serving.address is None:
            await asyncio.sleep(0.01)
        print(llm.serving.address[1], llm.address, flush=True)
        await serving

asyncio.run(main())
"""


def started(program: Path, *arguments: str) -> tuple[subprocess.Popen[str], int, str]:
    """Start the program; returns it, the port that it serves, and its coordinator's address."""
    child = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    port, address = child.stdout.readline().split()
    return child, int(port), address


async def stand_still(child: subprocess.Popen[str], port: int, address: str) -> str:
    """Stop the process until its coordinator has given it up; returns what it says at its end."""
    witness = await AsyncLLM.connect(address)
    client = connected(("127.0.0.1", port))
    body = {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True}
    await witness.pause()
    client.sendall(request_bytes("/v1/completions", body))

    async def num_requests() -> int:
        stats = await witness.stats()
        return stats.num_waiting + stats.num_running + stats.num_paused

    async def has_request() -> bool:
        return await num_requests() == 1

    async def has_none() -> bool:
        return await num_requests() == 0

    await until(has_request, "the engine has the request")
    child.send_signal(signal.SIGSTOP)
    try:
        await until(has_none, "the coordinator has given the client up, and aborted its request")
    finally:
        child.send_signal(signal.SIGCONT)
    _, said = await asyncio.to_thread(child.communicate, timeout=DEADLINE_S)
    client.close()
    await witness.shutdown(end_fleet=False)
    return said


@pytest.mark.parametrize(
    "how", ["blocking", pytest.param("in the background", marks=pytest.mark.slow)]
)
def test_server_stops_with_the_reason_after_a_standstill(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    child, port, address = started(program, directory(), how)
    try:
        said = asyncio.run(stand_still(child, port, address))
        assert child.returncode == 1, said
        assert "lease ran out" in said
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_server_of_a_joined_fleet_stops_after_a_standstill(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    async def run() -> None:
        options = {"limits": CoordinatorLimits(client_lease_s=2.0)}
        async with AsyncLLM(directory(), None, CONFIG, coordinator_options=options) as llm:
            child, port, address = await asyncio.to_thread(started, program, llm.address, "joined")
            try:
                said = await stand_still(child, port, address)
                assert child.returncode == 1, said
                assert "lease ran out" in said
            finally:
                child.kill()
                child.wait()
            await llm.unpause()
            assert (await llm.stats()).num_failed <= 1, "the fleet goes on"

    asyncio.run(run())
