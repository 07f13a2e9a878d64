"""Steps whose capture fails run eagerly, on all ranks, and graphs that were captured stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout import SamplingParams
from rollout.backends.cuda.graph import GraphExecutor
from rollout.backends.cuda.graph_shapes import make_graph_shapes
from rollout.backends.cuda.vmm import VirtualMemory
from rollout.backends.step_tensors import (
    INPUT_TYPES,
    LAYOUT_TYPES,
    SamplingFlags,
    StepInputs,
    StepLayout,
)
from rollout.errors import LockstepError
from rollout.parallel.collectives import CollectiveAbortedError, Collectives
from rollout.step.output import SampleResult, StepOutput
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.repeating_device import CPU, RepeatingDevice, graph_engine
from tests.thread_ranks import on_ranks
from tests.tiny_models import Margins, drain, generate_all, prompt_of, tiny_model

GRAPH_SHAPES = make_graph_shapes(4, 4, 2)
NUM_SHAPES = len(GRAPH_SHAPES.decode) + len(GRAPH_SHAPES.mixed)
FLAGS = SamplingFlags(
    all_greedy=True,
    any_greedy=True,
    any_truncation=False,
    any_logprobs=True,
    any_ranks=False,
    top_n=0,
)
FIRST_ERROR = "operation not permitted when stream is capturing"


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=8)


def failing_at(numbers: set[int], device: RepeatingDevice) -> Callable[[], None]:
    """Return a function that invalidates the captures with these indices."""
    num_captures = 0

    def fail() -> None:
        nonlocal num_captures
        num_captures += 1
        if num_captures - 1 in numbers:
            device.cuda.synchronize()

    return fail


def jobs() -> list[tuple[list[int], SamplingParams]]:
    params = [SamplingParams(num_tokens_to_generate=12, seed=i) for i in range(4)]
    return [(prompt_of(9 + 5 * i, seed=i), sampling) for i, sampling in enumerate(params)]


def assert_oracles(requests: Any) -> None:
    margins = Margins()
    for request in requests:
        margins.compare_with_oracle(model(), request)
    margins.check()


def test_a_shape_that_cannot_be_captured_runs_eagerly_and_the_first_error_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, executor, device = graph_engine(monkeypatch, model(), graph_shapes=GRAPH_SHAPES)
    device.in_capture = failing_at({1}, device)
    with caplog.at_level(logging.WARNING):
        assert engine.warm_up() == NUM_SHAPES - 1
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert errors == [FIRST_ERROR]
    num_replays = device.num_replays
    assert_oracles(generate_all(engine, jobs()))
    assert device.num_replays > num_replays
    assert engine.warm_up() == 0
    assert executor.num_captures == engine.stats().num_graph_captures == NUM_SHAPES - 1
    assert device.cuda.num_captures == NUM_SHAPES
    assert device.cuda.fatal == []


def test_after_three_failed_captures_no_more_are_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, executor, device = graph_engine(monkeypatch, model(), graph_shapes=GRAPH_SHAPES)
    device.in_capture = device.cuda.synchronize
    assert_oracles(generate_all(engine, jobs()))
    assert engine.warm_up() == 0
    assert device.cuda.num_captures == 3
    assert "no more are tried" in caplog.text
    assert executor.num_captures == device.num_replays == 0
    assert executor.num_bytes["graphs"] == 3 << 20  # what the pools of the captures keep


def test_a_suspend_keeps_the_graphs_beside_a_failed_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = VirtualMemory(FakeRuntime())  # whose addresses stay: no graph is lost by chance
    engine, executor, device = graph_engine(
        monkeypatch, model(), graph_shapes=GRAPH_SHAPES, memory=memory
    )
    device.in_capture = failing_at({1}, device)
    engine.warm_up()
    for prompt, params in jobs():
        engine.add_request(prompt, params)
    engine.step()
    engine.pause()
    report = engine.suspend("offload")
    assert report.kept_beside["graphs"] == 2 << 20
    assert engine.resume().graphs_recaptured == 0
    engine.unpause()
    assert_oracles(drain(engine).values())
    assert executor.num_captures == NUM_SHAPES - 1
    assert device.cuda.fatal == []


def test_a_step_whose_program_fails_before_its_capture_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory may be short once, which says nothing about the shape."""
    engine, _, device = graph_engine(monkeypatch, model(), graph_shapes=GRAPH_SHAPES)
    product, num_calls = device.cuda.product, 0

    def fail_once() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise torch.OutOfMemoryError("made up")
        product()

    monkeypatch.setattr(device.cuda, "product", fail_once)
    assert_oracles(generate_all(engine, jobs()))
    assert engine.stats().num_graph_captures == device.cuda.num_captures > 0


