"""One computing thread for every library, which they read once, when they are loaded."""

from __future__ import annotations

import os
import sys

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def restart_with_one_thread() -> None:
    """Start this program again with the environment that allows one thread, unless it has it."""
    if all(os.environ.get(name) == value for name, value in _ENVIRONMENT.items()):
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **_ENVIRONMENT})
