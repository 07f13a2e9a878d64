"""Suspend, resume and weight updates on the device, each beside the bare copy of the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_engines import DecodingRows, random_model
from benchmarks.gpu_floors import Floors
from benchmarks.gpu_steps import num_graph_captures
from rollout import DynamicInferenceEngine
from rollout.models.spec import ModelSpec
from rollout.runner.weight_update import WeightUpdateReport

STEPS_AFTER = 3  # that show whether graphs are captured anew
TOKENS_PER_CYCLE = 32  # an upper bound of what a row generates in one cycle


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleSizes:
    """What is given up, and how many rows hold KV meanwhile. The first cycle also allocates host
    memory; the figures are medians of the others.
    """

    mode: str
    release: tuple[str, ...]
    num_rows: int
    context_len: int
    num_cycles: int

    @property
    def num_new(self) -> int:
        return self.num_cycles * TOKENS_PER_CYCLE + TOKENS_PER_CYCLE


def measure_cycles(
    device: MeasuredDevice,
    engine: DynamicInferenceEngine,
    spec: ModelSpec,
    floors: Floors | None,
    sizes: CycleSizes,
) -> dict[str, Any]:
    """Cycles of suspend, resume and the next token of every row."""
    rows = DecodingRows(
        engine=engine,
        spec=spec,
        num_rows=sizes.num_rows,
        prompt_len=sizes.context_len - sizes.num_new,
    )
    rows.start(sizes.num_new)
    rows.settle()
    cycles = [_cycle(device, rows, sizes) for _ in range(sizes.num_cycles)]
    rows.end()
    warm = cycles[1:] or cycles
    medians = {
        name: statistics.median(cycle[name] for cycle in warm)
        for name in ("suspend_s", "resume_s", "next_token_s")
    }
    return {
        "mode": sizes.mode,
        "release": list(sizes.release),
        "num_rows": sizes.num_rows,
        **medians,
        **_beside_floors(medians, warm[-1]["bytes_on_host"], floors),
        **{name: value for name, value in warm[-1].items() if name not in medians},
        "cycles": cycles,
    }


def _beside_floors(
    medians: Mapping[str, float], live_bytes: int, floors: Floors | None
) -> dict[str, float | None]:
    """A mode that copies nothing has no floor."""
    if floors is None or not live_bytes:
        return dict.fromkeys(
            ("suspend_floor_s", "suspend_share_of_floor", "resume_floor_s", "resume_share_of_floor")
        )
    down, up = live_bytes / floors.to_host_bytes_per_s, live_bytes / floors.to_device_bytes_per_s
    return {
        "suspend_floor_s": down,
        "suspend_share_of_floor": down / medians["suspend_s"],
        "resume_floor_s": up,
        "resume_share_of_floor": up / medians["resume_s"],
    }


def _cycle(device: MeasuredDevice, rows: DecodingRows, sizes: CycleSizes) -> dict[str, Any]:
    engine = rows.engine
    captures, addresses = num_graph_captures(engine), engine.kv_data_ptrs()
    engine.pause()
    device.wait()
    free_before = device.free_bytes()
    suspend_s, given = device.timed(lambda: engine.suspend(sizes.mode, sizes.release))
    free_between = device.free_bytes()
    resume_s, restored = device.timed(engine.resume)
    free_after = device.free_bytes()
    engine.unpause()
    next_token_s = device.seconds(lambda: _serve_every_row(rows))
    for _ in range(STEPS_AFTER):
        engine.step()
    rows.settle()
    captures_after = num_graph_captures(engine)
    return {
        "suspend_s": suspend_s,
        "resume_s": resume_s,
        "next_token_s": next_token_s,
        "bytes_on_host": given.bytes_on_host,
        "bytes_released": given.bytes_released,
        "driver_bytes_back": _difference(free_between, free_before),
        "driver_bytes_taken": _difference(free_between, free_after),
        "num_requests_recomputed": restored.num_requests_recomputed,
        "graphs_recaptured": restored.graphs_recaptured,
        "num_graph_captures": _difference(captures_after, captures),
        "has_same_addresses": engine.kv_data_ptrs() == addresses,
    }


def _serve_every_row(rows: DecodingRows) -> None:
    """Step until every row has a token more; prompts to recompute come first."""
    rows.engine.step()
    while rows.engine.stats().num_waiting:
        rows.engine.step()
    rows.settle()


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _update_once(
    device: MeasuredDevice, engine: DynamicInferenceEngine, source: Mapping[str, Tensor]
) -> tuple[float, float, WeightUpdateReport]:
    """Seconds of staging and of the commit. What was staged, a backup too, is gone afterwards."""
    stage_s, staged = device.timed(lambda: engine.stage_weights(source))
    commit_s, report = device.timed(lambda: engine.commit_weights(staged, in_flight=True))
    return stage_s, commit_s, report


@torch.no_grad()
def measure_update(
    device: MeasuredDevice, engine: DynamicInferenceEngine, spec: ModelSpec, num_updates: int
) -> dict[str, Any]:
    """Stage and commit of a trainer's tensors on the same device, medians without the first one,
    beside copies of these tensors into others there.
    """
    source = random_model(spec, device.name, seed=1).read_weights()
    stages, commits = [], []
    for _ in range(num_updates + 1):
        stage_s, commit_s, report = _update_once(device, engine, source)
        stages.append(stage_s)
        commits.append(commit_s)
    unique = {tensor.data_ptr(): tensor for tensor in source.values()}
    targets = [torch.empty_like(tensor) for tensor in unique.values()]

    def copy() -> None:
        for target, tensor in zip(targets, unique.values(), strict=True):
            target.copy_(tensor)

    floor_s = device.seconds_per_call(copy, num_updates)
    stage_s, commit_s = statistics.median(stages[1:]), statistics.median(commits[1:])
    return {
        "num_bytes": report.num_bytes,
        "stage_s": stage_s,
        "commit_s": commit_s,
        "bytes_per_s": report.num_bytes / (stage_s + commit_s),
        "commit_bytes_per_s": report.num_bytes / commit_s,
        "floor_s": floor_s,
        "floor_bytes_per_s": report.num_bytes / floor_s,
        "share_of_floor": floor_s / (stage_s + commit_s),
        "commit_share_of_floor": floor_s / commit_s,
    }
