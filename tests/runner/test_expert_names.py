"""Weights of experts under the names of a live module, of its saved directory, and of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollout import DynamicInferenceEngine, WeightUpdateError
from rollout.coordinator.publisher import WeightPublisher, fetch_weights
from rollout.serve.control.announcement import ModelTensors, tensor_metadata
from rollout.serve.control.update_round import UpdateRound
from tests.run_seed import run_seed
from tests.runner.expert_dialects import (
    CORRECTED,
    MIXTURES,
    STACKED,
    Dialects,
    Weights,
    assert_serves,
    dialects,
    served,
    trainer,
)
from tests.tiny_models import IS_LONG

NUM_MIXTURES = 300 if IS_LONG else 12  # of names, for each family
all_mixtures = pytest.mark.parametrize("family", MIXTURES)
stacked_mixtures = pytest.mark.parametrize("family", STACKED)
corrected_mixtures = pytest.mark.parametrize("family", CORRECTED)
Door = Callable[[DynamicInferenceEngine, Weights, ModelTensors, np.random.Generator], None]


# ---- ways in


def in_a_dict(
    engine: DynamicInferenceEngine, given: Weights, model: ModelTensors, rng: np.random.Generator
) -> None:
    engine.update_weights(given, in_flight=True)


def one_by_one(
    engine: DynamicInferenceEngine, given: Weights, model: ModelTensors, rng: np.random.Generator
) -> None:
    engine.update_weights(iter(given.items()), in_flight=True)


def through_shared_memory(
    engine: DynamicInferenceEngine, given: Weights, model: ModelTensors, rng: np.random.Generator
) -> None:
    publisher = WeightPublisher()
    try:
        source = publisher.publish(given)
        checksum = source.tensors_checksum
        staged = engine.stage_weights(fetch_weights(source), source_checksum=checksum)
        engine.commit_weights(staged, in_flight=True)
    finally:
        publisher.close()


def in_cuts(
    engine: DynamicInferenceEngine, given: Weights, model: ModelTensors, rng: np.random.Generator
) -> None:
    """As a trainer that broadcasts some tensors at a time to a server."""
    pushed, names = UpdateRound(model, model.max_bytes), [*given]
    while names:
        size = int(rng.integers(1, len(names) + 1))
        cut, names = names[:size], names[size:]
        dtypes = [str(given[name].dtype) for name in cut]
        pushed.announce(tensor_metadata(cut, dtypes, [[*given[name].shape] for name in cut]))
        pushed.add([(name, given[name]) for name in cut], None)
    engine.update_weights(pushed.tensors(), in_flight=True)


DOORS: tuple[Door, ...] = (in_a_dict, one_by_one, through_shared_memory, in_cuts)


# ---- mixtures of names


def mixture_of(weights: Dialects, rng: np.random.Generator) -> Weights:
    """Each live tensor under its own name or by the names of its parts, sometimes both."""
    parts: dict[str, list[str]] = {}
    for name in weights.saved:
        parts.setdefault(weights.place(name)[0], []).append(name)
    given: Weights = {}
    for name, tensor in weights.live.items():
        choice = rng.choice(["live", "saved", "both"], p=[0.45, 0.45, 0.1])
        if choice != "saved":
            given[name] = tensor
        if choice != "live":
            given |= {part: weights.saved[part] for part in parts[name]}
    return given


def spoil(given: Weights, weights: Dialects, rng: np.random.Generator) -> None:
    """Leave tensors out, or add one: unknown, or known and equal or not. What is left may be sound.

    No tensor that is given is changed.
    """
    names, known = [*given], weights.live | weights.saved
    kind = rng.integers(4)
    if kind == 0:
        for name in rng.choice(names, size=int(rng.integers(1, 6)), replace=False):
            del given[str(name)]
    elif kind == 1:
        name = str(rng.choice([*known]))
        given.setdefault(name, known[name] + float(rng.integers(2)))
    elif kind == 2:
        name = str(rng.choice([*known]))
        given[f"{name}.x" if ".1." not in name else name.replace(".1.", ".64.")] = known[name]
    else:
        name = str(rng.choice([name for name in known if "experts" in name]))
        changed = known[name].clone()
        changed.view(-1)[-1] += float(rng.integers(2))
        given.setdefault(name, changed)


@all_mixtures
def test_names_of_both_kinds_are_taken_if_each_number_comes_and_none_differs(
    family: str, tmp_path: Path
) -> None:
    """Random mixtures, orders, faults and ways in; what is refused changes nothing."""
    rng = np.random.default_rng((run_seed(), MIXTURES.index(family)))
    trainer(family, 0).config.save_pretrained(tmp_path)
    model, (engine, _) = ModelTensors.of_directory(tmp_path), served(family)
    engine.update_weights(trainer(family, 0), in_flight=True)
    serving = 0
    for _ in range(NUM_MIXTURES):
        weights = dialects(family, 1 - serving)
        given = mixture_of(weights, rng)
        if rng.integers(3):
            spoil(given, weights, rng)
        given = {str(name): given[str(name)] for name in rng.permutation([*given])}
        door, version = DOORS[rng.integers(len(DOORS))], engine.weights_version
        if weights.are_whole(given):
            door(engine, given, model, rng)
            serving = 1 - serving
        else:
            with pytest.raises(WeightUpdateError):
                door(engine, given, model, rng)
            assert engine.weights_version == version
        assert_serves(family, serving)
