"""require_workers: tells a dead worker process of vLLM from other errors.

Used by `rollout_vllm.executor` and `rollout_vllm.pipeline`.
"""

from __future__ import annotations

from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rollout.errors import LockstepError


def require_workers(executor: Executor) -> None:
    """Raise LockstepError if a worker process of vLLM has died."""
    if not isinstance(executor, MultiprocExecutor):
        return  # the only worker lies in this process
    dead = [worker.rank for worker in executor.workers if not worker.proc.is_alive()]
    if dead or executor.is_failed:
        ranks = f" of rank {', '.join(map(str, dead))}" if dead else ""
        raise LockstepError(f"a worker process{ranks} of vLLM has died; create a new engine")
