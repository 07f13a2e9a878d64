"""The contest of products over a model's weights, which the engine may have packed in place."""

from __future__ import annotations

import torch

from benchmarks.models import SMALL
from benchmarks.products import Contest
from rollout import InferenceConfig
from rollout.backends.select import create_backend
from rollout.models import build_model


def test_the_contest_multiplies_with_the_weights_that_the_engine_packed_in_their_memory() -> None:
    model = build_model(SMALL)
    plain = [layer.weight.detach().clone() for layer in model.linear_layers().values()]
    model.prepare(create_backend(InferenceConfig()))
    contest = Contest([*model.linear_layers().values()])
    assert all(map(torch.equal, contest.weights, plain))
    assert set(contest.chosen(1)) == {"x".join(map(str, weight.shape)) for weight in plain}
