"""The process of a group of made-up parts, each of which ends as its name says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu_parts import Deadline, Part, run_parts
from rollout.child_process import run_child


def _raise(error: Exception) -> dict[str, Any]:
    raise error


def _wait() -> dict[str, Any]:
    threading.Event().wait()
    return {}


def _exit(status: int) -> dict[str, Any]:
    os._exit(status)


def _kill() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return _wait()


def _abort() -> dict[str, Any]:
    os.abort()


ENDS: dict[str, Callable[[], dict[str, Any]]] = {
    "aborts": _abort,
    "is killed": _kill,
    "exits": partial(_exit, 3),
    "hangs": _wait,
    "raises": partial(_raise, ValueError("no such luck")),
    "breaks the device": partial(_raise, RuntimeError("CUDA error: an illegal access")),
}


def run_group(pipe: Connection, group: str, names: list[str], ends_at: float) -> None:
    """Parts without a name of `ENDS` return the process that they ran in."""
    if group == "cannot start":
        raise ImportError("no such module")
    if group == "never starts":
        _wait()
    parts = [
        Part(name=name, kind="host", needs_s=0.0, measure=ENDS.get(name, lambda: {"pid": pid}))
        for name in names
    ]
    pid, failed = os.getpid(), []

    def report(message: tuple[str, Any]) -> None:
        pipe.send(message)
        failed.append(message)

    def recover() -> None:
        if failed[-1][1].name == "breaks the device":
            raise RuntimeError("CUDA error: an illegal access")

    pipe.send(("machine", group))
    run_parts(parts, Deadline(ends_at), report=report, recover=recover)


if __name__ == "__main__":
    run_child(run_group)
