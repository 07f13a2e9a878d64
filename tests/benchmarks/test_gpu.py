"""Every part of the GPU benchmark runs on the CPU with a tiny model, and its figures add up."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import gpu
from benchmarks.gpu_attention import TurnSizes
from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_engines import pool_config, random_model
from benchmarks.gpu_floors import FloorSizes
from benchmarks.gpu_memory import CycleSizes, measure_cycles
from benchmarks.gpu_plan import FULL, Plan
from benchmarks.gpu_report import TITLES, as_markdown
from benchmarks.gpu_shapes import (
    NEAR_NOTHING,
    PoolShape,
    generation_bytes,
    kv_bytes_per_token,
    prefill_flops,
    weight_bytes,
    weight_bytes_per_step,
)
from benchmarks.gpu_steps import DecodeSizes, PrefillSizes, decode_window
from benchmarks.workloads import Workload
from rollout import DynamicInferenceEngine
from tests.inspected_engine import changed_backends, running_ahead

TINY = replace(NEAR_NOTHING, dtype=torch.float32)
UNTIED = replace(TINY, tie_word_embeddings=False)
POOL = PoolShape(num_rows=3, context_len=256)
PLAN = Plan(
    floors=FloorSizes(device_bytes=1 << 20, pinned_bytes=1 << 18, matrix_size=64, num_calls=2),
    shapes={"tiny": TINY, "untied": UNTIED},
    batches=(3, 1),
    pool=POOL,
    num_warm_up=2,
    num_steps=4,
    prefill=PrefillSizes(num_prompts=3, prompt_len=40),
    turns=(TurnSizes(batch=2, num_cached=300, num_new=5, num_calls=2),),
    update_shape="tiny",
    num_updates=2,
    suspend_shape="tiny",
    suspend_memory_kind="reserved",
    suspend_pool=POOL,
    num_cycles=2,
    host_spec=TINY,
    host_batches=(2,),
    host_pool=POOL,
    num_host_steps=5,
    contest_shape="tiny",
    has_small_workloads=True,
    num_contest_runs=2,
    num_peer_blocks=16,
    reserve_bytes=0,
    needs_s=dict.fromkeys(FULL.needs_s, 0.0),
)
NAMES = [
    "floors",
    "attention tiny, 5 tokens behind 300, batch 2",
    "decode tiny, batch 3",
    "decode tiny, batch 1",
    "prefill tiny",
    "update weights tiny",
    "decode untied, batch 3",
    "decode untied, batch 1",
    "prefill untied",
    "suspend tiny, persist kv cache",
    "suspend tiny, offload kv cache",
    "suspend tiny, recompute kv cache",
    "suspend tiny, offload kv cache and weights",
    "W2 tiny",
    "host share of a step, batch 2",
    "W1 tiny",
    "W3 tiny",
    "W4 tiny",
]


def run(plan: Plan, folder: Path, budget_s: float = 600.0) -> dict[str, Any]:
    console = Console(quiet=True)
    return gpu.measure(plan, MeasuredDevice("cpu"), budget_s, str(folder), console)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    run(PLAN, folder)
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return content


@pytest.fixture(scope="module")
def figures(written: dict[str, Any]) -> dict[str, Any]:
    return {part["name"]: part["figures"] for part in written["parts"]}


def test_every_part_is_measured_in_order(written: dict[str, Any]) -> None:
    assert [part["error"] for part in written["parts"]] == [None] * len(NAMES)
    assert [part["name"] for part in written["parts"]] == NAMES
    assert {part["status"] for part in written["parts"]} == {"measured"}
    assert {part["kind"] for part in written["parts"]} == set(TITLES)


def test_page_is_that_of_the_json_and_names_every_part(
    folder: Path, written: dict[str, Any]
) -> None:
    page = (folder / "gpu.md").read_text()
    assert page == as_markdown(written)
    for name in NAMES:
        assert page.count(f"| {name} |") == 2
    for title in TITLES.values():
        assert f"## {title}" in page
    assert platform.node() not in page + json.dumps(written)


def test_speeds_and_shares_follow_from_the_seconds(figures: dict[str, Any]) -> None:
    floors = figures["floors"]
    memory = max(floors["device_read_bytes_per_s"], 2 * floors["device_copy_bytes_per_s"])
    assert floors["memory_bytes_per_s"] == memory
    for name, batch in (("decode tiny, batch 3", 3), ("decode untied, batch 1", 1)):
        f = figures[name]
        assert f["tokens_per_s"] == pytest.approx(batch / f["step_s"])
        num_bytes = f["weight_bytes_per_step"] + f["kv_bytes_per_step"]
        assert f["floor_s"] == pytest.approx(num_bytes / memory)
        assert f["share_of_floor"] == pytest.approx(f["floor_s"] / f["step_s"])
    f = figures["attention tiny, 5 tokens behind 300, batch 2"]
    assert f["kv_bytes"] == 2 * 305 * kv_bytes_per_token(TINY) // TINY.num_layers
    assert f["flops"] == 4 * TINY.num_heads * TINY.head_dim * 2 * (5 * 300 + 15)
    products_s = f["flops"] / floors["matmul_flops_per_s"]
    longer = max(f["kv_bytes"] / memory, products_s)
    assert f["share_of_floor"] == pytest.approx(longer / f["attention_s"])
    f = figures["prefill tiny"]
    assert f["tokens_per_s"] == pytest.approx(120 / f["seconds"])
    assert f["flops"] == prefill_flops(TINY, 40, 3)
    expected = f["flops"] / floors["matmul_flops_per_s"] / f["seconds"]
    assert f["share_of_floor"] == pytest.approx(expected)


def test_context_of_a_decode_step_is_prompt_and_what_was_generated(
    figures: dict[str, Any],
) -> None:
    f = figures["decode tiny, batch 3"]
    # one token of the prefill's step, two warm-up steps, and 0 to 3 of the measured ones
    assert f["mean_context"] == f["prompt_len"] + 1 + 2 + 1.5
    assert f["kv_bytes_per_step"] == 3 * f["mean_context"] * kv_bytes_per_token(TINY)


def test_suspend_reports_what_its_mode_moves(figures: dict[str, Any]) -> None:
    floors = figures["floors"]
    persist = figures["suspend tiny, persist kv cache"]
    assert persist["bytes_released"] == persist["bytes_on_host"] == 0
    assert persist["suspend_share_of_floor"] is None
    offload = figures["suspend tiny, offload kv cache"]
    block = kv_bytes_per_token(TINY) * 256
    assert offload["bytes_on_host"] == 3 * block
    down_s = offload["bytes_on_host"] / floors["to_host_bytes_per_s"]
    up_s = offload["bytes_on_host"] / floors["to_device_bytes_per_s"]
    assert offload["suspend_share_of_floor"] == pytest.approx(down_s / offload["suspend_s"])
    assert offload["resume_share_of_floor"] == pytest.approx(up_s / offload["resume_s"])
    both = figures["suspend tiny, offload kv cache and weights"]
    assert both["bytes_on_host"] >= 3 * block + weight_bytes(TINY)
    recompute = figures["suspend tiny, recompute kv cache"]
    assert recompute["num_requests_recomputed"] == 3
    for f in (persist, offload, both, recompute):
        assert f["has_same_addresses"]
        assert len(f["cycles"]) == 2
        assert f["suspend_s"] == f["cycles"][1]["suspend_s"]  # the first one warms up
        assert f["driver_bytes_back"] is None


def test_update_is_of_all_weights(figures: dict[str, Any]) -> None:
    f = figures["update weights tiny"]
    assert f["num_bytes"] == weight_bytes(TINY)
    assert f["bytes_per_s"] == pytest.approx(f["num_bytes"] / (f["stage_s"] + f["commit_s"]))
    assert f["commit_share_of_floor"] == pytest.approx(f["floor_s"] / f["commit_s"])


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4"])
def test_ratio_is_to_the_best_run_of_the_best_peer(figures: dict[str, Any], name: str) -> None:
    f = figures[f"{name} tiny"]
    assert f["errors"] == {}
    assert set(f["seconds"]) == {
        "rollout",
        "transformers continuous batching",
        "transformers generate",
    }
    best = {who: min(runs) for who, runs in f["seconds"].items()}
    own = best.pop("rollout")
    assert f["ratio"] == pytest.approx(min(best.values()) / own)
    assert f["tokens_per_s"][f["best_peer"]] == pytest.approx(f["num_tokens"] / min(best.values()))
    assert f["share_of_floor"] == pytest.approx(f["floor_s"] / own)
    assert f["floor_s"] > 0


def test_decoding_reads_the_weights_once_a_step_and_each_context_once_a_token() -> None:
    workload = Workload(
        name="W",
        summary="",
        prompts=[[1] * 10, [2] * 5],
        output_lens=[3, 1],
        num_samples=2,
        wants_logprobs=False,
    )
    tokens_read = 2 * (11 + 12)  # the first new token comes with its prompt
    assert generation_bytes(TINY, workload) == (
        2 * weight_bytes_per_step(TINY) + tokens_read * kv_bytes_per_token(TINY)
    )


def test_host_share_is_of_one_step(figures: dict[str, Any]) -> None:
    f = figures["host share of a step, batch 2"]
    assert f["num_steps"] == 5
    assert 0 < f["wall_s_per_step"] < 1 > f["cpu_s_per_step"] > 0


@pytest.fixture
def ahead() -> DynamicInferenceEngine:
    """An engine that runs one step ahead, as on a GPU."""
    config = pool_config(TINY, POOL, "cpu", memory_kind="reserved")
    with changed_backends(running_ahead):
        return DynamicInferenceEngine.from_model(random_model(TINY, "cpu"), config)


def test_window_and_cycles_hold_where_the_engine_runs_ahead(ahead: DynamicInferenceEngine) -> None:
    device = MeasuredDevice("cpu")
    sizes = DecodeSizes(batch=3, context_len=256, num_warm_up=2, num_steps=4)
    window = decode_window(device, ahead, TINY, sizes)
    assert window.kv_tokens == 4 * 3 * (sizes.prompt_len + 1 + 2 + 1.5)
    for mode in ("offload", "recompute"):
        cycle = CycleSizes(
            mode=mode, release=("kv_cache",), num_rows=3, context_len=256, num_cycles=2
        )
        figures = measure_cycles(device, ahead, TINY, None, cycle)
        assert figures["has_same_addresses"]
        assert figures["num_requests_recomputed"] == (3 if mode == "recompute" else 0)
    assert not ahead.has_unfinished_requests()


def test_failed_floors_leave_speeds_without_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError("no pinned memory")

    monkeypatch.setattr("benchmarks.gpu_plan.measure_floors", fail)
    kinds = ("generation", "suspend", "update", "host")
    short = replace(PLAN, needs_s=PLAN.needs_s | dict.fromkeys(kinds, 1e9))
    parts = {p["name"]: p for p in run(short, tmp_path)["parts"]}
    assert parts["floors"]["status"] == "failed"
    assert parts["decode tiny, batch 3"]["figures"]["share_of_floor"] is None
    assert parts["decode tiny, batch 3"]["figures"]["tokens_per_s"] > 0
    assert parts["W1 tiny"]["status"] == "skipped"
    page = (tmp_path / "gpu.md").read_text()
    assert "| floors | failed |" in page
    assert "no pinned memory" in page


def test_a_peer_that_fails_is_listed_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_peers
    from benchmarks.peers_workloads import contests

    def fail(*arguments: Any) -> None:
        raise RuntimeError("not in this version")

    monkeypatch.setattr(gpu_peers.ContinuousBatching, "open", fail)
    f = gpu_peers.measure_contest(
        MeasuredDevice("cpu"),
        TINY,
        contests(TINY.vocab_size, "small")["W2"],
        None,
        gpu_peers.ContestSizes(num_runs=1, num_peer_blocks=16),
        has_time=lambda: True,
    )
    assert "not in this version" in f["errors"]["transformers continuous batching"]
    assert f["best_peer"] == "transformers generate"


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
