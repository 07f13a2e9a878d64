"""Contract of Ops.sample and Ops.score: boundaries within 1e-6, log-probs within 2e-5."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.backends.base import Ops
from rollout.backends.ops.sampling import token_ranks
from tests.contracts.implementations import OPS, is_interpreted
from tests.contracts.sampling_oracle import Draw, batch_of, kept_tokens, logprobs, probabilities

BOUNDARY = 1e-6
LOGPROB = {"rtol": 1e-5, "atol": 2e-5}
ALMOST_ONE = 1 - 2.0**-53
MODES = ("raw", "temperature", "processed")


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return OPS[request.param]()


all_ops = pytest.mark.parametrize("name", OPS)


def random_logits(num_rows: int, vocabulary: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocabulary, generator=generator) * scale


draws = st.builds(
    Draw,
    uniform=st.one_of(st.floats(0, ALMOST_ONE), st.just(0.0), st.just(ALMOST_ONE)),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 5000, 2**31 - 1]),
    top_p=st.sampled_from([0.0, 0.0, 0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    mode=st.sampled_from(MODES),
)


def assert_is_drawn(token: int, logits_V: np.ndarray, draw: Draw) -> None:
    """Assert cdf[token - 1] <= uniform < cdf[token], up to BOUNDARY, and a probability above 0."""
    p_V = probabilities(logits_V, draw)
    cdf_V = p_V.cumsum()
    assert p_V[token] > 0
    assert cdf_V[token] - p_V[token] <= draw.uniform + BOUNDARY
    assert draw.uniform < cdf_V[token] + BOUNDARY


@all_ops
@given(
    rows=st.lists(draws, min_size=1, max_size=6),
    vocabulary=st.sampled_from([1, 2, 127, 128, 129, 1000, 3000]),
    seed=st.integers(0, 10_000),
)
def test_a_token_is_drawn_where_the_uniform_falls_on_the_cdf(
    name: str, rows: list[Draw], vocabulary: int, seed: int
) -> None:
    rows = rows[:2] if is_interpreted(name) else rows
    logits = random_logits(len(rows), vocabulary, seed)
    result = OPS[name]().sample(logits, batch_of(rows))
    assert result.is_finite_S.all()
    assert result.logprobs_S is not None
    for row, draw in enumerate(rows):
        token = int(result.token_ids_S[row])
        assert_is_drawn(token, logits[row].numpy(), draw)
        np.testing.assert_allclose(
            result.logprobs_S[row], logprobs(logits[row].numpy(), draw)[token], **LOGPROB
        )


@all_ops
@given(
    draw=draws,
    vocabulary=st.sampled_from([5, 200, 2500]),
    seed=st.integers(0, 10_000),
    levels=st.sampled_from([2, 7, 1000]),
)
def test_truncation_keeps_exactly_the_oracles_tokens(
    name: str, draw: Draw, vocabulary: int, seed: int, levels: int
) -> None:
    """Kept tokens are read from the processed top-n; logits on a few levels make ties."""
    logits = (random_logits(1, vocabulary, seed) * levels / 10).round() * 10 / levels
    draw = Draw(
        temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p,
        mode="processed",
    )  # fmt: skip
    result = OPS[name]().sample(logits, batch_of([draw], top_n=vocabulary))
    assert result.top_ids_SN is not None
    assert result.top_logprobs_SN is not None
    kept = result.top_ids_SN[result.top_logprobs_SN > -torch.inf].tolist()
    expected = kept_tokens(logits[0].numpy(), draw)
    # Where the mass lands within rounding of top-p the last token may go either way.
    if len(kept) != len(expected):
        assert nucleus_is_undecided(logits[0].numpy(), draw)
    else:
        assert sorted(kept) == sorted(expected)


@pytest.mark.parametrize("order", [[-0.0, 0.0], [0.0, -0.0]])
def test_zeros_of_either_sign_are_equal_when_truncated(ops: Ops, order: list[float]) -> None:
    """The difference of two zeros may be -0, whose sign bit must not count as a distance."""
    logits = torch.tensor([[-1.0, *order * 3, -2.0]])
    draw = Draw(temperature=1.0, top_k=4, top_p=0.9, uniform=0.99, mode="processed")
    for _ in range(5):
        result = ops.sample(logits, batch_of([draw], top_n=8))
        assert result.top_ids_SN is not None
        assert result.top_logprobs_SN is not None
        kept = result.top_ids_SN[result.top_logprobs_SN > -torch.inf].tolist()
        assert sorted(kept) == [1, 2, 3, 4]
        assert result.token_ids_S.tolist() == [4]


def nucleus_is_undecided(logits_V: np.ndarray, draw: Draw) -> bool:
    without_p = Draw(temperature=draw.temperature, top_k=draw.top_k)
    p_V = np.sort(probabilities(logits_V, without_p))[::-1]
    return bool(np.abs(p_V.cumsum() - np.float32(draw.top_p)).min() < 1e-6)


def test_greedy_takes_the_lowest_id_among_equals(ops: Ops) -> None:
    logits = torch.zeros(2, 300)
    logits[0, [41, 7, 200]] = 5.0
    result = ops.sample(logits, batch_of([Draw(temperature=0), Draw(temperature=0, uniform=0.9)]))
    assert result.token_ids_S.tolist() == [7, 0]


@pytest.mark.parametrize("mode", MODES)
def test_greedy_reports_raw_logprobs_in_every_mode(ops: Ops, mode: str) -> None:
    logits = random_logits(1, 500, seed=1)
    draw = Draw(temperature=0, top_k=2, top_p=0.5, min_p=0.1, mode=mode)
    result = ops.sample(logits, batch_of([draw], top_n=5))
    expected, order = torch.log_softmax(logits, 1).sort(1, descending=True)
    torch.testing.assert_close(result.logprobs_S, expected[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.top_logprobs_SN, expected[:, :5], rtol=1e-5, atol=1e-5)
    assert torch.equal(result.top_ids_SN, order[:, :5])


def test_sample_of_mixed_rows_equals_each_row_alone(ops: Ops) -> None:
    rows = [
        Draw(temperature=0), Draw(uniform=0.1, temperature=0.5), Draw(uniform=0.7, top_k=4),
        Draw(uniform=0.2, top_p=0.8, mode="processed"),
        Draw(uniform=0.9, min_p=0.2, mode="temperature"),
    ]  # fmt: skip
    logits = random_logits(len(rows), 4000, seed=2)
    together = ops.sample(logits, batch_of(rows, top_n=3))
    for row, draw in enumerate(rows):
        alone = ops.sample(logits[row : row + 1], batch_of([draw], top_n=3))
        assert together.token_ids_S[row] == alone.token_ids_S[0]
        torch.testing.assert_close(together.logprobs_S[row], alone.logprobs_S[0])
        assert torch.equal(together.top_ids_SN[row], alone.top_ids_SN[0])
        torch.testing.assert_close(together.top_logprobs_SN[row], alone.top_logprobs_SN[0])


@pytest.mark.parametrize("mode", MODES)
def test_top_n_is_in_the_rows_mode(ops: Ops, mode: str) -> None:
    logits = random_logits(1, 1000, seed=3)
    draw = Draw(temperature=0.6, top_k=3, mode=mode)
    result = ops.sample(logits, batch_of([draw], top_n=5))
    expected = logprobs(logits[0].numpy(), draw)
    order = np.argsort(-logits[0].numpy())[:5]
    visible = 3 if mode == "processed" else 5
    assert result.top_ids_SN[0, :visible].tolist() == order[:visible].tolist()
    np.testing.assert_allclose(
        result.top_logprobs_SN[0, :visible], expected[order[:visible]], **LOGPROB
    )
    assert (result.top_logprobs_SN[0, visible:] == -torch.inf).all()


@all_ops
@given(
    rows=st.lists(draws, min_size=1, max_size=4),
    vocabulary=st.sampled_from([5, 129, 3000]),
    seed=st.integers(0, 10_000),
    levels=st.sampled_from([3, 1000]),
)
def test_sample_log_prob_equals_its_top_n_entry(
    name: str, rows: list[Draw], vocabulary: int, seed: int, levels: int
) -> None:
    """Both are equal to the last bit, by which clients recognise a greedy token."""
    rows = rows[:2] if is_interpreted(name) else rows
    ops, top_n = OPS[name](), min(40, vocabulary)
    logits = (random_logits(len(rows), vocabulary, seed) * levels / 10).round() * 10 / levels
    drawn = ops.sample(logits, batch_of(rows, top_n=top_n))
    targets = logits.argsort(descending=True)[:, seed % top_n]
    scores = ops.score(logits, targets, top_n)
    results = (
        (drawn.token_ids_S, drawn.logprobs_S, drawn.top_ids_SN, drawn.top_logprobs_SN),
        (targets, scores.logprobs_P, scores.top_ids_PN, scores.top_logprobs_PN),
    )
    for ids, logprobs_S, top_ids_SN, top_logprobs_SN in results:
        ranks = token_ranks(logits, ids).tolist()
        for row, (token, rank) in enumerate(zip(ids.tolist(), ranks, strict=True)):
            top = dict(zip(top_ids_SN[row].tolist(), top_logprobs_SN[row].tolist(), strict=True))
            if token in top:
                assert top[token] == float(logprobs_S[row])
                num_equal = int((logits[row] == logits[row, token]).sum())
                assert rank <= list(top).index(token) + 1 < rank + num_equal
            else:
                assert rank + int((logits[row] == logits[row, token]).sum()) > top_n


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 5])
def test_sample_flags_a_row_that_is_not_finite_and_no_other(
    ops: Ops, bad: float, temperature: float, top_k: int
) -> None:
    logits = random_logits(3, 700, seed=4)
    alone = ops.sample(logits[:1], batch_of([Draw(uniform=0.3)]))
    logits[1, 650] = bad
    logits[2] = -torch.inf
    bad_row = Draw(temperature=temperature, top_k=top_k)
    result = ops.sample(logits, batch_of([Draw(uniform=0.3), bad_row, bad_row], top_n=2))
    assert result.is_finite_S.tolist() == [True, False, False]
    assert result.token_ids_S[0] == alone.token_ids_S[0]
    assert ((result.token_ids_S >= 0) & (result.token_ids_S < 700)).all()


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_masked_tokens_are_never_drawn(ops: Ops, uniform: float) -> None:
    logits = torch.full((1, 900), -torch.inf)
    logits[0, 300], logits[0, 500] = 0.0, -1.0
    result = ops.sample(logits, batch_of([Draw(uniform=uniform)]))
    assert result.token_ids_S.tolist() == [300 if uniform == 0 else 500]
    assert result.is_finite_S.all()


def test_sample_of_no_rows_returns_no_tokens(ops: Ops) -> None:
    result = ops.sample(torch.zeros(0, 50), batch_of([], top_n=2))
    assert result.token_ids_S.shape == result.logprobs_S.shape == (0,)
    assert result.top_ids_SN.shape == (0, 2)


def test_sample_returns_none_for_arrays_that_no_row_wants(ops: Ops) -> None:
    result = ops.sample(random_logits(2, 50, seed=5), batch_of([Draw(), Draw()], logprobs=False))
    assert result.logprobs_S is result.top_ids_SN is result.top_logprobs_SN is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sample_computes_other_dtypes_in_float32(ops: Ops, dtype: torch.dtype) -> None:
    logits = random_logits(4, 1000, seed=6).to(dtype)
    rows = [Draw(uniform=u, temperature=0.8) for u in (0.1, 0.4, 0.6, 0.9)]
    result = ops.sample(logits, batch_of(rows))
    expected = ops.sample(logits.float(), batch_of(rows))
    assert torch.equal(result.token_ids_S, expected.token_ids_S)
    assert torch.equal(result.logprobs_S, expected.logprobs_S)
    assert result.logprobs_S.dtype == torch.float32


def test_sample_does_not_change_the_logits(ops: Ops) -> None:
    logits = random_logits(3, 640, seed=7)
    before = logits.clone()
    ops.sample(
        logits, batch_of([Draw(top_k=3, mode="processed"), Draw(temperature=0), Draw()], top_n=2)
    )
    ops.score(logits, torch.tensor([1, 2, 3]), 2)
    assert torch.equal(logits, before)


@all_ops
@pytest.mark.parametrize("draw", [Draw(), Draw(temperature=0.7, top_k=20), Draw(top_p=0.9)])
def test_draws_follow_the_distribution(name: str, draw: Draw) -> None:
    """Chi-square of 20,000 draws; the bound is the 1 - 1e-6 quantile by Wilson and Hilferty."""
    if is_interpreted(name):
        pytest.skip("minutes in the interpreter, for what the test of the cdf says of each draw")
    num_draws, vocabulary = 20_000, 64
    logits = random_logits(1, vocabulary, seed=8, scale=1.0)
    uniforms = np.random.default_rng(0).random(num_draws)
    rows = [
        Draw(uniform=float(u), temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p)
        for u in uniforms
    ]
    result = OPS[name]().sample(logits.expand(num_draws, -1), batch_of(rows, logprobs=False))
    counts = np.bincount(result.token_ids_S.numpy(), minlength=vocabulary)
    expected = probabilities(logits[0].numpy(), draw) * num_draws
    likely = expected > 5
    assert counts[expected == 0].sum() == 0
    statistic = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < quantile


@all_ops
@given(
    num_rows=st.integers(1, 40),
    vocabulary=st.sampled_from([3, 130, 6000]),
    top_n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 10_000),
)
def test_score_is_log_softmax_at_the_targets(
    name: str, num_rows: int, vocabulary: int, top_n: int, seed: int
) -> None:
    logits = random_logits(num_rows, vocabulary, seed)
    targets = torch.randint(vocabulary, (num_rows,), generator=torch.Generator().manual_seed(seed))
    scores = OPS[name]().score(logits, targets, top_n)
    expected = torch.log_softmax(logits.double(), 1).float()
    torch.testing.assert_close(
        scores.logprobs_P, expected.gather(1, targets[:, None])[:, 0], **LOGPROB
    )
    if top_n == 0:
        assert scores.top_ids_PN is scores.top_logprobs_PN is None
    else:
        values, ids = expected.topk(top_n, dim=1)
        assert torch.equal(scores.top_ids_PN, ids)
        torch.testing.assert_close(scores.top_logprobs_PN, values, **LOGPROB)
