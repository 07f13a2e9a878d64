"""Fork handlers, so that torch works in children of os.fork.

`create_backend` registers them. A child has its parent's memory but not its threads. GNU's OpenMP
would wait for the missing threads forever at the child's first parallel operation of torch; LLVM's
and Intel's OpenMP handle forks themselves. Pools of Python threads are replaced in `Kernels.split`.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

import torch

logger = logging.getLogger(__name__)

_HARD = 2  # omp_pause_hard: end all threads


@cache
def prepare_for_forks() -> None:
    """Register fork handlers so that forked children can use torch. Later calls are no-ops."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_openmp_threads, after_in_child=_use_one_thread_if_stuck)


def _end_openmp_threads() -> None:
    """Before a fork, end the threads of GNU's OpenMP; the next parallel operation starts new ones.

    Parent and child then each start their own. Takes 0.1 ms. GCC before version 9 lacks the call.
    """
    library = ctypes.CDLL(None)
    if _is_gnu(library) and hasattr(library, "omp_pause_resource_all"):
        library.omp_pause_resource_all(_HARD)


def _use_one_thread_if_stuck() -> None:
    """In a child whose parent could not end its OpenMP threads, make torch use one thread."""
    library = ctypes.CDLL(None)
    if not _is_gnu(library) or hasattr(library, "omp_pause_resource_all"):
        return
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        logger.warning("after a fork, this OpenMP cannot start threads: torch uses one thread")


def _is_gnu(library: ctypes.CDLL) -> bool:
    return hasattr(library, "GOMP_parallel") and not hasattr(library, "__kmpc_fork_call")
