"""Top-k and top-p by histogram keep the tokens that sorting keeps, over many rows of every shape.

The kernels' thresholds are those of a model of them, to the last bit, in the interpreter; and the
model's, which is a thousand times quicker, leave the tokens that `truncation.keep_mask` leaves by
sorting.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.backends.forward_batch import MODE_CODES, SamplingBatch
from rollout.backends.ops.truncation import keep_mask
from tests.tiny_models import IS_LONG

pytest.importorskip("triton")

from rollout.backends.cuda import sampling as triton_sampling
from tests.backends.truncation_model import LOWEST, thresholds

# Rows of each part, which can run beside each other: some 25 ms a row.
NUM_PARTS, NUM_INTERPRETED = (20, 5_000) if IS_LONG else (1, 75)
NUM_MODELLED = 100_000 if IS_LONG else 3_000
ROWS_PER_BATCH = 25
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOP_K = (0, 0, 1, 2, 7, 40, 63, 64, 65, 200, 10_000)
TOP_P = (0.0, 0.0, 1e-30, 1e-4, 0.1, 0.5, 0.9, 0.999, 1 - 2.0**-24, 1.0)
LEVELS = (1, 2, 8, 1_000_000)  # few make ties
SCALES = (0.0, 1e-30, 0.3, 3.0, 30.0, 1e30)
# Of a row's mass. The model's weights and the sorting's are float32 exponentials of two libraries,
# each within a unit of the last place, 2^-23, or two; whole masses round by far less.
ROUNDING = 2.0**-21


def random_batch(
    generator: np.random.Generator, num_rows: int = ROWS_PER_BATCH
) -> tuple[Tensor, SamplingBatch]:
    """Return rows of one vocabulary, each with its own scale, ties, masks and parameters."""
    vocabulary = int(generator.choice([1, 2, 63, 64, 65, 300]))
    x_SV = generator.standard_normal((num_rows, vocabulary))
    levels_S1 = generator.choice(LEVELS, (num_rows, 1))
    x_SV = np.round(x_SV * levels_S1) / levels_S1 * generator.choice(SCALES, (num_rows, 1))
    masks_S1 = generator.choice([0.0, 0.0, 0.3, 0.99], (num_rows, 1))
    is_masked_SV = generator.random(x_SV.shape) < masks_S1
    is_masked_SV[:, -1] = False  # something is left
    x_SV = np.where(is_masked_SV, generator.choice([-np.inf, -3e38], (num_rows, 1)), x_SV)

    def choice(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(generator.choice(values, num_rows)).to(dtype)

    sampling = SamplingBatch(
        uniforms_S=torch.zeros(num_rows, dtype=torch.float64),
        temperature_S=choice((0.1, 0.7, 1.0, 1.0, 2.0), torch.float32),
        top_k_S=choice(TOP_K, torch.int64),
        top_p_S=choice(TOP_P, torch.float32),
        min_p_S=torch.zeros(num_rows),
        mode_S=torch.full((num_rows,), MODE_CODES["processed"], dtype=torch.int8),
        all_greedy=False,
        any_greedy=False,
        any_truncation=True,
        any_logprobs=True,
        top_n=0,
    )
    return torch.from_numpy(x_SV).float(), sampling


def assert_as_the_model(logits_SV: Tensor, sampling: SamplingBatch) -> None:
    """Assert that the kernels' thresholds equal the model's."""
    fields = {
        name: getattr(sampling, name).to(DEVICE)
        for name in ("temperature_S", "top_k_S", "top_p_S", "min_p_S", "mode_S")
    }
    num_chunks = -(-logits_SV.shape[1] // triton_sampling.CHUNK)
    missing = num_chunks * triton_sampling.CHUNK - logits_SV.shape[1]
    padded_SV = torch.nn.functional.pad(logits_SV, (0, missing), value=-torch.inf)
    max_SC = padded_SV.unflatten(1, (num_chunks, -1)).amax(2).to(DEVICE)
    _, threshold_S, last_tie_S, _ = triton_sampling.truncate(
        logits_SV.to(DEVICE), max_SC, max_SC.double(), replace(sampling, **fields)
    )
    expected_S, expected_ties_S = thresholds(logits_SV.numpy(), sampling)
    np.testing.assert_array_equal(threshold_S.cpu().numpy(), expected_S)
    np.testing.assert_array_equal(last_tie_S.cpu().numpy(), expected_ties_S)


@pytest.mark.device
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_thresholds_of_the_kernels_are_those_of_their_model(part: int) -> None:
    generator = np.random.default_rng(part)
    for _ in range(NUM_INTERPRETED // ROWS_PER_BATCH):
        assert_as_the_model(*random_batch(generator))


def test_the_model_keeps_what_sorting_keeps() -> None:
    """But for tokens at which the mass before them is top-p of all within rounding: each token of
    which the two think differently is one of those.
    """
    generator, num_differ = np.random.default_rng(1), 0
    for _ in range(NUM_MODELLED // 500):
        logits_SV, sampling = random_batch(generator, 500)
        threshold_S1, last_S1 = (
            torch.from_numpy(part)[:, None] for part in thresholds(logits_SV.numpy(), sampling)
        )
        is_tie_SV = (logits_SV == threshold_S1) & (torch.arange(logits_SV.shape[1]) <= last_S1)
        kept_SV = (logits_SV > threshold_S1) | is_tie_SV
        expected_SV = kept_by_sorting(logits_SV, sampling)
        differ_SV = (kept_SV != expected_SV) & (logits_SV >= float(LOWEST))  # -inf is no token
        for row in differ_SV.any(1).nonzero()[:, 0].tolist():
            distance_V = distance_from_top_p(logits_SV[row], sampling, row)
            assert distance_V[differ_SV[row]].max() <= ROUNDING
            num_differ += 1
    assert num_differ <= max(1, NUM_MODELLED // 10_000), "rounding decides in few rows, if in any"


def kept_by_sorting(logits_SV: Tensor, sampling: SamplingBatch) -> Tensor:
    inverse_S = sampling.temperature_S.reciprocal()
    weights_SV = ((logits_SV - logits_SV.amax(1, keepdim=True)) * inverse_S[:, None]).exp()
    cuts = sampling.top_k_S, sampling.top_p_S, sampling.min_p_S
    return keep_mask(logits_SV, weights_SV, inverse_S, *cuts)


def distance_from_top_p(logits_V: Tensor, sampling: SamplingBatch, row: int) -> Tensor:
    """|mass of the tokens ranked before each token - top-p|, of what top-k leaves, in float64; 1
    for tokens that top-k drops, and where there is no top-p.
    """
    top_p, top_k = float(sampling.top_p_S[row]), int(sampling.top_k_S[row]) or len(logits_V)
    ranked_V, order_V = logits_V.double().sort(descending=True, stable=True)
    weights_V = ((ranked_V - ranked_V[0]) / sampling.temperature_S[row].double()).exp()[:top_k]
    before_V = (weights_V.cumsum(0) - weights_V) / weights_V.sum()
    distance_V = torch.ones_like(ranked_V)
    if 0 < top_p < 1:
        distance_V[order_V[:top_k]] = (before_V - top_p).abs()
    return distance_V


@pytest.mark.device
@pytest.mark.parametrize("room", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_rows_with_more_candidates_than_there_is_room_for_are_searched_in_whole(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampling, "ROOM", room)
    monkeypatch.setattr(triton_sampling, "LIST_CHUNK", 64)
    assert_as_the_model(*random_batch(np.random.default_rng(1)))


@pytest.mark.drawn(1)
@pytest.mark.device
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        (1000, 0.5),
        *(
            pytest.param(*cut, marks=pytest.mark.slow)
            for cut in [(50, 0.0), (0, 0.95), (151_935, 0.99)]
        ),
    ],
)
def test_thresholds_hold_at_the_vocabulary_of_large_models(top_k: int, top_p: float) -> None:
    generator = np.random.default_rng(2)
    logits = torch.from_numpy(generator.standard_normal((1, 151_936)) * 3).float()
    _, sampling = random_batch(generator, 1)
    sampling = replace(
        sampling,
        temperature_S=torch.ones(1),
        top_k_S=torch.tensor([top_k]),
        top_p_S=torch.tensor([top_p]),
    )
    assert_as_the_model(logits, sampling)
