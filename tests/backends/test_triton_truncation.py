"""Top-k and top-p by histogram keep what sorting keeps, over many rows of every shape.

Against `sampling.sample`, which sorts: the token drawn at the end of the distribution is the last
one kept, and its processed log-prob tells the mass of all that are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.backends.forward_batch import MODE_CODES, SamplingBatch
from rollout.backends.ops import sampling as torch_sampler
from tests.contracts.implementations import OPS
from tests.tiny_models import IS_LONG

pytest.importorskip("triton")

from rollout.backends.ops import triton_sampling

NUM_ROWS = 100_000 if IS_LONG else 75
ROWS_PER_BATCH = 25
ALMOST_ONE = 1 - 2.0**-53
TOP_K = (0, 0, 1, 2, 7, 40, 63, 64, 65, 200, 10_000)
TOP_P = (0.0, 0.0, 1e-30, 1e-4, 0.1, 0.5, 0.9, 0.999, 1 - 2.0**-24, 1.0)
LEVELS = (1, 2, 8, 1_000_000)  # few make ties
SCALES = (0.0, 1e-30, 0.3, 3.0, 30.0, 1e30)
UNDECIDED = 1e-6  # of a row's mass: where rounding decides whether a token crosses top-p


def random_batch(generator: np.random.Generator) -> tuple[Tensor, SamplingBatch]:
    """Rows of one vocabulary, each with its own scale, ties, masks and parameters."""
    num_rows, vocabulary = ROWS_PER_BATCH, int(generator.choice([1, 2, 63, 64, 65, 300]))
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
        uniforms_S=torch.full((num_rows,), ALMOST_ONE, dtype=torch.float64),
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


def num_wrong(logits_SV: Tensor, sampling: SamplingBatch) -> int:
    """Rows whose last kept token, or kept mass, is another one than by sorting."""
    result = OPS["triton"]().sample(logits_SV, sampling)
    expected = torch_sampler.sample(logits_SV, sampling)
    assert torch.equal(result.is_finite_S, expected.is_finite_S)
    assert result.logprobs_S is not None
    assert expected.logprobs_S is not None
    is_far_S = (result.logprobs_S - expected.logprobs_S).abs() > 1e-5
    differ_S = (result.token_ids_S != expected.token_ids_S) | is_far_S
    return sum(not is_undecided(logits_SV[row], sampling, row) for row in differ_S.nonzero()[:, 0])


def is_undecided(logits_V: Tensor, sampling: SamplingBatch, row: int) -> bool:
    """Whether the mass of some ranks is within rounding of top-p of what top-k leaves; or of one,
    where the draw at the end may miss the last tokens, which weigh less than its rounding.
    """
    temperature, top_p = float(sampling.temperature_S[row]), float(sampling.top_p_S[row])
    ranked_V = logits_V.double().sort(descending=True).values
    weights_V = ((ranked_V - ranked_V[0]) / temperature).exp()
    weights_V = weights_V[: int(sampling.top_k_S[row]) or None]
    cumulative_V = weights_V.cumsum(0) / weights_V.sum()
    goals = {top_p if 0 < top_p < 1 else 1.0, 1.0}
    return any(bool((cumulative_V[:-1] - goal).abs().lt(UNDECIDED).any()) for goal in goals)


def test_thresholds_by_histogram_keep_what_sorting_keeps() -> None:
    generator = np.random.default_rng(0)
    for _ in range(NUM_ROWS // ROWS_PER_BATCH):
        assert num_wrong(*random_batch(generator)) == 0


@pytest.mark.parametrize("room", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_rows_with_more_candidates_than_there_is_room_for_are_searched_in_whole(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampling, "ROOM", room)
    monkeypatch.setattr(triton_sampling, "LIST_CHUNK", 64)
    generator = np.random.default_rng(1)
    assert num_wrong(*random_batch(generator)) == 0


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
    _, sampling = random_batch(generator)
    fields = {
        name: getattr(sampling, name)[:1]
        for name in ("uniforms_S", "temperature_S", "min_p_S", "mode_S")
    }
    fields["uniforms_S"] = torch.tensor([0.999], dtype=torch.float64)
    fields["temperature_S"] = torch.ones(1)
    sampling = replace(
        sampling, **fields, top_k_S=torch.tensor([top_k]), top_p_S=torch.tensor([top_p])
    )
    assert num_wrong(logits, sampling) == 0
