"""An Engine whose four parts are replaced: its model is a table, and its KV cache lists of numbers.

It implements the Protocols of rollout.engine.protocols without blocks, plans or tensors on a
device, so that they are proven by a second implementation. A request's next token follows from its
last token, its position and the table that is served. One step is in flight between two calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.reports import MemoryStatus, ResumeReport, SuspendReport
from rollout.engine.counters import EngineCounters
from rollout.engine.engine import Engine
from rollout.engine.guard import CallGuard
from rollout.engine.input_processor import InputProcessor
from rollout.engine.output_processor import OutputProcessor
from rollout.errors import ConfigError, EngineStateError, WeightUpdateError
from rollout.sampling_params import SamplingParams
from rollout.scheduling.admission import AdmissionLimits
from rollout.scheduling.output import FinishedRequest, PrefilledPrompt, StepUpdate
from rollout.scheduling.stopping import StopRule, check_stop
from rollout.step.output import SampleResult, StepOutput
from rollout.telemetry import RankUse, SchedulerCounts
from rollout.version_spans import VersionSpans
from rollout.weights.update import NamedTensors, by_name
from rollout.weights.version import next_version

VOCAB_SIZE, MAX_LENGTH, NUM_ROWS = 97, 200, 3
Table = dict[str, torch.Tensor]


def table_of(seed: int) -> Table:
    """The weights of a model: a shift for every token, and a factor of the position."""
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.randint(1, VOCAB_SIZE, (VOCAB_SIZE,), generator=generator)
    return {"shifts": shifts.float(), "factor": torch.tensor([float(seed + 1)])}


# ---- executor


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTable:
    """A verified table that waits for its commit."""

    table: Table
    checksum: str
    started_at: float
    seconds: float


class TableExecutor:
    """Implements `Executor` and `ServingWeights`: answers from the table that it serves."""

    def __init__(self, table: Table, version: int) -> None:
        self.table, self.version = table, version
        self.has_values = self.is_finite = self.is_resident = True
        self.is_closed = False

    def next_token(self, last: int, position: int) -> int:
        """The token at `position`, after `last`."""
        shift = self.table["shifts"][last] + self.table["factor"][0] * position
        return int(last + shift) % VOCAB_SIZE

    @property
    def weights(self) -> TableExecutor:
        return self

    @property
    def names(self) -> list[str]:
        return sorted(self.table)

    def require_values(self, what: str) -> None:
        if not self.has_values:
            raise EngineStateError(f"cannot {what}: the table was discarded; commit an update")

    def require_resident(self, what: str) -> None:
        if not self.is_resident:
            raise EngineStateError(f"cannot {what}: the table is released; resume first")

    def data_ptrs(self) -> dict[str, int]:
        return {}

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedTable:
        start, given = time.perf_counter(), by_name(named_tensors)
        for name in sorted({*given} ^ {*self.table}):
            kind = "unknown" if name in given else "missing"
            raise WeightUpdateError(f"{kind} weight {name!r}; the old table is served")
        for name, tensor in given.items():
            check()
            if tensor.shape != self.table[name].shape:
                raise WeightUpdateError(f"{name!r} has shape {list(tensor.shape)}")
            if not tensor.isfinite().all():
                raise WeightUpdateError(f"{name!r} holds NaN or infinity")
        table = {name: tensor.clone() for name, tensor in given.items()}
        checksum = _checksum(table)
        if source_checksum not in ("", checksum):
            raise WeightUpdateError(f"the checksum is {checksum}, not as announced")
        seconds = time.perf_counter() - start
        return StagedTable(table=table, checksum=checksum, started_at=start, seconds=seconds)

    def commit_weights(self, staged: StagedTable, version: int | None) -> int:
        version = next_version(self.version, version)
        self.table, self.version, self.has_values = staged.table, version, True
        return sum(tensor.nbytes for tensor in staged.table.values())

    def set_version(self, version: int) -> None:
        self.version = next_version(self.version, version)

    def weights_checksum(self) -> str:
        self.require_values("compute a checksum")
        return _checksum(self.table)

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        return {name: _checksum({name: self.table[name]}) for name in names}

    def warm_up(self) -> int:
        return 0

    def rank_uses(self) -> tuple[RankUse, ...]:
        if self.is_closed:
            return ()
        return (
            RankUse(
                kv_bytes=0,
                weights_bytes=sum(tensor.nbytes for tensor in self.table.values()),
                kv_on_host_bytes=0,
                weights_on_host_bytes=0,
                lora_base_bytes=0,
                rss_bytes=0,
                cpu_seconds=time.process_time(),
                wait_seconds=0.0,
            ),
        )

    def kv_data_ptrs(self) -> dict[str, int]:
        return {}

    def check_ranks(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def _checksum(table: Table) -> str:
    return str(sorted((name, tensor.tolist()) for name, tensor in table.items()))


# ---- scheduler


@dataclass(slots=True, kw_only=True)
class Listed:
    """A request: its tokens, and the version that wrote the KV of each computed position."""

    tokens: list[int]
    num_prompt: int
    num_entered: int
    stop_rule: StopRule
    kv_spans: VersionSpans = field(default_factory=VersionSpans)


class ListScheduler:
    """Implements `SchedulerInterface` and `KVPool`: the first NUM_ROWS requests run, one after the
    other they get a row. A block is a position, of which there are as many as wanted."""

    block_size, max_tokens, num_routing_bytes = 1, NUM_ROWS * MAX_LENGTH, 0

    def __init__(self) -> None:
        self.waiting: dict[int, Listed] = {}
        self.running: dict[int, Listed] = {}
        self.in_flight: set[int] = set()

    @property
    def kv_cache_manager(self) -> ListScheduler:
        return self

    def begin_weights_version(self) -> None:
        pass  # no prefix is cached

    def distrust(self, version: int) -> None:
        pass

    def add_request(
        self,
        request_id: int,
        tokens: list[int],
        *,
        num_prompt: int,
        priority: int,
        group_id: int | None,
        sampling_params: SamplingParams,
        seed: int,
        stop_rule: StopRule,
        wants_prompt_logprobs: bool,
    ) -> None:
        self.waiting[request_id] = Listed(
            tokens=list(tokens),
            num_prompt=num_prompt,
            num_entered=len(tokens),
            stop_rule=stop_rule,
        )

    def admit(self) -> list[int]:
        """Give rows to the first in the queue. Returns their ids."""
        admitted = list(self.waiting)[: NUM_ROWS - len(self.running)]
        for request_id in admitted:
            self.running[request_id] = self.waiting.pop(request_id)
        return admitted

    def finish_request(self, request_id: int) -> VersionSpans:
        of_phase = self.running if request_id in self.running else self.waiting
        return of_phase.pop(request_id).kv_spans

    def request_ids(self) -> list[int]:
        return [*self.waiting, *self.running]

    def running_ids(self) -> list[int]:
        return list(self.running)

    def kv_spans(self, request_id: int) -> VersionSpans:
        return {**self.waiting, **self.running}[request_id].kv_spans.copy()

    def routing(self, request_id: int) -> None:
        return None

    def requeue_older_than(self, version: int) -> list[int]:
        return self.requeue([i for i, r in self.running.items() if r.kv_spans.min() < version])

    def requeue(self, request_ids: list[int]) -> list[int]:
        """Take rows and KV from requests, which go to the head of the queue."""
        requeued = {request_id: self.running.pop(request_id) for request_id in request_ids}
        for request in requeued.values():
            request.kv_spans, request.num_entered = VersionSpans(), len(request.tokens)
        self.waiting = requeued | self.waiting
        return request_ids

    def counts(self) -> SchedulerCounts:
        num_used = sum(len(request.kv_spans) for request in self.running.values())
        return SchedulerCounts(
            num_waiting=len(self.waiting),
            num_without_room=len(self.waiting),
            num_running=len(self.running),
            num_paused=0,
            num_blocks_used=num_used,
            num_blocks_indexed=0,
            num_blocks_total=NUM_ROWS * MAX_LENGTH,
        )

    def violations(self) -> list[str]:
        both = self.waiting.keys() & self.running.keys()
        found = [f"request {i} waits and runs" for i in sorted(both)]
        if len(self.running) > NUM_ROWS:
            found.append(f"{len(self.running)} requests have {NUM_ROWS} rows")
        for request_id, request in self.waiting.items():
            if len(request.kv_spans):
                found.append(f"request {request_id} waits and has KV")
        for request_id, request in self.running.items():
            computed = len(request.kv_spans)
            if request_id not in self.in_flight and computed not in (0, len(request.tokens) - 1):
                found.append(f"request {request_id} has KV of {computed} tokens")
        return found


# ---- steps


class ListPipeline:
    """Implements `PipelineInterface`: a step computes all running requests, and its result is
    written at the next call."""

    num_graph_captures = 0

    def __init__(
        self,
        scheduler: ListScheduler,
        executor: TableExecutor,
        outputs: OutputProcessor,
        counters: EngineCounters,
        guard: CallGuard,
    ) -> None:
        self._scheduler, self._executor, self._outputs = scheduler, executor, outputs
        self._counters, self._guard = counters, guard
        self._sampled: dict[int, tuple[Listed, int]] | None = None
        self._version, self._launched_at = 0, 0.0
        self.last_result_at = -math.inf

    @property
    def num_in_flight(self) -> int:
        return int(self._sampled is not None)

    def step(self, weights_version: int) -> None:
        with self._guard.change("step"):
            self.commit_all()
            self._outputs.set_running(self._scheduler.admit())
            if self._scheduler.running:
                self._launch(weights_version)
            if not self._scheduler.request_ids():
                self.commit_all()

    def _launch(self, weights_version: int) -> None:
        self._launched_at, self._version, self._sampled = time.perf_counter(), weights_version, {}
        for request_id, request in self._scheduler.running.items():
            num_new = len(request.tokens) - len(request.kv_spans)
            request.kv_spans.append(num_new, weights_version)
            token = self._executor.next_token(request.tokens[-1], len(request.tokens))
            self._sampled[request_id] = request, token
        self._scheduler.in_flight = {*self._sampled}

    def commit_all(self) -> None:
        if self._sampled is None:
            return
        with self._guard.change("step"):
            sampled, self._sampled = self._sampled, None
            self._scheduler.in_flight = set()
            self._write({i: each for i, each in sampled.items() if i in self._scheduler.running})

    def _write(self, sampled: dict[int, tuple[Listed, int]]) -> None:
        prefilled, finished = [], []
        for request_id, (request, token) in sampled.items():
            if len(request.tokens) == request.num_entered:
                prefilled.append(
                    PrefilledPrompt(
                        request_id=request_id,
                        num_tokens=request.num_entered,
                        num_cached_tokens=0,
                        kv_spans=request.kv_spans,
                    )
                )
            request.tokens.append(token)
            stop = check_stop(request.tokens, request.num_prompt, request.stop_rule)
            if stop is not None:
                finished.append(
                    FinishedRequest(
                        request_id=request_id,
                        finish_reason=stop.finish_reason,
                        stop_reason=stop.stop_reason,
                        kv_spans=self._scheduler.finish_request(request_id),
                    )
                )
        tokens = [token for _, token in sampled.values()]
        update = StepUpdate(
            weights_version=self._version,
            request_ids=list(sampled),
            token_ids=tokens,
            sample_indices=range(len(sampled)),
            finished=finished,
            prefilled=prefilled,
            scored=[],
        )
        samples = SampleResult(
            token_ids_S=np.array(tokens, np.int64), is_finite_S=np.ones(len(tokens), np.bool_)
        )
        self._outputs.process_outputs(update, StepOutput(samples=samples))
        self.last_result_at = time.perf_counter()
        self._counters.add_step(
            num_prefill_tokens=0,
            num_decode_tokens=len(tokens),
            num_sampled_tokens=len(tokens),
            seconds=self.last_result_at - self._launched_at,
            weights_version=self._version,
            counts=self._scheduler.counts,
        )

    def measure_step(self, weights_version: int) -> None:
        start = time.perf_counter()
        self._executor.next_token(0, 1)
        self._counters.step_times.add(1, time.perf_counter() - start)

    def suspects(self) -> list[int]:
        return []

    def remove(self, request_id: int) -> None:
        pass


# ---- suspension


class ListSuspension:
    """Implements `SuspensionInterface`: PERSIST keeps the lists, RECOMPUTE drops them, and OFFLOAD
    is refused, because there is no other memory."""

    def __init__(
        self, scheduler: ListScheduler, executor: TableExecutor, outputs: OutputProcessor
    ) -> None:
        self._scheduler, self._executor, self._outputs = scheduler, executor, outputs
        self._mode = KVCacheManagementMode.PERSIST
        self._released: list[str] = []

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        *,
        discard: bool,
        is_first: bool,
    ) -> SuspendReport:
        chosen = as_enum("mode", KVCacheManagementMode, mode or KVCacheManagementMode.PERSIST)
        if chosen is KVCacheManagementMode.OFFLOAD:
            raise ConfigError(f"mode={chosen.value!r} needs other memory; use persist or recompute")
        for name in release:
            _check_resource("release", name)
        if discard and "weights" not in release:
            raise ConfigError("discard_weights=True needs 'weights' in release")
        self._mode, requeued = chosen, list[int]()
        for name in [name for name in release if name not in self._released]:
            self._released.append(name)
            if name == "weights":
                self._executor.is_resident = False
                self._executor.has_values &= not discard
            elif chosen is KVCacheManagementMode.RECOMPUTE:
                requeued = self._scheduler.requeue(self._scheduler.running_ids())
                self._outputs.requeue(requeued)
        return SuspendReport(mode=chosen.value, num_requests_requeued=len(requeued))

    def resume(self, only: str | None = None) -> ResumeReport:
        self._released = [name for name in self._released if only not in (None, name)]
        self._executor.is_resident = "weights" not in self._released
        return ResumeReport(mode=self._mode.value)

    def is_complete_with(self, only: str | None) -> bool:
        if only is not None:
            _check_resource("only", only)
        return only is None or all(name == only for name in self._released)

    def drop_unused_copies(self) -> None:
        pass

    def status(self) -> MemoryStatus:
        return MemoryStatus(
            resident_bytes={"kv_cache": 0, "weights": 0},
            bytes_on_host={"kv_cache": 0, "weights": 0},
            kv_mode=self._mode.value,
            released=tuple(self._released),
            to_restore=tuple(self._released),
            has_weights=self._executor.has_values,
            lora_base_bytes=0,
            routing_bytes=0,
        )


def _check_resource(argument: str, name: str) -> None:
    if name not in ("kv_cache", "weights"):
        raise ConfigError(f"{argument}={name!r} must be one of ['kv_cache', 'weights']")


def listed_engine(
    table: Table, *, weights_version: int = 0, max_kv_staleness_versions: int | None = None
) -> Engine:
    """An engine of these parts, in RUNNING."""
    counters, guard = EngineCounters(writer=None, interval=0), CallGuard()
    scheduler, executor = ListScheduler(), TableExecutor(table, weights_version)
    outputs = OutputProcessor(
        track_paused=False, track_generated_tokens=False, totals=counters.requests
    )
    limits = AdmissionLimits(
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_LENGTH,
        max_pool_tokens=NUM_ROWS * MAX_LENGTH,
        max_tokens_per_step=NUM_ROWS * MAX_LENGTH,
        enable_chunked_prefill=True,
        can_score_prompts=False,
    )
    return Engine(
        inputs=InputProcessor(
            limits=limits,
            tokenizer=None,
            end_ids=(),
            block_size=1,
            enable_prefix_caching=False,
            seed=0,
        ),
        scheduler=scheduler,
        outputs=outputs,
        pipeline=ListPipeline(scheduler, executor, outputs, counters, guard),
        executor=executor,
        suspension=ListSuspension(scheduler, executor, outputs),
        counters=counters,
        guard=guard,
        max_kv_staleness_versions=max_kv_staleness_versions,
    )
