"""The program of a child process in tests: `python -m tests.apis.child_modules --child`. It does
not import torch."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rollout.child_process import run_child


def work(pipe: Connection, what: str, value: Any = None) -> None:
    """`what` to do; each ends when the parent hangs up."""
    if what == "raise":
        raise value
    if what == "die":
        os.kill(os.getpid(), value)
    if what == "environment":
        value = os.environ.get("PYTHONPATH"), signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    pipe.send((what, value))
    with suppress(EOFError):
        pipe.recv()


if __name__ == "__main__":
    run_child(work)
