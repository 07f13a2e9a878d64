"""The arithmetic of the GPU benchmark, and what becomes of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import gpu_parts
from benchmarks.gpu_engines import pool_config, ramp_steps, random_engine
from benchmarks.gpu_measures import DecodeSizes
from benchmarks.gpu_parts import Deadline, GroupRunner, Outcome, Part, Report, run_parts
from benchmarks.gpu_shapes import (
    NEAR_NOTHING,
    PLAN,
    QWEN3,
    PoolShape,
    kv_bytes_per_token,
    prefill_flops,
    weight_bytes,
    weight_bytes_per_step,
)
from rollout.models import CausalLM

TINY = replace(NEAR_NOTHING, dtype=torch.float32)
UNTIED = replace(TINY, tie_word_embeddings=False)
POOL = PoolShape(num_rows=3, context_len=256)


@pytest.mark.parametrize("spec", [TINY, UNTIED])
def test_bytes_are_those_of_the_models_tensors(spec: Any) -> None:
    engine = random_engine(spec, pool_config(spec, POOL, "cpu"), "cpu")
    model = engine.build.model
    assert model.spec == spec
    parameters = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert weight_bytes(spec) == sum(parameters.values())
    unread = 0 if spec.tie_word_embeddings else model.model.embed_tokens.weight.nbytes
    assert weight_bytes_per_step(spec) == weight_bytes(spec) - unread
    assert engine.stats().num_blocks_total == POOL.num_blocks == 3
    kv_bytes = engine.memory_status().resident_bytes["kv_cache"]
    blocks_and_scratch = POOL.num_blocks + 1
    assert kv_bytes_per_token(spec) * 256 * blocks_and_scratch == kv_bytes


def test_prefill_operations_are_those_of_every_product() -> None:
    model = CausalLM(TINY, "meta")
    matrices = sum(linear.weight.numel() for linear in model.linear_layers().values())
    head = model.lm_head.weight.numel()
    heads, scored_pairs = TINY.num_layers * TINY.num_heads * TINY.head_dim, 1 + 2 + 3
    one_prompt = 2 * (matrices - head) * 3 + 2 * head + 2 * 2 * heads * scored_pairs
    assert prefill_flops(TINY, 3, 5) == 5 * one_prompt


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("8B", 8.191)])
def test_shapes_have_the_parameters_of_the_public_models(name: str, billions: float) -> None:
    assert weight_bytes(QWEN3[name]) / 2e9 == pytest.approx(billions, abs=0.001)


def test_no_row_of_the_plan_ends_within_its_window() -> None:
    for batch in PLAN.batches:
        sizes = DecodeSizes(
            batch=batch,
            context_len=PLAN.context_len,
            num_warm_up=PLAN.num_warm_up,
            num_steps=PLAN.num_steps,
        )
        most = ramp_steps(batch, sizes.prompt_len) + sizes.num_warm_up + sizes.num_steps
        assert most < sizes.num_new
        assert 440 < sizes.prompt_len < sizes.prompt_len + sizes.num_new == 512


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="leave no room"):
        _ = DecodeSizes(batch=1, context_len=16, num_warm_up=8, num_steps=8).prompt_len


# ---- in the process of a group


def part(name: str, needs_s: float = 0.0, error: BaseException | None = None) -> Part:
    def measure() -> dict[str, Any]:
        if error is not None:
            raise error
        return {"name": name}

    return Part(name=name, kind="host", needs_s=needs_s, measure=measure)


def reports_of(
    parts: list[Part], budget_s: float = 100.0, recover: Callable[[], None] = lambda: None
) -> list[Report]:
    reports: list[Report] = []

    def recover_after_the_report() -> None:
        assert isinstance(reports[-1][1], Outcome), "an error is recorded before clearing up"
        reports.append(("recover", None))
        recover()

    deadline = Deadline.after(budget_s)
    run_parts(parts, deadline, report=reports.append, recover=recover_after_the_report)
    return reports


def outcomes_in(reports: list[Report]) -> list[Outcome]:
    return [value for what, value in reports if what == "end"]


def test_a_part_that_raises_is_recorded_and_the_others_go_on() -> None:
    reports = reports_of([part("a", error=ValueError("no such luck")), part("b")])
    assert [what for what, _ in reports] == ["begin", "end", "recover", "begin", "end"]
    failed, measured = outcomes_in(reports)
    assert (failed.status, measured.status) == ("failed", "measured")
    assert failed.error is not None
    assert failed.error.startswith("ValueError: no such luck (")
    assert "test_gpu_parts.py" in failed.error
    assert "/" not in failed.error
    assert measured.figures == {"name": "b"}


def test_a_part_that_no_longer_fits_is_skipped_and_a_shorter_one_is_not() -> None:
    reports = reports_of([part("long", needs_s=101.0), part("short", needs_s=1.0)])
    skipped, measured = outcomes_in(reports)
    assert (skipped.status, measured.status) == ("skipped", "measured")
    assert skipped.error == "100 s were left, it may need 101"


def test_a_device_that_does_not_recover_runs_no_more_parts_and_keeps_the_error() -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    reports = reports_of([part("a", error=ValueError("no such luck")), part("b")], recover=broken)
    (failed,) = outcomes_in(reports)
    assert failed.error is not None
    assert failed.error.startswith("ValueError: no such luck (")


# ---- in the process that starts them


def run_groups(
    groups: dict[str, list[str]],
    *,
    budget_s: float = 600.0,
    before: Callable[[str], None] = lambda name: None,
    needs_s: float = 100.0,
) -> tuple[dict[str, Outcome], list[Report]]:
    """The outcomes of made-up parts, and what else their processes have reported. Of a part that
    hangs, nobody waits for the end as long as for that of others.
    """
    deadline = Deadline.after(budget_s)
    outcomes: list[Outcome] = []
    others: list[Report] = []
    runner = GroupRunner(
        "tests.benchmarks.fake_gpu_group",
        deadline,
        arguments=lambda group, names: (group, names, deadline.ends_at),
        before=before,
        after=outcomes.append,
        others=others.append,
    )
    runner.run(
        {
            group: [part(name, 0.0 if name == "hangs" else needs_s) for name in names]
            for group, names in groups.items()
        }
    )
    assert [o.name for o in outcomes] == [name for names in groups.values() for name in names]
    return {outcome.name: outcome for outcome in outcomes}, others


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("aborts", "its process ended: SIGABRT"),
        ("is killed", "its process ended: SIGKILL"),
        ("exits", "its process ended: exit code 3"),
        ("raises", "ValueError: no such luck ("),
        ("breaks the device", "RuntimeError: CUDA error: an illegal access ("),
        ("hangs", "it did not end in time, and was killed"),
    ],
)
def test_a_part_costs_no_other_part_its_result_however_it_ends(
    monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.setattr(gpu_parts, "HANG_S", 0.3)
    outcomes, others = run_groups({"first": ["a", name, "b"], "second": ["c"]})
    failed = outcomes.pop(name)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.startswith(why)
    assert {outcome.status for outcome in outcomes.values()} == {"measured"}
    processes = [outcomes[n].figures["pid"] for n in "abc"]  # type: ignore[index]
    goes_on = name == "raises"
    assert (processes[0] == processes[1]) is goes_on
    assert processes[2] not in processes[:2], "each group has a process of its own"
    assert others == [("machine", "first")] * (1 if goes_on else 2) + [("machine", "second")]


def test_a_group_that_cannot_start_costs_no_other_group_its_results() -> None:
    outcomes, _ = run_groups({"cannot start": ["a", "b"], "second": ["c"]})
    assert [o.status for o in outcomes.values()] == ["failed", "failed", "measured"]
    for name in "ab":
        assert "no such module" in (outcomes[name].error or "")


def test_a_process_that_does_not_come_to_its_first_part_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_parts, "START_LIMIT_S", 0.5)
    outcomes, _ = run_groups({"never starts": ["a", "b"]})
    assert [o.status for o in outcomes.values()] == ["failed", "failed"]
    assert outcomes["a"].error == "it did not end in time, and was killed"


def test_a_group_without_time_for_any_part_is_skipped_without_a_process() -> None:
    outcomes, others = run_groups({"first": ["a", "b"]}, budget_s=50.0)
    assert [o.status for o in outcomes.values()] == ["skipped", "skipped"]
    assert others == []


def test_ctrl_c_ends_one_part_and_skips_the_rest() -> None:
    def interrupt(name: str) -> None:
        if name == "hangs":
            raise KeyboardInterrupt

    outcomes, _ = run_groups({"first": ["a", "hangs", "b"], "second": ["c"]}, before=interrupt)
    assert [o.status for o in outcomes.values()] == [
        *("measured", "interrupted", "skipped", "skipped")
    ]
