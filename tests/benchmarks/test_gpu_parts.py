"""The arithmetic of the GPU benchmark, and what becomes of its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu_engines import pool_config, ramp_steps, random_model
from benchmarks.gpu_parts import Deadline, Outcome, Part, run_parts
from benchmarks.gpu_plan import FULL
from benchmarks.gpu_shapes import (
    NEAR_NOTHING,
    QWEN3,
    PoolShape,
    context_that_fits,
    kv_bytes_per_token,
    prefill_flops,
    weight_bytes,
    weight_bytes_per_step,
)
from benchmarks.gpu_steps import DecodeSizes
from tests.inspected_engine import InspectedEngine

TINY = replace(NEAR_NOTHING, dtype=torch.float32)
UNTIED = replace(TINY, tie_word_embeddings=False)
POOL = PoolShape(num_rows=3, context_len=256)


@pytest.mark.parametrize("spec", [TINY, UNTIED])
def test_bytes_are_those_of_the_models_tensors(spec: Any) -> None:
    model = random_model(spec, "cpu")
    parameters = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert weight_bytes(spec) == sum(parameters.values())
    unread = 0 if spec.tie_word_embeddings else model.model.embed_tokens.weight.nbytes
    assert weight_bytes_per_step(spec) == weight_bytes(spec) - unread
    engine = InspectedEngine.from_model(model, pool_config(spec, POOL, "cpu"))
    assert engine.stats().num_blocks_total == POOL.num_blocks == 3
    per_token = sum(layer[1].nbytes for layer in engine.kv.layers) // 256
    assert kv_bytes_per_token(spec) == per_token


def test_prefill_operations_are_those_of_every_product() -> None:
    model = random_model(TINY, "cpu")
    matrices = sum(linear.weight.numel() for linear in model.linear_layers().values())
    head = model.lm_head.weight.numel()
    heads, scored_pairs = TINY.num_layers * TINY.num_heads * TINY.head_dim, 1 + 2 + 3
    one_prompt = 2 * (matrices - head) * 3 + 2 * head + 2 * 2 * heads * scored_pairs
    assert prefill_flops(TINY, 3, 5) == 5 * one_prompt


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("4B", 4.022), ("8B", 8.191)])
def test_shapes_have_the_parameters_of_the_public_models(name: str, billions: float) -> None:
    assert weight_bytes(QWEN3[name]) / 2e9 == pytest.approx(billions, abs=0.001)


def test_context_is_shortened_to_whole_blocks_where_memory_is_short() -> None:
    spec, block = QWEN3["8B"], kv_bytes_per_token(QWEN3["8B"]) * 256
    wanted = PoolShape(num_rows=256, context_len=1000)
    free = weight_bytes(spec) + 5 + 256 * 2 * block
    assert context_that_fits(spec, wanted, free, 5).context_len == 512
    assert context_that_fits(spec, wanted, 2 * free, 5) == wanted
    assert context_that_fits(spec, wanted, None, 5) == wanted
    with pytest.raises(RuntimeError, match="256 rows"):
        context_that_fits(spec, wanted, weight_bytes(spec), 5)


def test_no_row_of_the_full_plan_ends_within_its_window() -> None:
    for batch in FULL.batches:
        sizes = DecodeSizes(
            batch=batch,
            context_len=FULL.pool.context_len,
            num_warm_up=FULL.num_warm_up,
            num_steps=FULL.num_steps,
        )
        most = ramp_steps(batch, sizes.prompt_len) + sizes.num_warm_up + sizes.num_steps
        assert most < sizes.num_new
        assert 900 < sizes.prompt_len < sizes.prompt_len + sizes.num_new == 1024


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="leave no room"):
        _ = DecodeSizes(batch=1, context_len=16, num_warm_up=8, num_steps=8).prompt_len


def part(name: str, needs_s: float = 0.0, error: BaseException | None = None) -> Part:
    def measure() -> dict[str, Any]:
        if error is not None:
            raise error
        return {"name": name}

    return Part(name=name, kind="host", needs_s=needs_s, measure=measure)


def outcomes_of(parts: list[Part], budget_s: float = 100.0) -> tuple[list[Outcome], list[str]]:
    events: list[str] = []
    outcomes = run_parts(
        parts,
        Deadline(budget_s),
        before=lambda part: events.append(part.name),
        after=lambda outcomes: events.append(f"{len(outcomes)} done"),
        on_failure=lambda: events.append("cleared up"),
    )
    return outcomes, events


def test_a_part_that_raises_is_recorded_and_the_others_go_on() -> None:
    outcomes, events = outcomes_of([part("a", error=ValueError("no such luck")), part("b")])
    assert [o.status for o in outcomes] == ["failed", "measured"]
    assert outcomes[0].error is not None
    assert outcomes[0].error.startswith("ValueError: no such luck (")
    assert "test_gpu_parts.py" in outcomes[0].error
    assert "/" not in outcomes[0].error
    assert outcomes[1].figures == {"name": "b"}
    assert events == ["a", "1 done", "cleared up", "b", "2 done"]


def test_a_part_that_no_longer_fits_is_skipped_and_a_shorter_one_is_not() -> None:
    outcomes, _ = outcomes_of([part("long", needs_s=101.0), part("short", needs_s=1.0)])
    assert [o.status for o in outcomes] == ["skipped", "measured"]
    assert outcomes[0].error == "100 s were left, it may need 101"


def test_ctrl_c_ends_one_part_and_skips_the_rest() -> None:
    outcomes, events = outcomes_of([part("a"), part("b", error=KeyboardInterrupt()), part("c")])
    assert [o.status for o in outcomes] == ["measured", "interrupted", "skipped"]
    assert events == ["a", "1 done", "b", "2 done", "3 done"]


def test_an_error_is_recorded_before_what_is_left_is_cleared_up() -> None:
    """Clearing up after a part that broke the device raises, too."""

    def clear_up() -> None:
        seen.append(len(recorded))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    seen: list[int] = []
    recorded: list[Outcome] = []
    outcomes = run_parts(
        [part("a", error=ValueError("no such luck")), part("b")],
        Deadline(100.0),
        before=lambda part: None,
        after=lambda outcomes: recorded.append(outcomes[-1]),
        on_failure=clear_up,
    )
    assert seen == [1]
    assert [o.status for o in outcomes] == ["failed", "measured"]
    assert outcomes == recorded
    assert outcomes[0].error is not None
    assert outcomes[0].error.startswith("ValueError: no such luck (")
