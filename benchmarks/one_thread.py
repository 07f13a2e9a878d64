"""One computing thread for every library, which they read once, when they are loaded."""

from __future__ import annotations

import os
import sys


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the environment that allows `num_threads` computing threads, and no downloads.

    A single thread gets OpenMP's passive wait policy, since it has no thread to wait for.
    """
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if num_threads == 1 else {}
    return {
        **waiting,
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OPENBLAS_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def restart_with_one_thread() -> None:
    """Start this program again with the environment that allows one thread, unless it has it."""
    wanted = thread_environment(1)
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
