"""Contract of `sample_processed` over every Ops: biases, allowed ids, min_tokens and penalties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import SamplingParams
from rollout.backends.ops.logits_processing import sample_processed
from rollout.backends.step_tensors import LogitsInputs
from rollout.step.output import SampleResult
from rollout.step.plan import NewRow, StepPlan
from rollout.worker.logits_builder import LogitsBuilder, TokenHistories
from tests.contracts.implementations import OPS, is_interpreted
from tests.contracts.sampling_oracle import Draw, batch_of, logprobs, processed_logits
from tests.contracts.test_sampling import LOGPROB, assert_is_drawn, random_logits
from tests.run_kind import scaled

VOCABULARY, TOP_N = 40, 5
ids = st.integers(0, VOCABULARY - 1)
some_ids = st.lists(ids, min_size=1, max_size=12)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 4]),
    logprobs_mode=st.sampled_from(["raw", "temperature", "processed"]),
    return_log_probs=st.just(True),
    top_n_logprobs=st.just(TOP_N),
    termination_id=ids,
    stop_token_ids=st.none() | some_ids,
    min_tokens=st.integers(0, 4),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-9, 9), max_size=4),
    allowed_token_ids=st.none() | st.lists(ids, min_size=8, max_size=20),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.4]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.8]),
)
row_params = any_params.filter(
    lambda p: not set(p.allowed_token_ids or [-2]) <= {p.termination_id, *(p.stop_token_ids or ())}
)
rows_of_a_step = st.lists(
    st.tuples(
        st.one_of(st.just(SamplingParams()), row_params), some_ids, st.lists(ids, max_size=9)
    ),
    min_size=1,
    max_size=5,
)


def new_row(row: int, params: SamplingParams, known: list[int], num_prompt: int) -> NewRow:
    """Return a plan's entry for a new row, with its known tokens if it has penalties."""
    ends = () if params.termination_id is None else (params.termination_id,)
    return NewRow(
        row=row,
        sampling_params=params,
        seed=0,
        num_prompt=num_prompt,
        end_ids=(*ends, *(params.stop_token_ids or ())),
        token_ids=known if params.has_penalties else (),
    )


