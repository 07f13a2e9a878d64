"""Expert weights under the names of a live module, of its saved directory, and of both."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rollout import WeightUpdateError
from rollout.serve.control.announcement import ModelTensors
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG
from tests.weights.expert_dialects import (
    MIXTURES,
    UPDATE_PATHS,
    Dialects,
    Weights,
    all_mixtures,
    assert_refused,
    assert_serves,
    corrected_mixtures,
    dialects,
    last_of,
    served,
    stacked_mixtures,
    trainer,
    without,
)

NUM_MIXTURES = 300 if IS_LONG else 12  # of names, for each family


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


@pytest.mark.drawn(4)
@all_mixtures
def test_stage_takes_expert_weights_by_both_kinds_of_names(family: str, tmp_path: Path) -> None:
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
        update, version = UPDATE_PATHS[rng.integers(len(UPDATE_PATHS))], engine.weights_version
        if weights.are_whole(given):
            update(engine, given, model, rng)
            serving = 1 - serving
        else:
            with pytest.raises(WeightUpdateError):
                update(engine, given, model, rng)
            assert engine.weights_version == version
        assert_serves(family, serving)


# ---- what is refused, by name


@pytest.mark.drawn(3)
@stacked_mixtures
def test_stage_names_the_missing_experts_of_half_a_stack(family: str) -> None:
    saved = dialects(family, 1).saved
    experts = [name for name in saved if ".experts." in name]
    gone = [name for name in experts if ".experts.1." in name or ".experts.3." in name]
    message = rf"lacks {len(gone)} of the model's tensors \('.*\.experts\.[13]\."
    assert_refused(family, without(*gone)(saved), message)
    assert_refused(family, without(experts[4])(saved), f"lacks 1 of .*'{re.escape(experts[4])}'")


@pytest.mark.drawn(3)
@stacked_mixtures
def test_stage_names_a_missing_stack_as_the_live_module_does(family: str) -> None:
    live = dialects(family, 1).live
    stack = last_of([*live], ".experts.down_proj")
    message = f"lacks 1 of the model's tensors \\('{re.escape(stack)}'\\)"
    assert_refused(family, without(stack)(live), message)


@stacked_mixtures
def test_stage_refuses_an_unknown_expert_by_name(family: str) -> None:
    saved = dialects(family, 1).saved
    name = last_of([*saved], ".experts.0.")
    extra = name.replace(".experts.0.", ".experts.64.")
    assert_refused(family, saved | {extra: saved[name]}, f"model lacks .*'{re.escape(extra)}'")


@stacked_mixtures
def test_stage_refuses_a_stack_that_differs_from_its_experts(family: str) -> None:
    weights = dialects(family, 1)
    stack = last_of([*weights.live], ".experts.gate_up_proj")
    engine, _ = served(family)
    both = weights.saved | {stack: weights.live[stack]}
    engine.update_weights(both, in_flight=True)
    assert_serves(family, 1)
    changed = weights.live[stack].clone()
    changed[2, 0, 0] += 1
    message = rf"'{re.escape(stack)}' \('.*experts\.2\.(gate_proj|w1)\.weight' in it\).*same weight"
    assert_refused(family, weights.saved | {stack: changed}, message)


@all_mixtures
def test_stage_names_an_expert_tensor_that_is_not_finite(family: str) -> None:
    live = dialects(family, 1).live
    stack = last_of([*live], ".experts.down_proj")
    changed = live[stack].clone()
    changed[1, 0, 0] = float("nan")
    assert_refused(family, live | {stack: changed}, f"'{re.escape(stack)}'.*holds NaN")


@corrected_mixtures
def test_stage_refuses_parameters_without_the_routers_corrections(
    family: str,
) -> None:
    module = trainer(family, 1)
    message = r"e_score_correction_bias'.*named_parameters\(\) leaves out: send state_dict\(\)"
    assert_refused(family, module.named_parameters(), message)
    saved = dialects(family, 1).saved
    gone = last_of([*saved], "e_score_correction_bias")
    assert_refused(family, without(gone)(saved), f"lacks 1 .*'{re.escape(gone)}'.*state_dict")
