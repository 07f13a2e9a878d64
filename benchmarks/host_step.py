"""CPU time of the host per row and decode step, without a model.

    python benchmarks/host_step.py                      # half a minute
    python benchmarks/host_step.py --rows 256 --rounds 3
    python benchmarks/host_step.py --small              # seconds: shows that it runs, not how fast

A program, run by hand. It prints two tables and writes no file. Real engines run decode steps, but
their model computes nothing and returns random tokens.

The first table has CPU microseconds per row and part of a step, for example "schedule". They are
medians of rounds, and include garbage collection. Reading the clock adds about 0.3 us per step and
part. The second table has CPU microseconds per step that an engine of a fleet spends on reports to
the coordinator, including their encoding.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from benchmarks.gpu_shapes import NEAR_NOTHING
from benchmarks.machine import describe
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import at_least_one
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.coordinator.agent.agent import EngineAgent
from rollout.coordinator.protocol.codec import encode
from rollout.coordinator.protocol.messages import (
    AssignRequest,
    RegisterAck,
    Sample,
)
from rollout.coordinator.protocol.packed import pack_params
from rollout.engine.counters import EngineCounters
from rollout.engine.output_processor import OutputProcessor
from rollout.engine.pipeline import StepPipeline
from rollout.models import CausalLM
from rollout.scheduling.planned_step import PlannedStep
from rollout.scheduling.scheduler import Scheduler
from rollout.step.output import SampleResult, StepOutput
from rollout.step.plan import StepPlan

SPEC = replace(NEAR_NOTHING, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16)
PROMPT_LEN = 32
SLACK = 8  # tokens beyond the measured ones, so that no request ends
MAX_STEPS = 500  # steps of a round
# schedule: Scheduler.schedule without `plan`. plan: building the plan's arrays. commit:
# Scheduler.update_from_output. records: OutputProcessor. rest: the pipeline and the counters.
PARTS = ("schedule", "plan", "commit", "records", "rest")
_ENTRY = RegisterAck(
    coordinator_id=bytes(16),
    state="RUNNING",
    lease_s=1.0,
    heartbeat_s=0.1,
    report_interval_tokens=16,
    weights_version=0,
)


@dataclass(slots=True)
class Stopwatch:
    """CPU nanoseconds of each part since the last `take`. A part inside another counts only
    once."""

    nanoseconds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    _inner: list[int] = field(default_factory=lambda: [0])

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed as a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            start = time.thread_time_ns()
            result = function(*args, **kwargs)
            total = time.thread_time_ns() - start
            self.nanoseconds[part] += total - self._inner.pop()
            self._inner[-1] += total
            return result

        return timed

    def watch(self, owner: object, name: str, part: str) -> None:
        """Replace the method `name` of `owner` with a timed method."""
        setattr(owner, name, self.wrap(part, getattr(owner, name)))

    def take(self) -> dict[str, int]:
        """Return the measured nanoseconds of each part, and set them to 0."""
        taken, self.nanoseconds = self.nanoseconds, dict.fromkeys(PARTS, 0)
        return taken


class NoModel:
    """A step executor that computes nothing and returns random tokens."""

    overlaps = False
    num_graph_captures = 0

    def __init__(self) -> None:
        self._draw = np.random.default_rng(0)

    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        num_samples = len(plan.sample_rows)
        samples = SampleResult(
            token_ids_S=self._draw.integers(1_000, 50_000, size=num_samples),
            is_finite_S=np.ones(num_samples, dtype=np.bool_),
            logprobs_S=-self._draw.random(num_samples, dtype=np.float32),
        )
        return lambda: StepOutput(samples=samples)


class EngineWithoutModel(DynamicInferenceEngine):
    """An engine whose steps compute nothing. `scheduler` and `outputs` are its parts."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        pipeline: StepPipeline,
        counters: EngineCounters,
        **parts: Any,
    ) -> None:
        executor = cast(Any, NoModel())
        pipeline = StepPipeline(
            scheduler=scheduler,
            executor=executor,
            outputs=outputs,
            counters=counters,
            guard=parts["guard"],
        )
        super().__init__(
            scheduler=scheduler, outputs=outputs, pipeline=pipeline, counters=counters, **parts
        )
        self.scheduler, self.outputs = scheduler, outputs


