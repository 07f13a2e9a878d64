"""Measure suspends, resumes and weight updates, and bare copies of the same bytes.

Used by `benchmarks.suspend_resume`. Each time is compared with a floor:
- suspend with OFFLOAD: one memcpy into resident pages, and one madvise that frees the pool;
- resume with OFFLOAD: one memcpy into freed pages;
- RECOMPUTE: a prefill of the same tokens in new requests;
- update: one copy of the weights.

`draw` writes a plot.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import status_bytes
from benchmarks.pages import table_row
from benchmarks.update_gaps import gaps_as_markdown
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.backends.cpu.mapping import map_bytes
from rollout.blocks.kv_cache_manager import BlockTable
from rollout.models import CausalLM
from rollout.models.spec import ModelSpec
from rollout.scheduling.scheduler import Scheduler
from rollout.worker.executor import WorkerExecutor

_HEAD = (
    "| mode | kind | live | moved, MiB | suspend, ms (CPU) | over floor | resume, ms (CPU) "
    "| over floor | suspend over its memcpy alone |"
)


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page: a table of suspends and resumes, then the other figures."""
    machine, persist, update = results["machine"], results["persist"], results["update"]
    growth = results["persist_growth"]
    recompute = results["recompute"]
    lines = [
        f"# Suspend, resume and updates, {results['date']}",
        "",
        f"{machine['cpu']}, one thread, torch {machine['torch']}; a pool of {results['pool_mib']} "
        f"MiB, median of {results['repeats']} interleaved rounds. The floor of a suspend is a "
        "memcpy of the same bytes into pages that are there and a bare madvise over the pool, of a "
        "resume a memcpy into pages just released.",
        "",
        _HEAD,
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results["cycles"]:
        cells = [
            row["mode"],
            row["memory_kind"],
            f"{row['live_fraction']:.0%}",
            f"{row['bytes_moved'] / 2**20:.1f}",
            f"{row['suspend_seconds'] * 1e3:.2f} ({row['suspend_cpu_seconds'] * 1e3:.2f})",
            f"{row['suspend_over_floor']:.2f}" if "suspend_over_floor" in row else "",
            f"{row['resume_seconds'] * 1e3:.2f} ({row['resume_cpu_seconds'] * 1e3:.2f})",
            f"{row['resume_over_floor']:.2f}" if "resume_over_floor" in row else "",
            f"{row['suspend_over_memcpy']:.2f}" if "suspend_over_memcpy" in row else "",
        ]
        lines.append(table_row(cells))
    lines += [
        "",
        f"PERSIST, suspend plus resume: {persist['cpu_seconds'] * 1e3:.3f} ms of CPU time "
        f"(median of {persist['repeats']}). Over {growth['repeats']} cycles that each serve the "
        f"same small load, resident memory goes from {growth['first_mib']:.0f} to "
        f"{growth['last_mib']:.0f} MiB: {100 * growth['growth']:+.1f}%.",
        "",
        f"RECOMPUTE, from resume to the next token of requests with {recompute['num_tokens']} "
        f"tokens in all: {recompute['cpu_seconds'] * 1e3:.0f} ms of CPU time; prefill of as many "
        f"new tokens {recompute['prefill_cpu_seconds'] * 1e3:.0f} ms, ratio "
        f"{recompute['over_floor']:.2f} (median of {recompute['repeats']}).",
        "",
        f"In-flight update of {update['num_bytes'] / 2**20:.0f} MiB: stall "
        f"{update['stall_seconds'] * 1e3:.1f} ms, one copy of the weights "
        f"{update['floor_seconds'] * 1e3:.1f} ms, ratio {update['over_floor']:.2f}; staging and "
        f"stall together {update['seconds'] * 1e3:.0f} ms.",
        "",
        *gaps_as_markdown(results["update_gaps"]),
    ]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a plot to `path`: CPU time by used share of the pool, with the floors of OFFLOAD."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, name in zip(axes, ("suspend", "resume"), strict=True):
        for mode in ("persist", "offload", "recompute"):
            shown = (mode, "reserved")
            rows = [r for r in results["cycles"] if (r["mode"], r["memory_kind"]) == shown]
            live = [100 * row["live_fraction"] for row in rows]
            axis.plot(live, [1e3 * r[f"{name}_cpu_seconds"] for r in rows], "o-", label=mode)
            if mode == "offload":
                floors = [1e3 * row[f"{name}_floor_cpu_seconds"] for row in rows]
                axis.plot(live, floors, "k--", label="floor of offload")
        axis.set(title=name, xlabel="live part of the pool, %", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU time, ms")
    axes[0].legend()
    figure.suptitle(f"Pool of {results['pool_mib']} MiB, memory_kind reserved, one thread")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


BLOCK_SIZE = 16
MIB = 1 << 20
# Read before each cycle and each floor. Else the first one after the pool was filled would also pay
# for writing back the processor's caches.
_CACHE_BYTES = 128 * MIB
_PARAMS = SamplingParams(num_tokens_to_generate=4, ignore_eos=True, seed=0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A row of the table: a KV mode, a memory kind, and the used share of the KV pool."""

    mode: str
    memory_kind: str
    live_fraction: float


@dataclass(slots=True)
class Timing:
    """Wall and CPU seconds."""

    wall: float
    cpu: float


def timed(work: Callable[[], Any]) -> tuple[Timing, Any]:
    """Return the time of `work`, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu), result


class OpenEngine(DynamicInferenceEngine):
    """An engine with its scheduler and KV cache as attributes."""

    def __init__(self, *, scheduler: Scheduler, executor: WorkerExecutor, **parts: Any) -> None:
        super().__init__(scheduler=scheduler, executor=executor, **parts)
        self.scheduler, self.kv = scheduler, executor.kv


class Cycles:
    """Suspends and resumes of an engine, each with a given share of its KV pool in use."""

    # Blocks are allocated and filled directly: prefilling them would take hours, and the content
    # of the bytes does not change their copies.
    def __init__(self, spec: ModelSpec, *, pool_mib: int, memory_kind: str) -> None:
        config = InferenceConfig(
            num_threads=1,
            block_size_tokens=BLOCK_SIZE,
            max_sequence_length=spec.max_position_embeddings,
            buffer_size_gb=pool_mib / 1024 * 1.01,
            memory_kind=memory_kind,
        )
        engine = OpenEngine.from_model(CausalLM.random(spec), config)
        assert isinstance(engine, OpenEngine)
        self._engine, self._kv = engine, engine.kv
        self._blocks = engine.scheduler.kv_cache_manager
        self._source = map_bytes("source", self._kv.num_bytes)
        self._warm = map_bytes("warm", self._kv.num_bytes).tensor.fill_(1)
        self._source.tensor.fill_(2)
        self._foreign = torch.ones(_CACHE_BYTES, dtype=torch.uint8)
        self._samples: dict[Scenario, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def play_round(self, scenarios: list[Scenario]) -> None:
        """Run a suspend and a resume for each scenario.

        With OFFLOAD, also times bare copies of the same bytes, for the floors.
        """
        for scenario in scenarios:
            self._play(scenario)

    def _play(self, scenario: Scenario) -> None:
        for layer in self._kv.layers:
            layer.fill_(1.0)
        del layer
        table = BlockTable()
        num_live = math.ceil(self._kv.num_blocks * scenario.live_fraction)
        self._blocks.allocate(table, 0, num_live * BLOCK_SIZE)
        num_bytes = num_live * self._kv.bytes_per_block
        engine, samples = self._engine, self._samples[scenario]
        gc.collect()
        engine.pause()
        if scenario.mode == "offload":
            self._foreign.max()
            warm, live = self._warm[:num_bytes], self._last_bytes(num_bytes)
            memcpy, _ = timed(lambda: warm.copy_(live))
            del live
        self._foreign.max()
        suspend, given = timed(lambda: engine.suspend(scenario.mode))
        resume, restored = timed(engine.resume)
        engine.unpause()
        self._blocks.free(table)
        if scenario.mode == "offload":
            source = self._source.tensor[-num_bytes:]  # as many pages as the live blocks lie on
            freed, _ = timed(lambda: self._source.free_pages(0, self._source.tensor.numel()))
            total = Timing(memcpy.wall + freed.wall, memcpy.cpu + freed.cpu)
            samples["memcpy"].append(memcpy)
            samples["suspend_floor"].append(total)
            floor, _ = timed(lambda: source.copy_(warm))
            samples["resume_floor"].append(floor)
            self._source.tensor.fill_(2)
        samples["suspend"].append(suspend)
        samples["resume"].append(resume)
        samples["bytes"].append((given, restored, num_live))

    def _last_bytes(self, num_bytes: int) -> torch.Tensor:
        """Return the last `num_bytes` of the KV pool."""
        layer = self._kv.layers[0]
        pool = torch.empty(0, dtype=torch.uint8).set_(layer.untyped_storage())
        start = layer.storage_offset() * layer.element_size()
        return pool[start : start + self._kv.num_bytes][-num_bytes:]

    def result(self, scenario: Scenario) -> dict[str, Any]:
        """Return the medians of a scenario's rounds. Ratios are taken within a round."""
        samples = self._samples[scenario]
        given, restored, num_live = samples["bytes"][-1]
        row: dict[str, Any] = asdict(scenario) | {
            "pool_bytes": self._kv.num_bytes,
            "live_blocks": num_live,
            "bytes_released": given.bytes_released,
            "bytes_moved": given.bytes_on_host,
            "bytes_restored": restored.bytes_restored,
        }
        for name in ("suspend", "resume"):
            row[f"{name}_seconds"] = statistics.median(t.wall for t in samples[name])
            row[f"{name}_cpu_seconds"] = statistics.median(t.cpu for t in samples[name])
            if floors := samples[f"{name}_floor"]:
                row[f"{name}_floor_cpu_seconds"] = statistics.median(t.cpu for t in floors)
                row[f"{name}_over_floor"] = _over(samples[name], floors)
        if floors := samples["memcpy"]:
            row["suspend_over_memcpy"] = _over(samples["suspend"], floors)
        return row


def _over(timings: list[Timing], floors: list[Timing]) -> float:
    """Return the median ratio of CPU times to floors, round by round."""
    return statistics.median(t.cpu / f.cpu for t, f in zip(timings, floors, strict=True))


def _running_engine(spec: ModelSpec) -> DynamicInferenceEngine:
    """Return an engine with one decoding request."""
    config = InferenceConfig(num_threads=1, max_sequence_length=256, buffer_size_gb=0.25)
    engine = DynamicInferenceEngine.from_model(CausalLM.random(spec), config)
    engine.add_request(list(range(1, 33)), SamplingParams(num_tokens_to_generate=200, seed=1))
    engine.step()
    return engine


def measure_persist(spec: ModelSpec, num_repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of suspend plus resume with PERSIST, with one decoding
    request."""
    engine = _running_engine(spec)
    engine.pause()
    timings = [
        timed(lambda: (engine.suspend("persist"), engine.resume()))[0] for _ in range(num_repeats)
    ]
    return {"cpu_seconds": statistics.median(t.cpu for t in timings), "repeats": num_repeats}


def measure_persist_growth(spec: ModelSpec, num_cycles: int) -> dict[str, float]:
    """Return resident MiB after the first and the last of `num_cycles` with PERSIST.

    Each cycle serves 8 short requests.
    """
    config = InferenceConfig(num_threads=1, max_sequence_length=256, buffer_size_gb=1.0)
    engine = DynamicInferenceEngine.from_model(CausalLM.random(spec), config)
    prompts = random.Random(0)
    resident = []
    for _ in range(num_cycles):
        for _ in range(8):
            prompt = [prompts.randrange(1, spec.vocab_size) for _ in range(128)]
            engine.add_request(prompt, _PARAMS)
        while engine.has_unfinished_requests():
            engine.step()
        engine.pause()
        engine.suspend("persist")
        engine.resume()
        engine.unpause()
        resident.append(status_bytes("VmRSS"))
    return {
        "first_mib": resident[0] / 2**20,
        "last_mib": resident[-1] / 2**20,
        "growth": resident[-1] / resident[0] - 1,
        "repeats": num_cycles,
    }


def measure_recompute(spec: ModelSpec, num_repeats: int) -> dict[str, float]:
    """Return CPU seconds from a RECOMPUTE resume to the next tokens of 8 requests.

    Also returns the CPU seconds of the requests' first prefill, and the ratio.
    """
    config = InferenceConfig(num_threads=1, max_sequence_length=256, buffer_size_gb=0.25)
    engine = DynamicInferenceEngine.from_model(CausalLM.random(spec), config)
    prompts = random.Random(0)

    def serve(until: int) -> None:
        """Step until every request has `until` generated tokens."""
        while any(len(engine.get_record(rid).merge().generated_tokens) < until for rid in ids):
            engine.step()

    prefills, owed = [], []
    for _ in range(num_repeats):
        ids = [
            engine.add_request([prompts.randrange(1, spec.vocab_size) for _ in range(128)], _PARAMS)
            for _ in range(8)
        ]
        prefills.append(timed(lambda: serve(1))[0])
        engine.pause()
        engine.suspend("recompute")
        engine.resume()
        engine.unpause()
        owed.append(timed(lambda: serve(2))[0])
        while engine.has_unfinished_requests():
            engine.step()
    return {
        "num_tokens": 8 * 128,
        "prefill_cpu_seconds": statistics.median(t.cpu for t in prefills),
        "cpu_seconds": statistics.median(t.cpu for t in owed),
        "over_floor": _over(owed, prefills),
        "repeats": num_repeats,
    }


def measure_update(spec: ModelSpec, num_repeats: int) -> dict[str, float]:
    """Return the stall of an in-flight update, and the seconds of one copy of the weights."""
    engine = _running_engine(spec)
    source = CausalLM.random(spec, seed=1).read_weights()
    unique = {tensor.data_ptr(): tensor for tensor in source.values()}
    targets = [tensor.clone() for tensor in unique.values()]
    stalls, floors, totals, ratios = [], [], [], []
    with torch.no_grad():
        for _ in range(num_repeats + 1):
            staged = engine.stage_weights(source)
            engine.step()
            report = engine.commit_weights(staged, in_flight=True)
            floor, _ = timed(
                lambda: [t.copy_(s) for t, s in zip(targets, unique.values(), strict=True)]
            )
            stalls.append(report.stall_seconds)
            totals.append(report.seconds)
            floors.append(floor.wall)
            ratios.append(report.stall_seconds / floor.wall)
    return {
        "stall_seconds": statistics.median(stalls[1:]),
        "floor_seconds": statistics.median(floors[1:]),
        "seconds": statistics.median(totals[1:]),
        "over_floor": statistics.median(ratios[1:]),
        "num_bytes": report.num_bytes,
    }
