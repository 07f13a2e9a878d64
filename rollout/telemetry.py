"""Measurements of an engine, the MetricsWriter protocol, and ObserverGuard.

`rollout.scheduling.scheduler`, `rollout.engine.counters`, `rollout.worker`,
`rollout.tensor_parallel.executor` and `rollout_vllm` create the measurements.
`rollout.control.reports` and `rollout.serve.metrics` report them. `rollout.config` and
`rollout.engine.counters` use MetricsWriter. ObserverGuard is used by `rollout.apis.progress`,
`rollout.engine.counters`, `trainer_hooks.metrics.logger` and `trainer_hooks.train.samples`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

_logger = logging.getLogger(__name__)


@runtime_checkable
class MetricsWriter(Protocol):
    """Any object with the `log` method of W&B: the wandb module, a run, or trainer_hooks'
    MetricsLogger."""

    def log(self, metrics: Mapping[str, float]) -> object:
        """Record one row of metrics: numbers by name."""
        ...


class ObserverGuard:
    """Calls an observer (metrics writer, view or progress bar) and logs its first exception. Later
    exceptions are only counted."""

    def __init__(self, subject: str) -> None:
        """`subject` names the observer in the log."""
        self._subject = subject
        self.num_failures = 0

    def call(self, observe: Callable[..., object], *arguments: Any) -> None:
        """Call `observe(*arguments)`. An Exception is logged; KeyboardInterrupt and SystemExit are
        raised."""
        # The observed work is done. Raising would report a successful suspend or update as failed.
        try:
            observe(*arguments)
        except Exception:
            self.num_failures += 1
            if self.num_failures == 1:
                _logger.exception(
                    "%s failed and may have missed a report; the observed work continues. Further "
                    "failures are not logged",
                    self._subject,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """Counts of a scheduler: requests by phase, and blocks of the KV cache.

    num_without_room: waiting requests for which the last step had no room. It does not count
        requests that arrived later, or that wait for the prefill of their group's prompt.
    num_blocks_used: blocks that requests hold.
    num_blocks_indexed: blocks in the prefix index, whether requests hold them or not.
    """

    num_waiting: int
    num_without_room: int
    num_running: int
    num_paused: int
    num_blocks_used: int
    num_blocks_indexed: int
    num_blocks_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats(SchedulerCounts):
    """One engine step: its number, its duration, and its tokens. The inherited counts are those
    after the step."""

    step: int
    seconds: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    weights_version: int

    def as_metrics(self, prefix: str = "engine/last_step/") -> dict[str, float]:
        """Return all fields, including the inherited counts, as metrics named `prefix` + field."""
        return {f"{prefix}{name}": getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """Resources of one rank of an engine: bytes in use now, and seconds spent since its start.

    engine: number of the engine in the fleet.
    kv_bytes, weights_bytes: reserved bytes; 0 while released.
    *_on_host_bytes: host copies, from which `resume` restores.
    lora_base_bytes: host copy of the base values of weights with a LoRA adapter.
    rss_bytes: resident set size of the process; 0 if the system does not report it.
    cpu_seconds: CPU time of all threads.
    wait_seconds: time that the host waits for other ranks in collectives. With torch.distributed it
        includes the transfers. With NCCL it is nearly 0, because the device waits instead of the
        host.
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
        """The text "engine.rank", such as "0.1"."""
        return f"{self.engine}.{self.rank}"


RANK_FIELDS = tuple(f.name for f in fields(RankUse) if f.name not in ("engine", "rank"))


def sum_of_ranks(ranks: Sequence[RankUse], name: str) -> float:
    """Return the sum of the field `name` (one of RANK_FIELDS) over ranks."""
    return float(sum(getattr(rank, name) for rank in ranks))