def drawn(
    name: str, logits_SV: torch.Tensor, params: list[SamplingParams], known: list[list[int]],
    num_prompts: list[int],
) -> SampleResult[torch.Tensor]:  # fmt: skip
    """Draw one step in which every row is new."""
    builder, rows = LogitsBuilder(len(params) + 1), list(range(1, len(params) + 1))
    new_rows = tuple(map(new_row, rows, params, known, num_prompts))
    for new in new_rows:
        builder.set_row(new)
    plan = StepPlan(
        step_id=0,
        weights_version=0,
        sample_rows=np.array(rows, np.int32),
        sample_positions=np.array([len(tokens) for tokens in known], np.int32),
        new_rows=new_rows,
    )
    batch = batch_of(
        [draw_of(each, row) for row, each in zip(rows, params, strict=True)], top_n=TOP_N
    )
    ops = OPS[name]()
    plain = ops.sample(logits_SV, batch)
    host = builder.build(plan, batch.mode_S.numpy(), batch.temperature_S.numpy())
    if host is None:
        return plain
    arrays = {name: getattr(host, name) for name in LogitsInputs.__dataclass_fields__}
    inputs = LogitsInputs(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    history = TokenHistories(torch.device("cpu")).begin(host, inputs)
    return sample_processed(ops, logits_SV, batch, plain, inputs, history)


def draw_of(params: SamplingParams, row: int) -> Draw:
    return Draw(
        uniform=(row * 0.37) % 1,
        temperature=params.temperature,
        top_k=params.top_k,
        mode=params.logprobs_mode,
    )


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=scaled(40))
@given(rows=rows_of_a_step, seed=st.integers(0, 10_000))
def test_each_row_draws_from_its_own_processed_logits_and_reports_in_its_mode(
    name: str, rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    rows = rows[:2] if is_interpreted(name) else rows
    params = [row[0] for row in rows]
    logits = random_logits(len(rows), VOCABULARY, seed)
    before = logits.clone()
    known = [[*prompt, *output] for _, prompt, output in rows]
    result = drawn(name, logits, params, known, [len(prompt) for _, prompt, _ in rows])
    assert torch.equal(logits, before)
    assert result.is_finite_S.all()
    for row, (each, prompt, output) in enumerate(rows):
        raw_V, draw = logits[row].double().numpy(), draw_of(each, row + 1)
        drawn_V = processed_logits(raw_V, each, prompt, output)
        token = int(result.token_ids_S[row])
        if each.temperature == 0:
            assert drawn_V[token] >= drawn_V.max() - 1e-5
        else:
            assert_is_drawn(token, drawn_V, draw)
        is_processed = each.logprobs_mode == "processed" and each.temperature > 0
        expected_V = logprobs(drawn_V if is_processed else raw_V, draw)
        assert result.logprobs_S is not None
        np.testing.assert_allclose(result.logprobs_S[row], expected_V[token], **LOGPROB)
        assert result.top_logprobs_SN is not None
        best_N = np.sort(expected_V)[::-1][:TOP_N]
        np.testing.assert_allclose(result.top_logprobs_SN[row], best_N, **LOGPROB)
        assert result.top_ids_SN is not None
        named = result.top_ids_SN[row].tolist()
        if token in named:
            assert result.logprobs_S[row] == result.top_logprobs_SN[row, named.index(token)]


def test_a_row_that_processing_leaves_nothing_to_draw_or_that_was_not_finite_says_so() -> None:
    logits = random_logits(2, VOCABULARY, seed=1)
    logits[0, :2] = -torch.inf
    logits[1, 7] = torch.nan
    params = [SamplingParams(allowed_token_ids=[0, 1]), SamplingParams(allowed_token_ids=[3])]
    result = drawn("reference", logits, params, [[4], [4]], [1, 1])
    assert result.is_finite_S.tolist() == [False, False]


def test_a_history_follows_its_row_through_growth_and_a_new_request() -> None:
    """Rows 1 and 5 decode beside each other; then another request has row 1."""
    histories, builder = TokenHistories(torch.device("cpu")), LogitsBuilder(6)
    params = SamplingParams(presence_penalty=1.0)
    for row in (1, 5):
        builder.set_row(new_row(row, params, [], 2))

    def step(
        rows: list[int], lengths: list[int], token: int, new: dict[int, list[int]]
    ) -> list[list[int]]:
        plan = StepPlan(
            step_id=0,
            weights_version=0,
            sample_rows=np.array(rows, np.int32),
            sample_positions=np.array(lengths, np.int32),
            new_rows=tuple(new_row(row, params, known, 2) for row, known in new.items()),
        )
        host = builder.build(plan, np.zeros(len(rows), np.int8), np.ones(len(rows), np.float32))
        assert host is not None
        arrays = {name: getattr(host, name) for name in LogitsInputs.__dataclass_fields__}
        inputs = LogitsInputs(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        history = histories.begin(host, inputs)
        histories.append(inputs, torch.full((len(rows),), token))
        return [row[:n].tolist() for row, n in zip(history, lengths, strict=True)]

    assert step([1], [2], 30, {1: [10, 11]}) == [[10, 11]]
    assert step([1, 5], [3, 3], 31, {5: [20, 21, 22]}) == [[10, 11, 30], [20, 21, 22]]
    assert step([1, 5], [4, 4], 32, {}) == [[10, 11, 30, 31], [20, 21, 22, 31]]
    assert step([1, 5], [2, 5], 33, {1: [8, 9]}) == [[8, 9], [20, 21, 22, 31, 32]]


def test_only_rows_with_penalties_take_a_history_and_leave_it_to_the_next() -> None:
    builder = LogitsBuilder(1000)

    def histories(taken: dict[int, float]) -> list[int]:
        for row, penalty in taken.items():
            params = SamplingParams(presence_penalty=penalty, logit_bias={1: 1.0})
            builder.set_row(new_row(row, params, [], 2))
        plan = StepPlan(
            step_id=0,
            weights_version=0,
            sample_rows=np.array(list(taken), np.int32),
            sample_positions=np.full(len(taken), 3, np.int32),
        )
        host = builder.build(plan, np.zeros(len(taken), np.int8), np.ones(len(taken), np.float32))
        assert host is not None
        return host.histories_Q.tolist()

    assert histories({0: 0.0, 900: 1.0, 7: 1.0}) == [0, 1]
    assert histories({900: 0.0, 3: 1.0, 7: 1.5}) == [0, 1]
    assert histories({900: 1.0}) == [2]
