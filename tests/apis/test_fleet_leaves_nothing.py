"""An AsyncLLM leaves no process, file or shared memory, however its own process ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollout import AsyncLLM
from tests.apis.fleets import CONFIG, directory, params, weights
from tests.apis.leftovers import (
    MARK,
    census,
    holders,
    shared_memory,
    unused,
    wait_until_gone,
)
from tests.tiny_models import IS_LONG, prompt_of

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("spawned_children")]
# Of what is imported already; this process has no thread that a fork would lose.
_PROCESSES = multiprocessing.get_context("fork")
SIGNALS = {"killed": signal.SIGKILL, "Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
ENDS = ["exits", "killed", "raises", "Ctrl-C", "killed", "SIGTERM"]
WAIT_S = 120.0


@pytest.mark.parametrize("end", list(islice(cycle(ENDS), 50 if IS_LONG else 3)))
def test_fleet_leaves_no_process_and_no_file(end: str, tmp_path: Path) -> None:
    mark, log = uuid.uuid4().hex, tmp_path / "log"
    folder = tmp_path / "temporary"
    folder.mkdir()
    directory(), weights()
    shm_before = shared_memory()
    inherited = census(mark, os.getpid())  # what other tests have left open here
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_user, args=(end, theirs, mark, folder, log))
    start = time.monotonic()
    process.start()
    theirs.close()
    try:
        assert ours.poll(WAIT_S), log.read_text()
        socket = Path(ours.recv().removeprefix("ipc://"))
        started_s = time.monotonic() - start
        alive = census(mark, process.pid or 0)
        memory_files = alive.memory_files - inherited.memory_files
        assert alive.ports <= inherited.ports, "nobody but this user could find the fleet"
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert socket.is_socket()
        assert len(alive.pids) >= 3, "the user's, the coordinator's and the engine's"
        assert len(memory_files) == 1, "of the last weights"
        ours.send("end")
        if end in SIGNALS:
            # Ctrl-C goes to all that a terminal has in the foreground.
            send = os.killpg if end == "Ctrl-C" else os.kill
            send(process.pid or 0, SIGNALS[end])
        process.join(WAIT_S)
        expected = -SIGNALS[end] if end in ("killed", "SIGTERM") else 0
        assert process.exitcode == expected, log.read_text()
        gone_s = wait_until_gone(mark)
    finally:
        process.kill()
        process.join()
    assert not socket.exists()
    assert not holders(memory_files)
    assert not unused(shared_memory() - shm_before)
    assert os.listdir(folder) == []
    # A busy machine may stop any process for a while, which its log may say.
    said = "".join(line for line in log.open() if "stood still" not in line)
    assert "never retrieved" not in said
    assert "Traceback" not in said, said[-1500:]
    assert not said or end in SIGNALS, "a regular end is silent"
    print(
        f"\n{end}: {len(alive.pids)} processes, "
        f"{len(memory_files)} memory file; started in {started_s:.1f} s, all gone "
        f"{gone_s:.2f} s after their parent"
    )


def _user(end: str, line: Connection, mark: str, folder: Path, log: Path) -> None:
    """A user's program: generates, updates, and ends while it generates."""
    os.setsid()
    os.environ |= {MARK: mark, "TMPDIR": str(folder)}
    tempfile.tempdir = None
    sys.stderr.flush()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def use() -> None:
        async with AsyncLLM(directory(), None, CONFIG) as llm:
            await llm.update_weights(weights(1).state_dict(), in_flight=True)
            running = asyncio.ensure_future(llm.generate(prompt_of(9), params(1, 400)))
            async for _ in llm.stream(prompt_of(9), params(1, 400)):
                break
            line.send(llm.address)
            await asyncio.to_thread(line.recv)
            if end == "exits":
                return
            if end == "raises":
                raise ZeroDivisionError
            await running
            await asyncio.sleep(WAIT_S)

    try:
        asyncio.run(use())
    except (ZeroDivisionError, KeyboardInterrupt):
        os._exit(0)
    os._exit(0)
