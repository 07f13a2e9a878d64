"""TritonOps beyond the contract suite: chunk edges, large sizes, capture, compilation."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.ops import sampling as torch_sampler
from rollout.backends.ops.reference import ReferenceOps
from rollout.step.output import SampleResult
from tests.contracts.implementations import OPS
from tests.contracts.sampling_oracle import Draw, batch_of, kept_tokens, logprobs, probabilities
from tests.run_kind import scaled

pytest.importorskip("triton")

from tests.backends.aot_usage import compiled

CHUNK = 2048
BOUNDARY = 1e-6
LOGPROB = {"rtol": 1e-5, "atol": 2e-5}
ALMOST_ONE = 1 - 2.0**-53
MAX_SHARED_MEMORY_BYTES = 227 * 1024  # of one block on sm_90

draws = st.builds(
    Draw,
    uniform=st.one_of(st.floats(0, ALMOST_ONE), st.just(0.0), st.just(ALMOST_ONE)),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    mode=st.sampled_from(["raw", "temperature", "processed"]),
)


def random_logits(num_rows: int, vocabulary: int, seed: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocabulary, generator=generator) * scale


def assert_sampled_as_by_torch(
    logits: Tensor, rows: list[Draw], result: SampleResult[Tensor]
) -> None:
    """Assert equal tokens, unless the uniform is within BOUNDARY of the edge between two tokens."""
    expected = torch_sampler.sample(logits, batch_of(rows))
    assert torch.equal(result.is_finite_S, expected.is_finite_S)
    for row, draw in enumerate(rows):
        token, logits_V = int(result.token_ids_S[row]), logits[row].numpy()
        if token != expected.token_ids_S[row]:
            assert draw.temperature > 0
            p_V = probabilities(logits_V, draw)
            cdf_V = p_V.cumsum()
            assert p_V[token] > 0
            assert cdf_V[token] - p_V[token] <= draw.uniform + BOUNDARY
            assert draw.uniform < cdf_V[token] + BOUNDARY
        np.testing.assert_allclose(
            result.logprobs_S[row], logprobs(logits_V, draw)[token], **LOGPROB
        )


@pytest.mark.device
@given(
    rows=st.lists(draws, min_size=1, max_size=4),
    vocabulary=st.sampled_from([1, 127, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]),
    levels=st.sampled_from([1, 3, 1_000_000]),
    num_masked=st.integers(0, 5000),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=scaled(40))
def test_rows_without_truncation_are_sampled_as_by_torch(
    rows: list[Draw], vocabulary: int, levels: int, num_masked: int, seed: int
) -> None:
    """Few levels make ties; masked logits leave whole chunks without mass."""
    logits = (random_logits(len(rows), vocabulary, seed) * levels).round() / levels
    logits[:, 1 : 1 + num_masked] = -torch.inf
    assert_sampled_as_by_torch(logits, rows, OPS["triton"]().sample(logits, batch_of(rows)))


@pytest.mark.device
@pytest.mark.parametrize("vocabulary", [32_000, 151_936])
def test_large_vocabularies_are_sampled_as_by_torch(vocabulary: int) -> None:
    rows = [Draw(uniform=0.37, temperature=0.8), Draw(uniform=ALMOST_ONE), Draw(temperature=0)]
    logits = random_logits(len(rows), vocabulary, seed=vocabulary)
    assert_sampled_as_by_torch(logits, rows, OPS["triton"]().sample(logits, batch_of(rows)))


truncating_draws = st.builds(
    Draw,
    uniform=st.one_of(st.floats(0, ALMOST_ONE), st.just(0.0), st.just(ALMOST_ONE)),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 3, 40, 2500]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    mode=st.just("processed"),
)


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the masks over temperature
@given(
    draw=truncating_draws,
    vocabulary=st.sampled_from([1, 5, 200, CHUNK + 1, 2 * CHUNK + 3]),
    levels=st.sampled_from([1, 2, 7, 1_000_000]),
    num_masked=st.sampled_from([0, 4, 4000]),
    mask=st.sampled_from([-torch.inf, torch.finfo(torch.float32).min]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=scaled(60))
def test_truncation_without_a_sort_keeps_the_oracles_tokens(
    draw: Draw, vocabulary: int, levels: int, num_masked: int, mask: float, seed: int
) -> None:
    """The processed log-prob shows the kept mass, and the token shows which ids were kept."""
    logits = (random_logits(1, vocabulary, seed) * levels).round() / levels
    logits[:, 1 : 1 + num_masked] = mask
    assume(not is_undecided(logits[0].numpy(), draw))
    assert_sampled_as_by_torch(logits, [draw], OPS["triton"]().sample(logits, batch_of([draw])))


def is_undecided(logits_V: np.ndarray, draw: Draw) -> bool:
    """Return whether the mass of the first ranks is within rounding of top-p."""
    of_top_k = Draw(temperature=draw.temperature, top_k=draw.top_k)
    p_V = np.sort(probabilities(logits_V, of_top_k))[::-1]
    return bool(np.abs(p_V.cumsum() - np.float32(draw.top_p)).min() < BOUNDARY)


@pytest.mark.drawn(4)
@pytest.mark.device
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 0.0), (7, 0.0), (0, 0.05), (7, 0.5)])
@pytest.mark.parametrize("spread", [0.0, 1e-30, 1e30])
def test_ties_at_the_threshold_keep_the_lowest_ids(top_k: int, top_p: float, spread: float) -> None:
    """Zeros of both signs are equal; far outliers do not keep the search from ending."""
    logits = torch.full((1, CHUNK + 100), -spread)
    logits[0, 50:70] = 0.0
    logits[0, 60:65] = -0.0
    draw = Draw(uniform=ALMOST_ONE, top_k=top_k, top_p=top_p, mode="processed")
    result = OPS["triton"]().sample(logits, batch_of([draw]))
    kept = kept_tokens(logits[0].numpy(), draw)
    assert result.token_ids_S.tolist() == [max(kept)]
    torch.testing.assert_close(result.logprobs_S, -torch.tensor([len(kept)]).log(), **LOGPROB)


@pytest.mark.device
def test_truncated_rows_and_others_share_a_batch() -> None:
    logits = random_logits(6, 5000, seed=9)
    rows = [
        Draw(uniform=0.9, top_k=3), Draw(uniform=0.9, temperature=0.7),
        Draw(temperature=0, top_k=2, top_p=0.1, min_p=1.0, mode="processed"),
        Draw(uniform=0.5, top_p=0.3, temperature=1.3), Draw(uniform=0.99, min_p=0.3),
        Draw(uniform=0.7, mode="temperature", temperature=0.5, top_k=9, top_p=0.9, min_p=0.01),
    ]  # fmt: skip
    assert_sampled_as_by_torch(logits, rows, OPS["triton"]().sample(logits, batch_of(rows)))


@pytest.mark.device
@pytest.mark.parametrize("uniform", [0.0, 1e-300, ALMOST_ONE])
@pytest.mark.parametrize("gap", [104.5, 120.0, 1e30])
def test_tokens_whose_weight_underflows_are_never_drawn(uniform: float, gap: float) -> None:
    """Chunks of such tokens lie on both sides; relative to their own largest they have mass."""
    logits = torch.full((1, 3 * CHUNK), -gap)
    logits[0, [CHUNK + 5, CHUNK + 900]] = 0.0
    result = OPS["triton"]().sample(logits, batch_of([Draw(uniform=uniform)]))
    assert result.token_ids_S.tolist() == [CHUNK + (900 if uniform == ALMOST_ONE else 5)]


@pytest.mark.drawn(5)
@pytest.mark.device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of infinities
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 6])
@pytest.mark.parametrize("top_k", [0, 4])
def test_one_bad_logit_in_any_chunk_flags_its_row_only(bad: float, place: int, top_k: int) -> None:
    logits = random_logits(3, 2 * CHUNK + 7, seed=1)
    rows = [
        Draw(uniform=0.3),
        Draw(uniform=0.6, top_k=top_k, top_p=0.1 * top_k),
        Draw(uniform=0.9, temperature=0.5),
    ]
    alone = OPS["triton"]().sample(logits, batch_of(rows))
    logits[1, place] = bad
    result = OPS["triton"]().sample(logits, batch_of(rows))
    assert result.is_finite_S.tolist() == [True, False, True]
    assert result.token_ids_S.tolist() == [alone.token_ids_S[0], 0, alone.token_ids_S[2]]
    assert torch.equal(result.logprobs_S[[0, 2]], alone.logprobs_S[[0, 2]])


@pytest.mark.device
def test_logits_may_be_a_slice_of_a_wider_matrix_or_one_repeated_row() -> None:
    ops, rows = OPS["triton"](), [Draw(uniform=0.2), Draw(uniform=0.8)]
    wide = random_logits(2, 3000, seed=2)
    repeated = wide[:1].expand(2, -1)
    for view in (wide[:, 100:2900], wide[:, ::2], repeated):
        expected = ops.sample(view.clone(), batch_of(rows))
        result = ops.sample(view, batch_of(rows))
        assert torch.equal(result.token_ids_S, expected.token_ids_S)
        assert torch.equal(result.logprobs_S, expected.logprobs_S)


@pytest.mark.device
def test_a_target_outside_the_vocabulary_scores_nan() -> None:
    logits = random_logits(4, 5000, seed=3)
    targets = torch.tensor([-1, 0, 4999, 5000])
    scored = OPS["triton"]().score(logits, targets, 0).logprobs_P
    assert scored.isnan().tolist() == [True, False, False, True]


@pytest.mark.device
def test_scores_are_right_where_whole_chunks_are_masked() -> None:
    logits = random_logits(2, 9000, seed=4)
    logits[0, :8500] = -torch.inf
    logits[1, 100:] = -torch.inf
    targets = torch.tensor([8600, 50])
    scored = OPS["triton"]().score(logits, targets, 0).logprobs_P
    expected = torch.log_softmax(logits.double(), 1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scored, expected.float(), **LOGPROB)


@pytest.mark.device
@pytest.mark.parametrize("size", [1, 129, 5120, 16_384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_long_rows_equal_the_reference(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x, residual = (torch.randn(3, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator)
    actual = OPS["triton"]().add_rms_norm(x, residual, weight, 1e-6)
    normed, total = ReferenceOps().add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(actual[1], total)
    torch.testing.assert_close(actual[0], normed)


@pytest.mark.device
def test_the_activation_is_rounded_before_the_product_as_in_the_reference() -> None:
    gate_up = random_logits(4, 6000, seed=5).half()
    actual, expected = OPS["triton"]().silu_mul(gate_up), ReferenceOps().silu_mul(gate_up)
    # Where exp is off by its last bit the rounding may go the other way.
    assert (actual != expected).float().mean() < 0.01


@pytest.mark.device
def test_results_have_no_gaps_though_the_argument_has() -> None:
    x = random_logits(6, 10 * 32, seed=6).view(6, 10, 32)[:, 2:7]
    normed = OPS["triton"]().rms_norm(x, torch.ones(32), 1e-6)
    assert normed.is_contiguous()
    torch.testing.assert_close(normed, ReferenceOps().rms_norm(x, torch.ones(32), 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 20])
def test_a_captured_graph_samples_from_the_logits_of_its_replay(top_k: int) -> None:
    from rollout.backends.cuda.ops import TritonOps

    ops = TritonOps()
    rows = [Draw(uniform=0.1 * i, temperature=0.1 * i, top_k=top_k) for i in range(9)]
    batch = batch_of(rows)
    tensors = {
        field.name: getattr(batch, field.name).cuda()
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    batch = replace(batch, **tensors)
    logits = random_logits(len(rows), 32_000, seed=10).cuda()
    ops.sample(logits, batch)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.sample(logits, batch)
    logits.copy_(random_logits(len(rows), 32_000, seed=11))
    graph.replay()
    expected = ops.sample(logits, batch)
    assert torch.equal(captured.token_ids_S, expected.token_ids_S)
    assert torch.equal(captured.logprobs_S, expected.logprobs_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "num_kernels"),
    [
        ("bf16", 12),
        *(pytest.param(name, 12, marks=pytest.mark.slow) for name in ("fp16", "fp32")),
        pytest.param("others", 30, marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_for_an_h100_within_its_memory(
    share: str, num_kernels: int, tmp_path: Path
) -> None:
    usage = compiled("aot_ops", share, tmp_path)
    assert len(usage) >= num_kernels
    assert max(used["shared"] for used in usage.values()) <= MAX_SHARED_MEMORY_BYTES
    assert not [name for name, used in usage.items() if used["stack"]], "registers spill"
