"""Environment variables that limit the computing threads of all libraries.

Libraries read them once, when they are loaded, so a program sets them and starts itself again. Used
by the programs of this folder, and for the processes of peers and servers.
"""

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
    """Start this program again with one computing thread, unless its environment says so already.

    Then this process is replaced, and the call does not return.
    """
    wanted = thread_environment(1)
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
