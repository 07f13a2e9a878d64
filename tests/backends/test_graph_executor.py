"""GraphExecutor: padding changes nothing, engines replay, and graphs outlive a suspend."""

from __future__ import annotations

import logging
import random
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout import SamplingParams
from rollout.backends.buffers import MemoryBackend
from rollout.backends.cpu.memory import DeviceMemory, ReservedMemory
from rollout.backends.cuda.graph import GraphExecutor
from rollout.backends.cuda.graph_shapes import (
    MAX_LOGIT_BYTES,
    PREFILL_TOKENS,
    GraphShapes,
    make_graph_shapes,
)
from rollout.backends.executors.eager import EagerExecutor
from rollout.backends.step_tensors import (
    INPUT_TYPES,
    LAYOUT_TYPES,
    SamplingFlags,
    StepInputs,
    StepLayout,
)
from rollout.errors import EngineStateError
from rollout.step.output import SampleResult, ScoreResult, StepOutput
from tests.backends.repeating_device import CPU, RepeatingDevice, graph_engine
from tests.run_kind import scaled
from tests.tiny_mixtures import own_routing, tiny_mixture
from tests.tiny_models import (
    Margins,
    drain,
    generate_all,
    prompt_of,
    randomize,
    tiny_engine,
    tiny_model,
    tokens_of,
)

MAX_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 6, 4, 100
PER_SAMPLE = ("sample_rows_S", "temperature_S", "top_k_S", "top_p_S", "mode_S")
MODES = ("persist", "offload", "recompute")
GRAPH_SHAPES = make_graph_shapes(12, 24, 6)  # of graph_engine
SHAPES = (*GRAPH_SHAPES.decode, *GRAPH_SHAPES.mixed)


# ---- padding


@st.composite
def steps(draw: st.DrawFn) -> StepInputs[Any]:
    """Draw a step with the structure of a real one and random numbers everywhere.

    Some score the tokens of their prompts, some want a top-n of some samples.
    """
    num_decodes = draw(st.integers(0, 12))
    prefills = draw(st.lists(st.integers(1, 9), max_size=5))
    is_sampled = draw(st.lists(st.integers(0, 3), min_size=len(prefills), max_size=len(prefills)))
    if num_decodes + sum(is_sampled) == 0:
        num_decodes = 1
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    query_lens = [1] * num_decodes + prefills
    ends = np.cumsum(query_lens)
    num_draws = [1] * num_decodes + is_sampled
    sources = [end - 1 for end, count in zip(ends, num_draws, strict=True) if count]
    draws = np.repeat(np.arange(len(sources)), [count for count in num_draws if count])
    sizes = {"T": int(ends[-1]), "S": len(draws)}
    scored = [i for i in range(num_decodes, int(ends[-1])) if generator.random() < 0.5]
    scored *= draw(st.integers(0, 1))
    wants_more_S = draw(st.lists(st.booleans(), min_size=len(draws), max_size=len(draws)))
    arrays: dict[str, Any] = {
        name: generator.integers(1, 100, sizes[name[-1]]).astype(kind)
        for name, kind in (LAYOUT_TYPES | INPUT_TYPES).items()
        if name[-1] in sizes
    }
    num_rows, width = len(query_lens), draw(st.integers(1, MAX_BLOCKS))
    arrays |= {
        "block_tables_RM": generator.integers(1, 9, (num_rows, width)).astype(np.int32),
        "query_starts_E": np.array([0, *ends], dtype=np.int32),
        "context_lens_R": generator.integers(9, 90, num_rows).astype(np.int32),
        "logit_indices_L": np.array([*sources, *scored], dtype=np.int64),
        "draws_S": draws.astype(np.int64),
        "score_targets_P": generator.integers(1, 100, len(scored)),
    }
    flags = SamplingFlags(
        all_greedy=False,
        any_greedy=True,
        any_truncation=True,
        any_logprobs=True,
        any_ranks=any(wants_more_S),
        top_n=3 * any(wants_more_S),
    )
    layout = StepLayout(
        **{name: arrays[name] for name in LAYOUT_TYPES},
        num_decode_rows=num_decodes,
        num_drawn_logits=len(sources),
        only_decodes=not prefills,
        draws_in_order=len(sources) == len(draws),
        flags=flags,
        score_top_n=2,
        score_ranks=True,
        asks_more_S=np.array(wants_more_S, dtype=np.bool_),
    )
    return StepInputs(layout=layout, **{name: arrays[name] for name in INPUT_TYPES})


