"""Ctrl-C in the job's own process: what it says at once, and what it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.installed import needs
from tests.trainer_hooks.train.paced_job import PacedJob
from trainer_hooks import find_checkpoint, read_trainer_state
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train.main import INTERRUPTED_EXIT_CODE
from trainer_hooks.train.run_files import STOPPING, STOPPING_NOW

pytestmark = needs("reasoning_gym")
SHOWN = ("logger.console=true", "trainer.checkpoint_interval=1")


class Terminal:
    """A terminal of 80 columns and 24 lines. `slave`: the end for a program's output."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._received = b""

    @property
    def text(self) -> str:
        """All that was written so far, with the terminal's codes."""
        while select.select([self._master], [], [], 0)[0]:
            self._received += os.read(self._master, 65536)
        return self._received.decode(errors="replace")

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)


def last_saved(run: Path) -> int:
    """Return the step of the newest checkpoint, -1 without one."""
    checkpoint = find_checkpoint(run / "checkpoints")
    return -1 if checkpoint is None else read_trainer_state(checkpoint).step


def test_ctrl_c_is_acknowledged_at_once_and_stops_after_the_step(tmp_path: Path) -> None:
    run, output = tmp_path / "outputs" / "train" / "demo" / "seed_0", tmp_path / "output"
    with output.open("wb") as file:
        job = PacedJob(tmp_path, *SHOWN, stdout=file.fileno())
    job.allow(1)
    job.wait_until(lambda: last_saved(run) == 1)
    job.interrupt()
    job.wait_until(lambda: STOPPING in output.read_text())  # the second step is not yet allowed
    job.allow(2)
    assert job.exit_code() == INTERRUPTED_EXIT_CODE
    shown, step = output.read_text(), last_saved(run)
    assert step in (1, 2)
    assert f"the checkpoint of step {step} is kept" in shown
    assert f"policy: outputs/train/demo/seed_0/checkpoints/step_{step:06}\n" in shown
    assert "report: outputs/train/demo/seed_0/report.html\n" in shown
    assert [
        row["trainer/step"] for row in read_jsonl(run / "metrics.jsonl") if "reward" in row
    ] == [*range(1, step + 1)]


def test_second_ctrl_c_stops_within_the_step_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "train" / "demo" / "seed_0"
    with closing(Terminal()) as terminal:
        job = PacedJob(tmp_path, *SHOWN, stdout=terminal.slave)
        job.allow(1)
        job.wait_until(lambda: "training" in terminal.text and last_saved(run) == 1)
        job.interrupt()
        job.wait_until(lambda: STOPPING in terminal.text)
        job.interrupt()
        assert job.exit_code() == INTERRUPTED_EXIT_CODE
        assert STOPPING_NOW in terminal.text
        assert "the checkpoint of step 1 is kept" in terminal.text
    checkpoint = find_checkpoint(run / "checkpoints")
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.hidden_size == 16
    assert "Curves" in (run / "report.html").read_text()