# ---- ranks


def decode_step(token_ids: list[int]) -> StepInputs[Any]:
    """Return a step whose rows decode one of these tokens each, greedily."""
    num_rows = len(token_ids)
    sizes = {"T": num_rows, "R": num_rows, "E": num_rows + 1, "L": num_rows, "S": num_rows, "P": 0}
    arrays: dict[str, Any] = {
        name: np.zeros((num_rows, 1) if name.endswith("RM") else sizes[name[-1]], dtype=kind)
        for name, kind in (LAYOUT_TYPES | INPUT_TYPES).items()
    }
    arrays["token_ids_T"][:] = token_ids
    arrays["query_starts_E"][:] = range(num_rows + 1)
    arrays["logit_indices_L"][:] = arrays["draws_S"][:] = range(num_rows)
    layout = StepLayout(
        **{name: arrays[name] for name in LAYOUT_TYPES},
        num_decode_rows=num_rows,
        num_drawn_logits=num_rows,
        only_decodes=True,
        draws_in_order=True,
        flags=FLAGS,
        score_top_n=0,
        score_ranks=False,
        asks_more_S=np.zeros(num_rows, dtype=np.bool_),
    )
    return StepInputs(layout=layout, **{name: arrays[name] for name in INPUT_TYPES})


class Adding:
    """A program whose forward pass is a sum over the ranks: all must be in a step of one shape."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def forward(self, _host: Any, step: Any) -> tuple[Tensor, None]:
        sums_T = self._collectives.all_reduce_(step.layout.token_ids_T.float())
        return sums_T[step.layout.logit_indices_L, None], None

    def draw(self, _host: Any, step: Any, hidden_LE: Tensor) -> StepOutput[Tensor]:
        ids_S = hidden_LE[step.layout.draws_S, 0].long()
        samples = SampleResult(
            token_ids_S=ids_S, is_finite_S=ids_S > 0, logprobs_S=torch.zeros(len(ids_S))
        )
        return StepOutput(samples=samples)


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("number", [0, 1])
def test_all_ranks_run_eagerly_what_one_rank_cannot_capture(
    failing_rank: int, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that replayed a padded step while another one ran it eagerly would add up rows of
    different steps, or wait for good."""
    steps = [decode_step([5, 6, 7]), decode_step([3]), decode_step([9, 8, 7]), decode_step([2])]

    def work(collectives: Collectives) -> tuple[list[list[int]], int, int]:
        device = RepeatingDevice()
        if collectives.rank == failing_rank:
            device.in_capture = failing_at({number}, device)
        executor = GraphExecutor(CPU, device, make_graph_shapes(4, 4, 0), collectives)
        executor.prepare(4, 100)
        program = Adding(collectives)
        drawn = [executor.launch(program, step)().samples.token_ids_S.tolist() for step in steps]
        return drawn, executor.num_captures, device.num_replays

    with caplog.at_level(logging.WARNING):
        own, other = on_ranks(2, work)
    assert own == other == ([[10, 12, 14], [6], [18, 16, 14], [4]], 1, 2)
    assert caplog.text.count("was not captured on all ranks") == 2
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert errors == [FIRST_ERROR]


@pytest.mark.parametrize("error", [LockstepError("made up"), CollectiveAbortedError()])
def test_a_lost_rank_during_a_capture_is_raised_and_not_a_failed_capture(error: Exception) -> None:
    device = RepeatingDevice()

    def fail() -> None:
        raise error

    device.in_capture = fail
    executor = GraphExecutor(CPU, device, make_graph_shapes(4, 4, 0))
    executor.prepare(4, 100)
    with pytest.raises(type(error)):
        on_ranks(1, lambda ranks: executor.launch(Adding(ranks), decode_step([1])))
