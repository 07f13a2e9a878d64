"""What an engine reports about itself: StepStats, and the MetricsWriter it is handed to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricsWriter(Protocol):
    """Anything with W&B's `log`: the wandb module, a run, or trainer_hooks' MetricsLogger."""

    def log(self, metrics: Mapping[str, float]) -> object:
        """Record one row of metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One engine step. Times in seconds, counts of tokens, requests and blocks."""

    step: int
    seconds: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    num_running: int
    num_paused: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_indexed: int
    num_blocks_total: int
    weights_version: int

    def as_metrics(self, prefix: str = "engine/last_step/") -> dict[str, float]:
        """Flat names for a MetricsWriter."""
        return {f"{prefix}{name}": getattr(self, name) for name in self.__dataclass_fields__}
