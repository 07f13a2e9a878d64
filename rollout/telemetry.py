"""What an engine reports about itself: SchedulerCounts, StepStats, and the MetricsWriter that gets
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricsWriter(Protocol):
    """Anything with W&B's `log`: the wandb module, a run, or trainer_hooks' MetricsLogger."""

    def log(self, metrics: Mapping[str, float]) -> object:
        """Record one row of metrics: numbers by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """The numbers of requests that wait, run and are paused, and of blocks of the KV pool: those
    that requests use, those that the prefix index can find, and all. An indexed block may be in use
    or not.
    """

    num_waiting: int
    num_running: int
    num_paused: int
    num_blocks_used: int
    num_blocks_indexed: int
    num_blocks_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats(SchedulerCounts):
    """One engine step: its number, how long it took, and the tokens that it computed and drew. The
    counts are those after the step.
    """

    step: int
    seconds: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    weights_version: int

    def as_metrics(self, prefix: str = "engine/last_step/") -> dict[str, float]:
        """Return the numbers under flat names, as a MetricsWriter takes them."""
        return {f"{prefix}{name}": getattr(self, name) for name in self.__dataclass_fields__}
