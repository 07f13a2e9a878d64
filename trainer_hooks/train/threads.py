"""Decides how many threads a job's trainer and engines get, so that they do not compete for CPUs.

Used by `trainer_hooks.train.main`. Idle OpenMP threads spin for some milliseconds, so processes
with more threads than CPUs slow each other down. It sets torch's number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rollout.backends.limits import num_usable_cpus
from rollout.backends.select import device_of
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.settings import LOCAL_LAUNCHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Threads of torch and of compiled kernels: in the trainer, and in each rank of an engine. None
    leaves the number to torch or to the engine's launcher."""

    trainer: int | None
    engine: int | None

    def __str__(self) -> str:
        return f"trainer {self.trainer or 'torch default'}, engine {self.engine or 'of launcher'}"


def threads_of(settings: JobSettings) -> Threads:
    """Return the threads of a job.

    `trainer.num_threads` and `engine.num_threads` stay as given. If engines are suspended during
    training or compute on a GPU, trainer and engine get all CPUs each. Otherwise each process gets
    an equal part of the CPUs, at least one.
    """
    trainer, engine = settings.trainer.num_threads, settings.engine.num_threads
    # torchrun divides the CPUs among its ranks by OMP_NUM_THREADS.
    if settings.trainer.strategy == "fsdp2" or settings.launcher.path != LOCAL_LAUNCHER:
        return Threads(trainer=trainer, engine=engine)
    num_cpus = min(num_usable_cpus(), torch.get_num_threads())
    if settings.weight_sync.mode == "suspend" or device_of(settings.engine) != "cpu":
        if engine is None and not settings.num_engines:
            engine = num_cpus
        return Threads(trainer=trainer or num_cpus, engine=engine)
    num_ranks = max(1, settings.num_engines) * settings.engine.tensor_parallel_size
    if trainer is None:
        equal_part = num_cpus // (num_ranks + 1)
        trainer = max(1, equal_part if engine is None else num_cpus - engine * num_ranks)
    return Threads(trainer=trainer, engine=engine or max(1, (num_cpus - trainer) // num_ranks))


def use_threads(num_threads: int | None) -> None:
    """Set torch's number of threads for this Python thread. None leaves it unchanged."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
        torch.get_num_threads()  # else this thread's first computation takes the process's number


@contextmanager
def restored_threads() -> Iterator[None]:
    """Restore torch's number of threads for this Python thread after the block."""
    num_threads = torch.get_num_threads()  # `threads_of` divides it anew for each seed of a job
    try:
        yield
    finally:
        use_threads(num_threads)
