"""Reports of an engine: SchedulerCounts, StepStats, RankUse, and the MetricsWriter that gets them.

ObserverGuard logs exceptions of observers, so that they do not reach the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

_logger = logging.getLogger(__name__)


@runtime_checkable
class MetricsWriter(Protocol):
    """Anything with W&B's `log`: the wandb module, a run, or trainer_hooks' MetricsLogger."""

    def log(self, metrics: Mapping[str, float]) -> object:
        """Record one row of metrics: numbers by name."""
        ...


class ObserverGuard:
    """Calls an observer: a metrics writer, a view or a progress bar, which only look on.

    What they observe is done when they are called. So an exception of theirs is logged, the first
    one with its traceback, and not raised: it would say that an update or a suspend has failed.
    """

    def __init__(self, subject: str) -> None:
        """`subject`: what is called, for the log."""
        self._subject = subject
        self.num_failures = 0

    def call(self, observe: Callable[..., object], *arguments: Any) -> None:
        """Call `observe`. Interrupts pass through."""
        try:
            observe(*arguments)
        except Exception:
            self.num_failures += 1
            if self.num_failures == 1:
                _logger.exception(
                    "%s failed and may miss what it was told; what it observes goes on. Further "
                    "failures of it are not logged",
                    self._subject,
                )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """What one rank of an engine uses: bytes as of now, and seconds since its start.

    engine: its number in the fleet. kv_bytes, weights_bytes: reserved, 0 while released.
    *_on_host_bytes: copies that wait for resume. lora_base_bytes: on the host, what adapted weights
    are without their adapter. rss_bytes: memory that the process takes, whatever for; 0 where the
    system does not say. cpu_seconds: of all its threads. wait_seconds: for other ranks to come to a
    sum; of a group of torch.distributed, the sums as well; on a device nothing waits.
    """

    engine: int = 0
    rank: int = 0
    kv_bytes: int
    weights_bytes: int
    kv_on_host_bytes: int
    weights_on_host_bytes: int
    lora_base_bytes: int
    rss_bytes: int
    cpu_seconds: float
    wait_seconds: float

    @property
    def label(self) -> str:
        """Its engine and its rank in that."""
        return f"{self.engine}.{self.rank}"


RANK_FIELDS = tuple(f.name for f in fields(RankUse) if f.name not in ("engine", "rank"))


def sum_of_ranks(ranks: Sequence[RankUse], name: str) -> float:
    """The sum of one of RANK_FIELDS, each of which may be added."""
    return float(sum(getattr(rank, name) for rank in ranks))
