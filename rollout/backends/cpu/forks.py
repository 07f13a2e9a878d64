"""Forks: a child has its parent's memory but not its threads, and must not wait for those.

Pools of Python threads are made anew by their owners (`Kernels.split`). Torch's operations run on
OpenMP's threads, which GNU's OpenMP goes on to use in a child where they do not exist: the first
parallel operation there would never end. LLVM's and Intel's OpenMP see to forks themselves.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

import torch

logger = logging.getLogger(__name__)

_HARD = 2  # omp_pause_hard: give all threads up


@cache
def prepare_for_forks() -> None:
    """Let children of os.fork, from now on, use torch. Once a process is enough."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_openmp_threads, after_in_child=_use_one_thread_if_stuck)


def _end_openmp_threads() -> None:
    """End the threads that GNU's OpenMP keeps for this one; the next operation starts others.

    Parent and child then each have their own. Takes 0.1 ms. One of before GCC 9 cannot do it.
    """
    library = ctypes.CDLL(None)
    if _is_gnu(library) and hasattr(library, "omp_pause_resource_all"):
        library.omp_pause_resource_all(_HARD)


def _use_one_thread_if_stuck() -> None:
    """In the child of a process that could not end them: let torch wait for no other thread."""
    library = ctypes.CDLL(None)
    if not _is_gnu(library) or hasattr(library, "omp_pause_resource_all"):
        return
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        logger.warning("forked: this OpenMP has no threads in a child; using 1 instead")


def _is_gnu(library: ctypes.CDLL) -> bool:
    return hasattr(library, "GOMP_parallel") and not hasattr(library, "__kmpc_fork_call")
