"""Limit the computing threads of all libraries, by environment variables.

Used by most programs of this folder, and by `benchmarks.peers_environments` and
`benchmarks.serving_processes` for child processes. Libraries read the variables when they are
loaded, so a program sets them and restarts itself.
"""

from __future__ import annotations

import os
import sys


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return environment variables for `num_threads` computing threads. They forbid downloads."""
    # A single thread has no other thread to wait for.
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
    """Restart this program with one computing thread.

    Replaces this process and does not return, unless the environment already has the variables of
    `thread_environment(1)`.
    """
    wanted = thread_environment(1)
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
