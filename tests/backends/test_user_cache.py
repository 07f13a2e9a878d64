"""The lock of the user's cache, between real processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from rollout.backends.cpu.user_cache import exclusive_lock
from tests.processes import PROCESSES

NUM_PROCESSES, NUM_TURNS = 4, 25
PATIENCE_S = 60.0


def count(path: Path) -> None:
    """Add 1 to the number in the file, NUM_TURNS times."""
    for _ in range(NUM_TURNS):
        with exclusive_lock(path.with_suffix(".lock"), PATIENCE_S):
            number = int(path.read_text())
            path.write_text(str(number + 1))


def hold(path: Path, is_held: Event, may_end: Event) -> None:
    with exclusive_lock(path, PATIENCE_S):
        is_held.set()
        may_end.wait(PATIENCE_S)
        os._exit(0)  # as if it were killed: nothing is released in an orderly way


def test_no_turn_of_any_process_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("0")
    processes = [PROCESSES.Process(target=count, args=(path,)) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert path.read_text() == str(NUM_PROCESSES * NUM_TURNS)


def test_a_lock_that_another_process_keeps_is_given_up_and_is_free_after_its_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.lock"
    is_held, may_end = PROCESSES.Event(), PROCESSES.Event()
    process = PROCESSES.Process(target=hold, args=(path, is_held, may_end))
    process.start()
    assert is_held.wait(PATIENCE_S)
    with (
        pytest.raises(TimeoutError, match="stayed locked"),
        exclusive_lock(path, timeout_s=0.05),
    ):
        pass
    may_end.set()
    process.join(PATIENCE_S)
    with exclusive_lock(path, timeout_s=0.05):
        pass


def test_a_child_that_was_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "file.lock"
    here, there = os.pipe()
    with exclusive_lock(path, timeout_s=0.05):
        if (child := os.fork()) == 0:
            os.close(there)
            os.read(here, 1)
            os._exit(0)
    try:
        with exclusive_lock(path, timeout_s=0.05):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child lives beside the new holder"
    finally:
        os.close(there)  # which ends the child
        os.waitpid(child, 0)
        os.close(here)


def test_the_lock_is_released_by_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file.lock"
    with pytest.raises(KeyError), exclusive_lock(path, timeout_s=0.05):
        raise KeyError
    with exclusive_lock(path, timeout_s=0.05):
        pass


def test_a_file_system_without_locks_raises_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="not supported"), exclusive_lock(tmp_path / "a", 0.05):
        pass


def test_a_platform_without_flock_raises_an_os_error() -> None:
    program = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from pathlib import Path\n"
        "from rollout.backends.cpu.user_cache import exclusive_lock\n"
        "try:\n"
        "    exclusive_lock(Path('a'), 1.0).__enter__()\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "this platform has no flock"