class Fingerprint:
    """A program whose results are hashes of all inputs that they depend on."""

    def __init__(self) -> None:
        self.num_drawn: list[int] = []

    def forward(
        self, _host: StepInputs[Any], step: StepInputs[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """A number per token, of the token and its row."""
        layout, rows = step.layout, torch.arange(step.context_lens_R.shape[0])
        num_tokens, lens = layout.token_ids_T.shape[0], layout.query_starts_E.diff()
        row_T = torch.repeat_interleave(rows, lens)
        row_T = torch.cat((row_T, row_T.new_zeros(num_tokens - len(row_T))))
        place_T = torch.arange(num_tokens) - layout.query_starts_E[row_T]
        is_decode_T = (row_T < layout.num_decode_rows).long()
        per_token = [layout.input_rows_T, layout.token_ids_T, step.positions_T, step.slots_T]
        per_token += [place_T, is_decode_T, lens[row_T], step.context_lens_R[row_T]]
        tables_TM = step.block_tables_RM[row_T]
        order_M = torch.arange(tables_TM.shape[1], dtype=torch.int32)
        per_token += [tables_TM.sum(1), tables_TM @ order_M]
        parts = (31**i * values.double() for i, values in enumerate(per_token))
        total_T = sum(parts, torch.zeros(()))
        return total_T[layout.logit_indices_L, None], total_T[:, None, None]

    def draw(
        self, _host: StepInputs[Any], step: StepInputs[Tensor], hidden_LE: Tensor
    ) -> StepOutput[Tensor]:
        """A number per sample and per scored token."""
        layout, logits_L = step.layout, hidden_LE.squeeze(1)
        logits_L, scored_P = logits_L.split([layout.num_drawn_logits, len(layout.score_targets_P)])
        logits_S = logits_L if layout.draws_in_order else logits_L[layout.draws_S]
        drawn = [step.uniforms_S, *(getattr(layout, name).double() for name in PER_SAMPLE)]
        logits_S = logits_S + sum(0.37**i * values for i, values in enumerate(drawn))
        self.num_drawn.append(len(logits_S))
        scores_P = scored_P + 0.37 * layout.score_targets_P
        ranks_N = torch.arange(layout.flags.top_n)
        samples = SampleResult(
            token_ids_S=logits_S.view(torch.int64),
            is_finite_S=logits_S > 0,
            logprobs_S=logits_S.float(),
            ranks_S=logits_S.int() if layout.flags.any_ranks else None,
            top_ids_SN=logits_S.long()[:, None] + ranks_N if layout.flags.top_n else None,
            top_logprobs_SN=logits_S[:, None] - ranks_N if layout.flags.top_n else None,
        )
        scores = ScoreResult(logprobs_P=scores_P, ranks_P=scores_P.int()) if len(scores_P) else None
        return StepOutput(samples=samples, scores=scores)


@given(data=st.lists(steps(), min_size=1, max_size=4), num_graphs=st.sampled_from([2, 6, 20]))
@settings(max_examples=scaled(60))
def test_a_padded_step_gives_each_sample_what_the_exact_step_gives(
    data: list[StepInputs[Any]], num_graphs: int
) -> None:
    graph_shapes = make_graph_shapes(num_graphs, 16, num_graphs)
    executor, program = GraphExecutor(CPU, RepeatingDevice(), graph_shapes), Fingerprint()
    executor.prepare(MAX_BLOCKS, VOCAB_SIZE)
    fetches = []
    for inputs in data:
        expected = EagerExecutor(CPU).launch(program, inputs)()
        fetches.append((executor.launch(program, inputs), expected, inputs.layout.asks_more_S))
        for fetch, right, asks_more_S in fetches[-2:]:  # two may be outstanding
            assert_same(fetch(), right, asks_more_S)
    num_scoring = len(graph_shapes.scoring)
    assert num_scoring <= len(PREFILL_TOKENS)
    assert 0 < executor.num_captures <= num_graphs + num_scoring


def assert_same(result: StepOutput, right: StepOutput, asks_more_S: Any) -> None:
    """Compare all results, except top-n and ranks of samples that do not want them."""
    left, wanted = asdict(result), asdict(right)
    for name in ("ranks_S", "top_ids_SN", "top_logprobs_SN"):
        for samples in (left["samples"], wanted["samples"]):
            if wanted["samples"][name] is not None:
                samples[name] = samples[name][asks_more_S]
    np.testing.assert_equal(left, wanted)


@given(inputs=steps())
@settings(max_examples=scaled(30))
def test_after_a_replay_only_samples_that_want_more_are_drawn_again(
    inputs: StepInputs[Any],
) -> None:
    device, program = RepeatingDevice(), Fingerprint()
    executor = GraphExecutor(CPU, device, make_graph_shapes(20, 16, 20))
    executor.prepare(MAX_BLOCKS, VOCAB_SIZE)
    executor.launch(program, inputs)()
    program.num_drawn.clear()
    executor.launch(program, inputs)()
    assert (executor.num_captures, device.num_replays) == (1, 2)
    asked, is_scored = int(inputs.layout.asks_more_S.sum()), len(inputs.layout.score_targets_P) > 0
    assert program.num_drawn[1:] == ([asked] if asked or is_scored else [])


@given(num_graphs=st.integers(0, 70), max_rows=st.integers(1, 2000), max_mixed=st.integers(0, 40))
def test_graph_shapes_reach_the_largest_step_within_their_number(
    num_graphs: int, max_rows: int, max_mixed: int
) -> None:
    graph_shapes = make_graph_shapes(num_graphs, max_rows, max_mixed)
    assert len(graph_shapes.decode) + len(graph_shapes.mixed) <= num_graphs
    assert len(graph_shapes.mixed) <= max_mixed
    sizes = [shape.num_decode_rows for shape in graph_shapes.decode]
    assert sizes == sorted(set(sizes))
    costs = [shape.num_tokens for shape in graph_shapes.mixed]
    assert costs == sorted(costs)
    for shapes in (graph_shapes.decode, graph_shapes.mixed):
        assert not shapes or max(shape.num_decode_rows for shape in shapes) == max_rows
    if graph_shapes.mixed:
        assert graph_shapes.mixed[-1].num_prefill_tokens == PREFILL_TOKENS[-1]
        assert graph_shapes.mixed[-1].num_decode_rows == max_rows
    if num_graphs > 2:
        assert graph_shapes.decode[0].num_decode_rows == 1


@given(max_rows=st.integers(1, 2000))
def test_a_decode_step_above_64_rows_computes_less_than_16_rows_of_padding(max_rows: int) -> None:
    sizes = [shape.num_decode_rows for shape in make_graph_shapes(None, max_rows, 16).decode]
    for num_rows in range(1, max_rows + 1):
        padding = next(size for size in sizes if size >= num_rows) - num_rows
        assert padding <= min(15, num_rows)


def test_mixed_steps_of_few_prompt_tokens_have_shapes_of_their_own() -> None:
    graph_shapes = make_graph_shapes(None, 256, 16)
    assert {shape.num_prefill_tokens for shape in graph_shapes.mixed} == {64, 128, 256, 512}
    assert len(graph_shapes.mixed) == 16
    for num_tokens in PREFILL_TOKENS:
        rows = [s.num_decode_rows for s in graph_shapes.mixed if s.num_prefill_tokens == num_tokens]
        assert (rows[0], rows[-1]) == (1, 256)


def test_shapes_with_more_logits_than_the_bound_are_left_to_eager_steps() -> None:
    graph_shapes = make_graph_shapes(None, 1024, 16).within(MAX_LOGIT_BYTES, 152_064)
    assert graph_shapes.decode[-1].num_decode_rows == 1024
    assert max(shape.num_decode_rows for shape in graph_shapes.mixed) < 1024
    for shape in (*graph_shapes.decode, *graph_shapes.mixed):
        in_float32 = 4 * 152_064 * shape.num_rows
        assert in_float32 < shape.logit_bytes(152_064) <= MAX_LOGIT_BYTES


@given(inputs=steps())
def test_a_step_takes_the_smallest_shape_it_fits(inputs: StepInputs[Any]) -> None:
    graph_shapes = make_graph_shapes(8, 12, 4)
    shape = graph_shapes.smallest_for(inputs)
    only_decodes = len(inputs.layout.token_ids_T) == inputs.layout.num_decode_rows
    shapes = graph_shapes.decode if only_decodes else graph_shapes.mixed
    if len(inputs.layout.score_targets_P):
        shapes = graph_shapes.scoring
    fitting = [shape for shape in shapes if shape.fits(inputs)]
    assert shape == (fitting[0] if fitting else None)
    assert GraphShapes().smallest_for(inputs) is None


# ---- engines


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=8)


@cache
def jobs() -> tuple[tuple[list[int], SamplingParams], ...]:
    chooser = random.Random(5)
    return tuple(
        (
            prompt_of(chooser.choice((1, 8, 9, 30, 70)), seed=i // 2),
            SamplingParams(
                num_tokens_to_generate=chooser.randint(2, 30),
                seed=i,
                temperature=(0.0, 1.0)[i % 2],
                top_p=(0.0, 0.9)[i // 2 % 2],
                top_n_logprobs=3 if i == 7 else 0,
                return_log_probs=i % 3 > 0,
                skip_prompt_log_probs=i != 5,
                repetition_penalty=1.4 if i == 7 else 1.0,
            ),
        )
        for i in range(14)
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"enable_chunked_prefill": True, "max_tokens": 24},
        {"num_blocks": 18},
        {"max_requests": 3},
        {"graph_shapes": make_graph_shapes(2, 24, 2)},
    ],
    ids=str,
)
def test_replayed_tokens_are_those_of_the_trainers_model(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    engine, executor, device = graph_engine(monkeypatch, model(), **config)
    margins = Margins()
    for request in generate_all(engine, jobs()):
        margins.compare_with_oracle(model(), request)
    margins.check()
    assert executor.num_captures == engine.stats().num_graph_captures > 0
    assert device.num_replays > 5


ASKS: dict[str, dict[str, Any]] = {
    "top-n": {"top_n_logprobs": 4, "return_log_probs": True},
    "ranks": {"return_ranks": True, "top_p": 0.8},
    "prompt": {"return_log_probs": True, "skip_prompt_log_probs": False},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "return_log_probs": True},
    "all": {
        "top_n_logprobs": 7,
        "return_log_probs": True,
        "skip_prompt_log_probs": False,
        "return_ranks": True,
        "logprobs_mode": "processed",
        "top_k": 20,
        "presence_penalty": 0.4,
        "logit_bias": {5: 2.0},
    },
}
REPORTED = (
    *("prompt_log_probs", "generated_log_probs", "prompt_ranks", "generated_ranks"),
    *("prompt_top_n_logprobs", "generated_top_n_logprobs"),
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("asked", ASKS)
def test_a_request_that_asks_for_more_leaves_the_batch_in_its_graphs(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Steps are of graphs captured ahead, save for the ones that score prompts; what all requests
    report is what eager steps report."""
    plain = {"num_tokens_to_generate": 12, "temperature": 1.0, "ignore_eos": True}
    asks: list[dict[str, Any]] = [{}, ASKS[asked], {"return_log_probs": True}, ASKS[asked]]
    given = [
        (prompt_of(5 + 4 * i, seed=i), SamplingParams(seed=i, **plain, **more))
        for i, more in enumerate(asks)
    ]
    expected = generate_all(tiny_engine(model()), given)
    engine, executor, device = graph_engine(monkeypatch, model())
    engine.warm_up()

    def no_eager_step(*_: Any) -> Any:
        raise AssertionError("a step ran eagerly")

    monkeypatch.setattr(executor._eager, "launch", no_eager_step)
    finished = generate_all(engine, given)
    for request, right in zip(finished, expected, strict=True):
        assert request.generated_tokens == right.generated_tokens
        for name in REPORTED:
            assert_close(getattr(request, name), getattr(right, name))
        for index, top in enumerate(request.generated_top_n_logprobs or ()):
            log_prob = float(request.generated_log_probs[index])
            # The token's own is in the top-n to the last bit.
            assert top.get(request.generated_tokens[index], log_prob) == log_prob
    assert executor.num_captures == len(SHAPES) + (asked in ("prompt", "all"))
    assert device.num_replays >= 12


def assert_close(left: Any, right: Any) -> None:
    """Compare numbers, lists of numbers and dictionaries of top-n, up to rounding."""
    if isinstance(right, list) and right and isinstance(right[0], dict):
        for a, b in zip(left, right, strict=True):
            assert a.keys() == b.keys()
            np.testing.assert_allclose(list(a.values()), [b[key] for key in a], atol=1e-5)
    elif right is None:
        assert left is None
    else:
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_forks_are_drawn_within_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor, _ = graph_engine(monkeypatch, model())
    params = [SamplingParams(num_tokens_to_generate=9, seed=i, temperature=1.0) for i in range(5)]
    engine.add_groups([(prompt_of(12, seed=j), params) for j in range(2)])
    margins = Margins()
    for request in drain(engine).values():
        margins.compare_with_oracle(model(), request)
    margins.check()
    assert executor.num_captures > 1


def test_warming_up_captures_all_shapes_and_steps_then_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, executor, device = graph_engine(monkeypatch, model())
    assert engine.warm_up() == len(SHAPES) == executor.num_captures
    assert engine.warm_up() == 0
    margins = Margins()
    for request in generate_all(engine, jobs()):
        margins.compare_with_oracle(model(), request)
    margins.check()
    assert executor.num_captures == len(SHAPES)
    assert device.num_replays > 5


def test_an_engine_warms_up_between_two_steps_but_not_while_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [request.generated_tokens for request in generate_all(tiny_engine(model()), jobs())]
    engine, _, _ = graph_engine(monkeypatch, model())
    for i, (prompt, params) in enumerate(jobs()):
        engine.add_request(prompt, params, request_id=i)
    engine.step()
    engine.warm_up()
    engine.pause()
    assert engine.warm_up() == 0
    engine.suspend("offload")
    with pytest.raises(EngineStateError, match="warm up"):
        engine.warm_up()
    engine.resume()
    engine.unpause()
    finished = drain(engine)
    assert [finished[i].generated_tokens for i in range(len(expected))] == expected


class WanderingMemory(DeviceMemory):
    """Memory whose buffers have another address after each restore."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Tensor] = []

    def release(self, name: str) -> int:
        self.left.append(self.restore(name))
        return super().release(name)


def captures_over_cycles(
    monkeypatch: pytest.MonkeyPatch, memory: MemoryBackend, mode: str, num_cycles: int
) -> list[int]:
    """Return the number of captures before each cycle of suspend, update and resume, and at the
    end.
    """
    trained = tiny_model("qwen3", seed=8)
    engine, executor, device = graph_engine(
        monkeypatch, trained, memory=memory, kv_cache_management_mode=mode
    )
    params = SamplingParams(num_tokens_to_generate=5 * num_cycles + 10, ignore_eos=True)
    for seed in range(3):
        engine.add_request(prompt_of(9, seed=seed), params)
    engine.warm_up()  # steps that prefill again what was dropped have ever other shapes
    captures = []
    for cycle in range(num_cycles):
        for _ in range(4):
            engine.step()
        captures.append(executor.num_captures)
        engine.pause()
        engine.suspend(release=("kv_cache", "weights"))
        randomize(trained, seed=8 + cycle % 2)
        engine.resume(only="weights")
        engine.update_weights(trained.state_dict())
        report = engine.resume()
        assert (report.graphs_recaptured > 0) == (not memory.has_stable_addresses)
        engine.unpause()
    finished = drain(engine).values()
    assert device.cuda.fatal == []
    assert [len(request.generated_tokens) for request in finished] == [5 * num_cycles + 10] * 3
    return [*captures, executor.num_captures]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", MODES)
def test_graphs_outlive_20_suspends_where_addresses_stay(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    captures = captures_over_cycles(monkeypatch, ReservedMemory(), mode, 20)
    assert captures == [len(SHAPES)] * 21


def test_graphs_are_captured_again_if_memory_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures = captures_over_cycles(monkeypatch, WanderingMemory(), "offload", 3)
    assert captures[0] == len(SHAPES)
    # Steps after a move capture what they need, each shape once.
    assert all(0 < after - before <= len(SHAPES) for before, after in pairwise(captures))


def test_an_unnoticed_move_is_found_by_the_first_step_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = generate_all(tiny_engine(model()), jobs()[:3])
    engine, executor, device = graph_engine(monkeypatch, model(), memory=ReservedMemory())
    for i, (prompt, params) in enumerate(jobs()[:3]):
        engine.add_request(prompt, params, request_id=i)
    engine.step()
    device.lose_graphs(3)
    before = executor.num_captures
    engine.pause()
    engine.suspend("offload")
    engine.resume()
    engine.unpause()
    with caplog.at_level(logging.WARNING):
        finished = drain(engine)
    assert "graphs are captured again" in caplog.text
    assert executor.num_captures > before
    for i, request in enumerate(reference):
        assert finished[i].generated_tokens == request.generated_tokens


def test_replayed_steps_record_what_the_models_routers_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixture = tiny_mixture()
    engine, executor, _ = graph_engine(
        monkeypatch, mixture, record_routing=True, enable_chunked_prefill=True, max_tokens=24
    )
    params = SamplingParams(num_tokens_to_generate=12, seed=1)
    given = [(prompt_of(length), params) for length in (1, 9, 30, 40)]
    for request in generate_all(engine, given):
        tokens_BT = torch.tensor([tokens_of(request)])
        wanted, routing = own_routing(mixture, tokens_BT)[0, :-1], request.routing_indices
        assert torch.equal(routing.sort(dim=-1).values, wanted.sort(dim=-1).values)
    assert executor.num_captures > 1
