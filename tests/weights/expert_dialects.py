"""A mixture's weights in both dialects, by transformers: a live module's, and what it saves.

And the ways in which they come to an engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rollout import DynamicInferenceEngine, WeightUpdateError
from rollout.models import CausalLM, build_model
from rollout.models.families.registry import FAMILIES
from rollout.serve.control.announcement import ModelTensors, tensor_metadata
from rollout.serve.control.weight_transfer import OpenUpdate
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from tests.family_cases import FAMILY_CASES, family_model, family_of
from tests.inspected_engine import InspectedEngine
from tests.tiny_models import tiny_engine

Weights = dict[str, Tensor]
_KINDS = {case: FAMILIES[family_of(case)].mixture for case in FAMILY_CASES}
MIXTURES = [case for case, kind in _KINDS.items() if kind is not None]
STACKED = [case for case in MIXTURES if case != "gpt_oss"]  # in live modules alone
CORRECTED = [case for case, kind in _KINDS.items() if kind is not None and kind.has_correction]
all_mixtures = pytest.mark.parametrize("family", MIXTURES)
stacked_mixtures = pytest.mark.parametrize("family", STACKED)
corrected_mixtures = pytest.mark.parametrize("family", CORRECTED)
UpdatePath = Callable[[DynamicInferenceEngine, Weights, ModelTensors, np.random.Generator], None]
_OF_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_PLACES = {  # stack, and which half of an expert's rows
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", None),
}


class Dialects(NamedTuple):
    """One model's weights: as its live module has them, and as transformers saves them."""

    live: Weights
    saved: Weights

    def place(self, name: str) -> tuple[str, Any]:
        """The live tensor, and the part of it, that a name of either dialect means.

        Raises LookupError for a name that means nothing.
        """
        if name in self.live:
            return name, ...
        live_name = name.replace("block_sparse_moe", "mlp")
        if match := _OF_EXPERT.fullmatch(live_name):
            block, expert, part = match.groups()
            stack, half = _PLACES[part]
            live_name = f"{block}.experts.{stack}"
            num_experts, num_rows = self.live[live_name].shape[:2]
            if int(expert) >= num_experts:
                raise LookupError(name)
            rows = slice(None)
            if half is not None:
                rows = slice(half * num_rows // 2, (half + 1) * num_rows // 2)
            return live_name, (int(expert), rows)
        if live_name not in self.live:
            raise LookupError(name)
        return live_name, ...

    def are_whole(self, given: Weights) -> bool:
        """Whether each number of the live module is given, and equal where it is given again."""
        values = {name: torch.zeros_like(tensor) for name, tensor in self.live.items()}
        is_given = {name: torch.zeros_like(v, dtype=torch.bool) for name, v in values.items()}
        for name, tensor in given.items():
            try:
                live_name, where = self.place(name)
            except LookupError:
                return False
            again = is_given[live_name][where]
            if not torch.equal(values[live_name][where][again], tensor[again]):
                return False
            values[live_name][where] = tensor
            is_given[live_name][where] = True
        return all(bool(tensor.all()) for tensor in is_given.values())


@cache
def trainer(family: str, seed: int) -> Any:
    """A live module, whose persistent buffers are random as well."""
    model = family_model(family, seed)
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict(keep_vars=True).values():
        if not isinstance(tensor, nn.Parameter):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return model


@cache
def dialects(family: str, seed: int) -> Dialects:
    """The tensors of that module, which are not to be written."""
    with TemporaryDirectory() as directory:
        trainer(family, seed).save_pretrained(directory)
        saved = load_file(Path(directory) / "model.safetensors")
    return Dialects(dict(trainer(family, seed).state_dict()), saved)


@cache
def served(family: str) -> tuple[InspectedEngine, CausalLM]:
    """An engine that serves some weights of the family, and its model. Tests share it."""
    model = build_model(trainer(family, 0))
    return tiny_engine(model, buffer_size_gb=0.001), model


@cache
def checksum_of(family: str, seed: int) -> str:
    """Of an engine made from the live module."""
    return tiny_engine(trainer(family, seed), num_blocks=8).weights_checksum()


def assert_serves(family: str, seed: int) -> None:
    """The very bits that transformers saves, under their names, and the module's checksum."""
    engine, model = served(family)
    weights, saved = model.read_weights(), dialects(family, seed).saved
    assert weights.keys() == saved.keys()
    for name, values in saved.items():
        assert torch.equal(weights[name], values), name
    assert engine.weights_checksum() == checksum_of(family, seed)


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda given: {name: given[name] for name in given if name not in names}


def last_of(names: list[str], part: str) -> str:
    """The last of the names that end with this part, or else have it."""
    return max(names, key=lambda name: (name.endswith(part), part in name, names.index(name)))


def assert_refused(family: str, given: Any, message: str) -> None:
    """Nothing is changed, and the next good push works."""
    engine, _ = served(family)
    engine.update_weights(trainer(family, 0), in_flight=True)
    version = engine.weights_version
    with pytest.raises(WeightUpdateError, match=message):
        engine.update_weights(given, in_flight=True)
    assert engine.weights_version == version
    assert_serves(family, 0)
    engine.update_weights(dialects(family, 1).saved, in_flight=True)
    assert_serves(family, 1)


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
    publisher = SharedTransport()
    try:
        source = publisher.publish(given)
        checksum = source.tensors_checksum
        staged = engine.stage_weights(WeightFetcher()(source), source_checksum=checksum)
        engine.commit_weights(staged, in_flight=True)
    finally:
        publisher.close()


def in_cuts(
    engine: DynamicInferenceEngine, given: Weights, model: ModelTensors, rng: np.random.Generator
) -> None:
    """As a trainer that broadcasts some tensors at a time to a server."""
    pushed, names = OpenUpdate(model, model.max_bytes), [*given]
    while names:
        size = int(rng.integers(1, len(names) + 1))
        cut, names = names[:size], names[size:]
        dtypes = [str(given[name].dtype) for name in cut]
        pushed.announce(tensor_metadata(cut, dtypes, [[*given[name].shape] for name in cut]))
        pushed.add([(name, given[name]) for name in cut], None)
    engine.update_weights(pushed.tensors(), in_flight=True)


UPDATE_PATHS: tuple[UpdatePath, ...] = (in_a_dict, one_by_one, through_shared_memory, in_cuts)
