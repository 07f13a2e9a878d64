"""WeightSync: the sources that a push accepts, and its errors and attempts."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rollout import LoraAdapter
from rollout.control.state import EngineState
from rollout.errors import ConfigError, EngineStateError, WeightUpdateError
from tests.lora_adapters import PeftLike, merged, random_adapter
from tests.tiny_models import tiny_engine, tiny_model
from tests.trainer_hooks.fakes import FakeLLM, fake_async_llm
from trainer_hooks import InProcessWeightSync, WeightSync, full_tensors


def tied_module() -> nn.Module:
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    "source_of",
    [lambda module: module, lambda module: module.named_parameters(), nn.Module.state_dict],
    ids=["module", "named_parameters", "mapping"],
)
def test_push_accepts_modules_iterators_and_mappings(
    source_of: Callable[[nn.Module], object],
) -> None:
    module, llm = nn.Linear(2, 3), FakeLLM(EngineState.SUSPENDED)
    report = InProcessWeightSync(llm).push(source_of(module), version=8)  # type: ignore[arg-type]
    assert report.version == llm.weights_version == 8
    assert sorted(llm.weights) == ["bias", "weight"]
    assert torch.equal(llm.weights["weight"], module.weight)


def test_push_passes_live_tensors_without_a_copy_or_a_graph() -> None:
    module, llm = nn.Linear(2, 3), FakeLLM(EngineState.SUSPENDED)
    InProcessWeightSync(llm).push(module)
    assert llm.weights["weight"].data_ptr() == module.weight.data_ptr()
    assert not llm.weights["weight"].requires_grad


def test_push_sends_tied_parameters_once() -> None:
    llm = FakeLLM(EngineState.SUSPENDED)
    InProcessWeightSync(llm).push(tied_module())
    assert list(llm.weights) == ["0.weight"]


def test_apush_accepts_an_asynchronous_and_a_synchronous_llm() -> None:
    for llm in (fake_async_llm(EngineState.SUSPENDED), FakeLLM(EngineState.SUSPENDED)):
        report = asyncio.run(InProcessWeightSync(llm).apush(nn.Linear(2, 3), version=2))
        assert report.version == llm.weights_version == 2


@pytest.mark.filterwarnings("error")  # such as one of a coroutine that was never awaited
def test_push_to_an_asynchronous_llm_is_refused_and_names_apush() -> None:
    llm = fake_async_llm(EngineState.SUSPENDED)
    with pytest.raises(ConfigError, match=r"FakeAsyncLLM.*use `await apush"):
        InProcessWeightSync(llm).push(nn.Linear(2, 3), version=2)
    assert not llm.llm.calls


def test_push_raises_the_engines_refusal() -> None:
    with pytest.raises(EngineStateError, match="RUNNING"):
        InProcessWeightSync(FakeLLM(EngineState.RUNNING)).push(nn.Linear(1, 1))


class DisconnectsAnEngine(FakeLLM):
    """An LLM that loses an engine in its first `how_often` updates, which fail."""

    def __init__(self, how_often: int, *, is_transient: bool = True) -> None:
        super().__init__(EngineState.SUSPENDED)
        self.left, self.is_transient = how_often, is_transient

    def update_weights(self, named_tensors: Any, version: int | None = None) -> Any:
        if self.left:
            self.left -= 1
            error = WeightUpdateError("rank 1 disconnected before its vote")
            error.is_transient = self.is_transient
            raise error
        return super().update_weights(named_tensors, version)


@pytest.mark.parametrize("num_disconnects", [1, 3])
def test_push_repeats_an_update_after_an_engine_disconnected(
    num_disconnects: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightSync, "retry_pauses_s", (0.0, 0.01, 0.0))
    module = nn.Linear(2, 3)
    llm = DisconnectsAnEngine(num_disconnects)
    assert InProcessWeightSync(llm).push(module, version=8).version == 8
    llm = DisconnectsAnEngine(num_disconnects)
    assert asyncio.run(InProcessWeightSync(llm).apush(module, version=8)).version == 8


def test_push_fails_if_refused_or_if_an_engine_disconnects_at_each_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightSync, "retry_pauses_s", (0.0, 0.01))
    module = nn.Linear(2, 3)
    for llm in (DisconnectsAnEngine(3), DisconnectsAnEngine(1, is_transient=False)):
        with pytest.raises(WeightUpdateError, match="rank 1"):
            InProcessWeightSync(llm).push(module, version=8)
        llm.left = 3
        with pytest.raises(WeightUpdateError, match="rank 1"):
            asyncio.run(InProcessWeightSync(llm).apush(module, version=8))


# ---- adapters


def test_push_of_a_peft_model_sends_its_active_adapter() -> None:
    model, llm = PeftLike("default"), FakeLLM(EngineState.SUSPENDED)
    sync = InProcessWeightSync(llm)
    for source in (model, LoraAdapter.from_peft(model)):
        sync.push(source)
        assert sorted(name.partition(".lora_")[2] for name in llm.weights) == [
            "A.default.weight",
            "B.default.weight",
        ]
        assert not any(tensor.requires_grad for tensor in llm.weights.values())
    asyncio.run(InProcessWeightSync(fake_async_llm(EngineState.SUSPENDED)).apush(model))


def test_join_push_gathers_the_adapter_that_another_rank_pushes() -> None:
    names = [name for name, _ in full_tensors(PeftLike("default"))]
    assert names == sorted(LoraAdapter.from_peft(PeftLike("default")).tensors)


def test_push_of_a_lora_adapter_sends_the_current_values_of_its_tensors() -> None:
    hf = tiny_model("qwen2", seed=1)
    base = {name: p.detach().clone() for name, p in hf.named_parameters()}
    adapter, engine = random_adapter(base), tiny_engine(hf)
    engine.pause()
    for scale in (1.0, -0.5):
        for tensor in adapter.tensors.values():
            tensor.mul_(scale)
        checksum = InProcessWeightSync(engine).push(adapter).checksum
    full = tiny_engine(hf)
    assert full.update_weights(merged(base, adapter), in_flight=True).checksum == checksum
