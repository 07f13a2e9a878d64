"""Every part of the GPU benchmark runs on the CPU with a tiny model, and its figures add up."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_engines import Bench, Floors, pool_config, random_engine
from benchmarks.gpu_measures import DecodeSizes, decode_window, measure_cycles
from benchmarks.gpu_parts import Deadline, run_parts
from benchmarks.gpu_shapes import (
    PLAN,
    REHEARSAL,
    kv_bytes_per_token,
    prefill_flops,
    weight_bytes,
    weight_bytes_per_step,
)
from rollout import DynamicInferenceEngine
from tests.inspected_engine import changed_backends, running_ahead

TINY = REHEARSAL.shapes["0.6B"]
NAMES = {
    "8B": [
        "floors",
        "decode 8B, 3 rows",
        "decode 8B, 1 row",
        "prefill 8B",
        "suspend 8B, 2 rows",
        "update 8B",
        "suspend 8B, weights",
    ],
    "0.6B": [
        "warm-up 0.6B",
        "decode 0.6B, 3 rows",
        "decode 0.6B, 1 row",
        "prefill 0.6B",
        "update 0.6B",
        "suspend 0.6B, weights",
        "host 2 rows",
    ],
    "peers": ["layer 2 rows", "generate 0.6B, 2 rows"],
}


def parts_measured_here() -> list[dict[str, Any]]:
    """The outcomes of all groups, one after the other, in this process."""
    outcomes: list[dict[str, Any]] = []
    bench = Bench(REHEARSAL)
    for parts in gpu.groups_of(bench).values():
        run_parts(
            parts,
            Deadline.after(600.0),
            report=lambda report: (
                outcomes.append(asdict(report[1])) if report[0] == "end" else None
            ),
            recover=bench.recover,
        )
    return outcomes


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    machine = Bench(REHEARSAL).device.describe()
    return {"date": "2026-11-27", "machine": machine, "parts": parts_measured_here()}


@pytest.fixture(scope="module")
def figures(results: dict[str, Any]) -> dict[str, Any]:
    return {part["name"]: part["figures"] for part in results["parts"]}


@pytest.mark.slow
def test_every_part_is_measured_in_order(results: dict[str, Any]) -> None:
    parts = results["parts"]
    assert [part["error"] for part in parts] == [None] * len(parts)
    assert [part["name"] for part in parts] == [name for group in NAMES.values() for name in group]
    assert {part["status"] for part in parts} == {"measured"}
    assert {part["kind"] for part in parts} == set(gpu.COLUMNS)


def test_rehearsal_has_the_groups_and_the_kinds_of_parts_of_the_plan() -> None:
    rehearsed, planned = (gpu.groups_of(Bench(plan)) for plan in (REHEARSAL, PLAN))
    assert list(rehearsed) == list(planned) == list(NAMES)
    for group in NAMES:
        kinds = [list(dict.fromkeys(p.kind for p in g[group])) for g in (rehearsed, planned)]
        assert kinds[0] == kinds[1]
    assert all(part.needs_s > 0 for parts in planned.values() for part in parts)


@pytest.mark.slow
def test_page_has_a_row_for_every_part_and_fits_the_end_of_a_log(results: dict[str, Any]) -> None:
    page = gpu.as_markdown(results)
    for part in results["parts"]:
        row = part["name"].removeprefix(part["kind"]).strip()
        assert f"| {row} |" in page
    assert "16 of 16 parts measured" in page
    assert platform.node() not in page + json.dumps(results)
    # The plan has a row more of each decode, and one more of the host and of the layer.
    longest = max(len(line) for line in page.splitlines() if line.startswith("| "))
    assert len(page) + 4 * longest < 4000


def test_what_was_not_measured_is_told_with_its_reason_and_without_figures() -> None:
    error = "RuntimeError: " + "no luck, " * 100 + "(gpu_measures.py:1 here)"
    part = {"name": "decode 8B", "kind": "decode", "status": "failed", "figures": None}
    results = {"date": "2026-11-27", "machine": {}, "parts": [part | {"error": error}]}
    page = gpu.as_markdown(results)
    assert "0 of 1 parts measured" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| decode 8B | failed |"))
    assert "RuntimeError: no luck" in row
    assert "gpu_measures.py:1 here" in row
    assert len(row) < 300


@pytest.mark.slow
def test_speeds_and_shares_follow_from_the_seconds(figures: dict[str, Any]) -> None:
    floors = figures["floors"]
    memory = max(floors["device_read_bytes_per_s"], 2 * floors["device_copy_bytes_per_s"])
    assert floors["memory_bytes_per_s"] == memory
    for name, batch in (("decode 8B, 3 rows", 3), ("decode 0.6B, 1 row", 1)):
        f = figures[name]
        assert f["tokens_per_s"] == pytest.approx(batch / f["step_s"])
        spec = REHEARSAL.shapes[name.split()[1].strip(",")]
        assert f["weight_bytes_per_step"] == weight_bytes_per_step(spec)
        num_bytes = f["weight_bytes_per_step"] + f["kv_bytes_per_step"]
        assert f["floor_s"] == pytest.approx(num_bytes / memory)
        assert f["share_of_floor"] == pytest.approx(f["floor_s"] / f["step_s"])
    f = figures["prefill 0.6B"]
    assert f["tokens_per_s"] == pytest.approx(120 / f["seconds"])
    assert f["flops"] == prefill_flops(TINY, 40, 3)
    expected = f["flops"] / floors["matmul_flops_per_s"] / f["seconds"]
    assert f["share_of_floor"] == pytest.approx(expected)


@pytest.mark.slow
def test_context_of_a_decode_step_is_prompt_and_what_was_generated(
    figures: dict[str, Any],
) -> None:
    f = figures["decode 0.6B, 3 rows"]
    # one token of the prefill's step, two warm-up steps, and 0 to 3 of the measured ones
    assert f["mean_context"] == f["prompt_len"] + 1 + 2 + 1.5
    assert f["kv_bytes_per_step"] == 3 * f["mean_context"] * kv_bytes_per_token(TINY)


@pytest.mark.slow
def test_suspend_moves_the_kv_of_the_rows_or_the_weights(figures: dict[str, Any]) -> None:
    floors = figures["floors"]
    large = REHEARSAL.shapes["8B"]
    rows, weights = figures["suspend 8B, 2 rows"], figures["suspend 8B, weights"]
    assert rows["num_bytes"] == 2 * kv_bytes_per_token(large) * 256
    assert weights["num_bytes"] >= weight_bytes(large)
    for f in (rows, weights):
        assert f["suspend_over_copy"] == pytest.approx(
            f["suspend_s"] / (f["num_bytes"] / floors["to_host_bytes_per_s"])
        )
        assert f["resume_over_copy"] == pytest.approx(
            f["resume_s"] / (f["num_bytes"] / floors["to_device_bytes_per_s"])
        )
        assert f["has_same_addresses"]
        assert f["num_graph_captures"] == 0
        slow, quick = sorted(cycle["suspend_s"] for cycle in f["later"])
        assert f["suspend_s"] == pytest.approx((slow + quick) / 2), "the first one is apart"


@pytest.mark.slow
def test_update_is_of_all_weights_and_its_stall_is_beside_a_copy(figures: dict[str, Any]) -> None:
    for shape, spec in REHEARSAL.shapes.items():
        f = figures[f"update {shape}"]
        assert f["num_bytes"] == weight_bytes(spec)
        assert f["stall_over_copy"] == pytest.approx(f["stall_s"] / f["copy_s"])
        assert min(f["first_stage_s"], f["stage_s"], f["first_stall_s"]) > 0


@pytest.mark.slow
def test_peers_are_beside_ours(figures: dict[str, Any]) -> None:
    f = figures["generate 0.6B, 2 rows"]
    seconds = f["seconds"]
    assert f["ratio"] == pytest.approx(seconds["transformers generate"] / seconds["rollout"])
    assert f["tokens_per_s"]["rollout"] == pytest.approx(2 * 3 / seconds["rollout"])
    f = figures["layer 2 rows"]
    assert f["kv_bytes"] == 2 * 256 * kv_bytes_per_token(TINY) // TINY.num_layers
    assert f["ratio"] == pytest.approx(f["seconds"]["torch SDPA"] / f["seconds"]["rollout"])


@pytest.mark.slow
def test_host_share_is_of_one_step(figures: dict[str, Any]) -> None:
    f = figures["host 2 rows"]
    assert f["num_steps"] == 5
    assert f["wall_s_per_step"] > 0
    assert f["cpu_s_per_step"] > 0


@pytest.mark.slow
def test_window_and_cycles_hold_where_the_engine_runs_ahead() -> None:
    """One step ahead, as on a GPU."""
    bench = Bench(REHEARSAL, Floors.of(dict.fromkeys(Floors.__dataclass_fields__, 1e9)))
    with changed_backends(running_ahead):
        engine = bench.engine("0.6B", TINY, REHEARSAL.pool)
    sizes = DecodeSizes(batch=3, context_len=256, num_warm_up=2, num_steps=4)
    window = decode_window(bench.device, engine, TINY, sizes)
    assert window.kv_tokens == 4 * 3 * (sizes.prompt_len + 1 + 2 + 1.5)
    for owner in ("kv_cache", "weights"):
        assert measure_cycles(bench, "0.6B", owner)["has_same_addresses"]
    assert not engine.has_unfinished_requests()


def test_engines_close_one_another_and_a_failed_one_is_dropped() -> None:
    bench = Bench(REHEARSAL)
    first = bench.engine("first", TINY, REHEARSAL.pool)
    assert bench.engine("first", TINY, REHEARSAL.pool) is first
    second = bench.engine("second", TINY, REHEARSAL.pool)
    assert first.memory_status().resident_bytes == {"kv_cache": 0, "weights": 0}
    second.shutdown()
    bench.recover()
    assert bench.engine("second", TINY, REHEARSAL.pool) is not second


def test_random_weights_reach_the_engine_by_their_names() -> None:
    config = pool_config(TINY, REHEARSAL.pool, "cpu")
    engines: list[DynamicInferenceEngine] = [random_engine(TINY, config, "cpu") for _ in range(2)]
    assert len({engine.weights_checksum() for engine in engines}) == 1
    weights = engines[0].build.model.read_weights()
    assert all(weights[name].eq(1).all() for name in weights if name.endswith("norm.weight"))
    matrices = torch.cat([w.flatten() for w in weights.values() if w.dim() > 1])
    assert float(matrices.std()) == pytest.approx(0.02, rel=0.05)


def test_a_run_is_written_after_every_part_by_processes_that_know_the_floors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real run of two parts in two processes."""
    groups = gpu.groups_of

    def few(bench: Bench) -> dict[str, list[Any]]:
        found = groups(bench)
        return {"8B": found["8B"][:1], "peers": found["peers"][:1]}

    monkeypatch.setattr(gpu, "groups_of", few)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["--rehearse"]) == 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    floors, layer = written["parts"]
    assert written["machine"]["device"] == "cpu"
    memory = floors["figures"]["memory_bytes_per_s"]
    assert layer["figures"]["floor_s"] == pytest.approx(layer["figures"]["kv_bytes"] / memory)
    page = (tmp_path / "gpu.md").read_text()
    assert page == gpu.as_markdown(written)
    assert capfd.readouterr().out == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


def test_failed_floors_leave_speeds_without_shares() -> None:
    bench = Bench(replace(REHEARSAL, num_cycles=2))
    decode = next(p for p in gpu.groups_of(bench)["0.6B"] if p.kind == "decode").measure()
    assert decode["share_of_floor"] is None
    assert decode["tokens_per_s"] > 0
    suspend = measure_cycles(bench, "0.6B", "weights")
    assert suspend["suspend_over_copy"] is None
    parts = [
        {"name": f"{kind} x", "kind": kind, "status": "measured", "figures": f, "error": None}
        for kind, f in (("decode", decode), ("suspend", suspend))
    ]
    page = gpu.as_markdown({"date": "2026-11-27", "machine": {}, "parts": parts})
    assert "| -, - |" in page


def test_without_a_device_it_says_so_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("sees no CUDA device")


def test_files_are_named_after_day_and_device_or_lie_in_out() -> None:
    name = gpu.page_path("2026-11-21", "NVIDIA H100 80GB HBM3", None).name
    assert name == "2026-11-21-gpu-nvidia-h100-80gb-hbm3.md"
    assert gpu.page_path("2026-11-21", "any", "/somewhere") == Path("/somewhere/gpu.md")
