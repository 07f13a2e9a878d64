"""PacedJob: `rollout train --config-name demo` in its own process, which trains only as far as a
test allows.

Used by test_kill, test_async_kill and test_interrupt. As a program it reads from standard input the
step up to which it may train.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trainer_hooks.train.grpo_settings import TINY

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300.0  # only for what hangs


class PacedJob:
    """The job with the settings TINY and `arguments`, in its own directory.

    `stdout`: file descriptor of its standard output; None takes that of this process.
    """

    def __init__(self, directory: Path, *arguments: str, stdout: int | None = None) -> None:
        overrides = [f"{name}={value}" for name, value in TINY.items()]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *overrides, *arguments],
            cwd=directory,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            # Packages of others that are compiled for the first time warn of what they are.
            | {"PYTHONWARNINGS": "ignore::SyntaxWarning"},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def allow(self, last_step: int) -> None:
        """Allow training up to and including this step; the job then waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{last_step}\n")
        self._process.stdin.flush()

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Wait until `is_there` holds. Fails if the job ends first."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_there():
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < deadline, "the job makes no progress"
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def exit_code(self) -> int:
        """Wait for the job to end, without allowing a further step. Returns its exit code."""
        self._process.wait(TIMEOUT_S)
        self._process.communicate()
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def finish(self) -> str:
        """Wait for the job to end with status 0. Returns its standard error."""
        _, errors = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, errors
        return errors


def main() -> None:
    """Run the job with a Learner that waits for permission. At the end of the input all steps are
    allowed.
    """
    from trainer_hooks.train.command import run
    from trainer_hooks.train.learner import Learner

    update, allowed = Learner.update, 0.0

    def update_in_turn(self: Learner, batch: Any, step: int) -> dict[str, float]:
        nonlocal allowed
        while step > allowed:
            allowed = float(sys.stdin.readline() or "inf")
        return update(self, batch, step)

    Learner.update = update_in_turn
    run(["--config-name", "demo", *sys.argv[1:]])


if __name__ == "__main__":
    main()
