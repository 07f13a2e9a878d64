"""Fork handlers, so that torch works in children of os.fork.

`rollout.backends.select` registers them, for the whole process. A child has its parent's memory but
not its threads. At a child's first parallel operation, GNU's OpenMP would wait for the missing
threads forever. LLVM's and Intel's OpenMP handle forks themselves. `Kernels.split` replaces its
pool of Python threads in a child.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

import torch

logger = logging.getLogger(__name__)

_HARD = 2  # omp_pause_hard, which ends all threads


@cache
def prepare_for_forks() -> None:
    """Register fork handlers so that forked children can use torch. Later calls do nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_openmp_threads, after_in_child=_use_one_thread_if_stuck)


def _end_openmp_threads() -> None:
    """End the threads of GNU's OpenMP before a fork."""
    # Takes 0.1 ms. Parent and child start new threads at their next parallel operation. GCC before
    # version 9 lacks the call.
    library = ctypes.CDLL(None)
    if _is_gnu(library) and hasattr(library, "omp_pause_resource_all"):
        library.omp_pause_resource_all(_HARD)


def _use_one_thread_if_stuck() -> None:
    """Make torch use one thread in a child whose parent could not end its OpenMP threads."""
    library = ctypes.CDLL(None)
    if not _is_gnu(library) or hasattr(library, "omp_pause_resource_all"):
        return
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        logger.warning("after a fork, this OpenMP cannot start threads: torch uses one thread")


def _is_gnu(library: ctypes.CDLL) -> bool:
    return hasattr(library, "GOMP_parallel") and not hasattr(library, "__kmpc_fork_call")