def engine_without_model(config: InferenceConfig) -> EngineWithoutModel:
    """Return an EngineWithoutModel of the tiny shape SPEC."""
    engine = EngineWithoutModel.from_model(CausalLM.random(SPEC), config)
    assert isinstance(engine, EngineWithoutModel)
    return engine


class DecodingEngine:
    """An engine with `num_rows` decoding rows, which last for at least `num_steps` steps."""

    def __init__(self, num_rows: int, num_steps: int, *, has_log_probs: bool) -> None:
        length = -(-(PROMPT_LEN + num_steps + SLACK) // 256) * 256
        config = InferenceConfig(
            device="cpu", num_threads=1, max_requests=num_rows, max_sequence_length=length
        )
        self.num_rows, self.stopwatch = num_rows, Stopwatch()
        self._engine = engine_without_model(config)
        self.stopwatch.watch(self._engine.scheduler, "schedule", "schedule")
        self.stopwatch.watch(self._engine.scheduler, "update_from_output", "commit")
        self.stopwatch.watch(self._engine.outputs, "process_outputs", "records")
        self.stopwatch.watch(self._engine, "step", "rest")
        params = SamplingParams(
            num_tokens_to_generate=num_steps + SLACK,
            ignore_eos=True,
            return_log_probs=has_log_probs,
        )
        for row in range(num_rows):
            self._engine.add_request([row % SPEC.vocab_size] * PROMPT_LEN, params)
        while self._engine.stats().num_running < num_rows:
            self._engine.step()
        self._engine.step()

    def step(self) -> None:
        assert not self._engine.step(), "a request ended"

    def run(self, num_steps: int) -> dict[str, float]:
        """Run `num_steps` steps, and return CPU microseconds per row and step, by part."""
        build = PlannedStep.build_plan
        self.stopwatch.watch(PlannedStep, "build_plan", "plan")
        try:
            self.stopwatch.take()
            for _ in range(num_steps):
                self.step()
        finally:
            PlannedStep.build_plan = build  # type: ignore[method-assign]
        num_row_steps = num_steps * self.num_rows
        return {part: ns / num_row_steps / 1e3 for part, ns in self.stopwatch.take().items()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases.

    Returns the machine, "cases" (microseconds per row, for each number of rows, with and without
    log-probs) and "reports" (the result of `measure_reports`).
    """
    num_steps = {
        rows: min(MAX_STEPS, max(4, arguments.row_steps // rows)) for rows in arguments.rows
    }
    cases = []
    for has_log_probs in (False, True):
        engines = [
            DecodingEngine(
                rows, num_steps[rows] * (arguments.rounds + 1), has_log_probs=has_log_probs
            )
            for rows in arguments.rows
        ]
        rounds: list[list[dict[str, float]]] = [[] for _ in engines]
        for index in range(arguments.rounds + 1):
            for engine, own in zip(engines, rounds, strict=True):
                result = engine.run(num_steps[engine.num_rows])
                if index:  # the first warms up
                    own.append(result)
        for engine, own in zip(engines, rounds, strict=True):
            medians = {part: statistics.median(one[part] for one in own) for part in PARTS}
            medians["total"] = statistics.median(sum(one.values()) for one in own)
            cases.append({"num_rows": engine.num_rows, "has_log_probs": has_log_probs, **medians})
        del engines
        gc.collect()
    return {
        "machine": describe(InferenceConfig(num_threads=1)),
        "cases": cases,
        "reports": measure_reports(arguments.report_rows, arguments.report_steps),
    }


class ReportingEngine:
    """An EngineAgent, as in a fleet, of an engine without a model. All rows decode."""

    def __init__(
        self, num_rows: int, num_steps: int, *, streams: bool, has_log_probs: bool
    ) -> None:
        config = InferenceConfig(
            device="cpu",
            num_threads=1,
            max_requests=num_rows,
            max_sequence_length=-(-(PROMPT_LEN + num_steps + SLACK) // 256) * 256,
        )
        self._watch = Stopwatch()
        engine = engine_without_model(config)
        self._watch.watch(engine, "step", "rest")
        self._agent = EngineAgent(
            engine,
            engine_id=bytes(16),
            block_size_tokens=engine.block_size_tokens,
            max_requests=num_rows,
            settings={},
            fetch=lambda source: {},
        )
        self._agent.handle(_ENTRY)
        params = SamplingParams(
            num_tokens_to_generate=num_steps + SLACK,
            ignore_eos=True,
            return_log_probs=has_log_probs,
            streaming=streams,
            streaming_interval=1,
        )
        prompt_tokens = np.zeros(PROMPT_LEN, dtype=np.int32)
        for row in range(num_rows):
            sample = Sample(request_id=row, sampling_params=pack_params(params), seed=row)
            self._agent.handle(AssignRequest(samples=(sample,), prompt_tokens=prompt_tokens))
        while engine.stats().num_running < num_rows:
            self._agent.step()

    def run(self, num_steps: int) -> list[float]:
        """Run steps, and return the agent's CPU microseconds in each, without the engine's."""
        taken = []
        for _ in range(num_steps):
            self._watch.take()
            start = time.thread_time_ns()
            frames = [encode(message) for message in self._agent.step()]
            nanoseconds = time.thread_time_ns() - start
            del frames
            taken.append((nanoseconds - self._watch.take()["rest"]) / 1e3)
        return taken


def measure_reports(num_rows: int, num_steps: int) -> list[dict[str, Any]]:
    """Return median, 99th percentile and maximum of the microseconds per step, for each case."""
    cases = []
    for streams in (False, True):
        for has_log_probs in (False, True):
            engine = ReportingEngine(
                num_rows, 2 * num_steps, streams=streams, has_log_probs=has_log_probs
            )
            engine.run(num_steps)
            taken = sorted(engine.run(num_steps))
            cases.append(
                {
                    "num_rows": num_rows,
                    "streams": streams,
                    "has_log_probs": has_log_probs,
                    "median": statistics.median(taken),
                    "p99": taken[int(len(taken) * 0.99)],
                    "longest": taken[-1],
                }
            )
            del engine
            gc.collect()
    return cases


def as_text(results: dict[str, Any]) -> str:
    """Return two tables with a row per case: parts of a step, and reports."""
    machine = results["machine"]
    columns: tuple[str, ...] = ("rows", "log-probs", *PARTS, "total")
    lines = [
        f"{machine['cpu']}, one thread, Python {machine['python']}: us a row of a decode step",
        "".join(f"{column:>11}" for column in columns),
    ]
    for case in results["cases"]:
        named = f"{case['num_rows']:>11}{'yes' if case['has_log_probs'] else 'no':>11}"
        lines.append(named + "".join(f"{case[column]:>11.2f}" for column in columns[2:]))
    columns = ("rows", "streams", "log-probs", "median", "p99", "longest")
    lines += ["us a step for reports to the coordinator", "".join(f"{c:>11}" for c in columns)]
    for case in results["reports"]:
        flags = (case["streams"], case["has_log_probs"])
        named = f"{case['num_rows']:>11}" + "".join(f"{'yes' if f else 'no':>11}" for f in flags)
        lines.append(named + "".join(f"{case[column]:>11.1f}" for column in columns[3:]))
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=at_least_one, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--small", action="store_true", help="few rows and rounds")
    arguments = parser.parse_args(argv)
    arguments.row_steps, arguments.report_rows, arguments.report_steps = 20_000, 256, 400
    if arguments.small:
        arguments.report_rows, arguments.report_steps = 8, 20
        arguments.rounds, arguments.rows, arguments.row_steps = 1, [1, 8], 32
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the tables, and return the results."""
    results = measure(parse_arguments(argv))
    print(as_text(results))
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
