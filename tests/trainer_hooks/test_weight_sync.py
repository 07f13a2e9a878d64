"""Sources of weights that a push takes."""

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rollout.engine.state import EngineState
from rollout.errors import EngineStateError
from tests.trainer_hooks.fakes import FakeAsyncLLM, FakeLLM
from trainer_hooks import InProcessWeightSync


def tied_module() -> nn.Module:
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    "source_of",
    [lambda module: module, lambda module: module.named_parameters(), nn.Module.state_dict],
    ids=["module", "named_parameters", "mapping"],
)
def test_modules_iterators_and_mappings_are_taken(
    source_of: Callable[[nn.Module], object],
) -> None:
    module, llm = nn.Linear(2, 3), FakeLLM(EngineState.SUSPENDED)
    report = InProcessWeightSync(llm).push(source_of(module), version=8)  # type: ignore[arg-type]
    assert report.version == llm.weights_version == 8
    assert sorted(llm.weights) == ["bias", "weight"]
    assert torch.equal(llm.weights["weight"], module.weight)


def test_live_tensors_are_handed_over_without_a_copy_or_a_graph() -> None:
    module, llm = nn.Linear(2, 3), FakeLLM(EngineState.SUSPENDED)
    InProcessWeightSync(llm).push(module)
    assert llm.weights["weight"].data_ptr() == module.weight.data_ptr()
    assert not llm.weights["weight"].requires_grad


def test_tied_parameters_come_once() -> None:
    llm = FakeLLM(EngineState.SUSPENDED)
    InProcessWeightSync(llm).push(tied_module())
    assert list(llm.weights) == ["0.weight"]


def test_apush_awaits_an_asynchronous_llm_and_takes_a_synchronous_one() -> None:
    for llm in (FakeAsyncLLM(EngineState.SUSPENDED), FakeLLM(EngineState.SUSPENDED)):
        report = asyncio.run(InProcessWeightSync(llm).apush(nn.Linear(2, 3), version=2))
        assert report.version == llm.weights_version == 2


def test_a_refusal_of_the_engine_passes_through() -> None:
    with pytest.raises(EngineStateError, match="RUNNING"):
        InProcessWeightSync(FakeLLM(EngineState.RUNNING)).push(nn.Linear(1, 1))
