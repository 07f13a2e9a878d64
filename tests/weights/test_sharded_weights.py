"""Weights as trainers hold them: sharded, with buffers, in tensors that are not plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rollout import (
    DynamicInferenceEngine,
    EngineState,
    InferenceConfig,
    ModelError,
    WeightUpdateError,
)
from rollout.models import CausalLM, build_model
from rollout.models.checkpoints.loading import without_shards
from rollout.models.plain_tensors import is_sharded
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from tests.family_cases import family_model
from tests.processes import PROCESSES
from tests.tiny_models import tiny_engine, tiny_model
from tests.trainer_hooks.fakes import FakeLLM
from tests.weights.trainer_ranks import gloo_mesh, publish_or_take_part
from trainer_hooks.weight_sync import InProcessWeightSync

NORM = "model.norm.weight"
BIAS = "model.layers.0.mlp.e_score_correction_bias"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    yield gloo_mesh(dist.HashStore())
    dist.destroy_process_group()


def sharded_model(mesh: DeviceMesh) -> Any:
    """As a trainer with FSDP2 has it."""
    model = tiny_model(seed=2)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@cache
def plain_checksum() -> str:
    return tiny_engine(tiny_model(seed=2)).weights_checksum()


SOURCES: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "named_parameters": lambda model: model.named_parameters(),
    "state_dict": lambda model: model.state_dict(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_stage_gathers_sharded_parameters(mesh: DeviceMesh, source: str) -> None:
    engine = tiny_engine(tiny_model(seed=1))
    report = engine.update_weights(SOURCES[source](sharded_model(mesh)), in_flight=True)
    assert report.checksum == engine.weights_checksum() == plain_checksum()


def test_from_model_takes_a_sharded_model(mesh: DeviceMesh) -> None:
    assert tiny_engine(sharded_model(mesh)).weights_checksum() == plain_checksum()


def test_without_shards_gathers_a_model_for_engine_processes(mesh: DeviceMesh) -> None:
    plain, whole = tiny_model(seed=2), without_shards(sharded_model(mesh), "auto")
    assert isinstance(whole, CausalLM)
    for name, view in build_model(plain).read_weights().items():
        assert torch.equal(whole.read_weights()[name], view)
    assert without_shards(plain, "auto") is plain


def test_stage_gathers_stacks_of_experts(mesh: DeviceMesh) -> None:
    """Their corrections, which are buffers, come with the module."""
    whole, sharded = family_model("glm4_moe", 2), family_model("glm4_moe", 2)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    stack = sharded.model.layers[1].mlp.experts.down_proj
    assert is_sharded(stack)
    engine = tiny_engine(family_model("glm4_moe", 1))
    engine.update_weights(fully_shard(sharded, mesh=mesh), in_flight=True)
    expected = tiny_engine(whole).weights_checksum()
    assert engine.weights_checksum() == expected
    assert tiny_engine(sharded).weights_checksum() == expected


def test_publish_sends_sharded_parameters_whole(mesh: DeviceMesh) -> None:
    publisher = SharedTransport()
    fetched = WeightFetcher()(publisher.publish(sharded_model(mesh)))
    publisher.close()
    for name, parameter in tiny_model(seed=2).named_parameters():
        assert torch.equal(fetched.pop(name), parameter)
    assert not fetched


def test_a_lost_engine_repeats_no_push_that_other_ranks_would_have_to_join(
    mesh: DeviceMesh,
) -> None:
    class LosesAnEngine(FakeLLM):
        def update_weights(self, named_tensors: Any, version: int | None = None) -> Any:
            self.calls.append("update")
            error = WeightUpdateError("rank 1 was lost before its vote")
            error.is_transient = True
            raise error

    llm = LosesAnEngine(EngineState.SUSPENDED)
    with pytest.raises(WeightUpdateError, match=r"rank 1.*push again on all ranks"):
        InProcessWeightSync(llm).push(sharded_model(mesh))
    assert llm.calls == ["update"]


@pytest.mark.distributed
def test_join_push_gathers_with_the_rank_that_publishes(tmp_path: Path) -> None:
    ends = []
    for rank in range(2):
        mine, theirs = PROCESSES.Pipe()
        arguments = (tmp_path / "store", rank, theirs)
        process = PROCESSES.Process(target=publish_or_take_part, args=arguments)
        process.start()
        ends.append((process, mine))
        theirs.close()
    try:
        assert [pipe.recv() for _, pipe in ends] == [True, True]
    finally:
        for process, _ in ends:
            process.join(30)
            process.kill()
            process.join()


def with_freed_memory() -> Tensor:
    tensor = torch.ones(48)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(48)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(48), 0.1, 0, torch.qint8)


NOT_PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.ones(48).to_sparse(), "torch.sparse_coo"),
    "mkldnn": (lambda: torch.ones(48).to_mkldnn(), "torch._mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(48)]), "nested"),
    "quantized": (quantized, "quantized"),
    "fake": (fake, "FakeTensor"),
    "meta": (lambda: torch.ones(48, device="meta"), "meta device"),
    "lazy": (nn.UninitializedParameter, "not initialized"),
    "freed": (with_freed_memory, "memory was freed"),
    "no tensor": (lambda: [1.0] * 48, "is a list"),
}


@cache
def one_engine() -> DynamicInferenceEngine:
    return tiny_engine(tiny_model(seed=1))


def weights_with(name: str, value: object) -> dict[str, Any]:
    return dict(tiny_model(seed=2).named_parameters()) | {name: value}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of prototypes and deprecations
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_unreadable_tensors_are_refused_by_name_everywhere(kind: str) -> None:
    make, reason = NOT_PLAIN[kind]
    message, source = f"'{NORM}'.*{reason}", weights_with(NORM, make())
    with pytest.raises(WeightUpdateError, match=message):
        one_engine().stage_weights(source)
    with pytest.raises(WeightUpdateError, match=message):
        SharedTransport().publish(source)
    model = tiny_model(seed=2)
    if isinstance(value := source[NORM], Tensor):
        del model.model.norm.weight
        model.model.norm.register_buffer("weight", value)
        with pytest.raises(ModelError, match=message):
            build_model(model)


def test_stage_resolves_a_lazily_negated_tensor() -> None:
    negated = torch._neg_view(torch.ones(48))  # as of the imaginary part of a conjugate
    engine = tiny_engine(tiny_model(seed=1))
    report = engine.update_weights(weights_with(NORM, negated), in_flight=True)
    plain = tiny_engine(tiny_model(seed=1))
    expected = plain.update_weights(weights_with(NORM, -torch.ones(48)), in_flight=True)
    assert report.checksum == expected.checksum == engine.weights_checksum()


def engine_with_a_router() -> tuple[DynamicInferenceEngine, CausalLM]:
    """An engine whose model has a persistent buffer, which is float32 whatever the weights are."""
    model = CausalLM(build_model(tiny_model(seed=1)).spec)
    model.model.layers[0].mlp.register_buffer("e_score_correction_bias", torch.zeros(4))
    model.randomize(seed=1)
    config = InferenceConfig(block_size_tokens=8, buffer_size_gb=0.001, max_sequence_length=64)
    return DynamicInferenceEngine.from_model(model, config), model


def trainer_with_a_router(bias: Tensor) -> Any:
    model = tiny_model(seed=2)
    model.model.layers[0].mlp.register_buffer("e_score_correction_bias", bias)
    return model


def test_update_by_a_module_includes_persistent_buffers() -> None:
    trainer = trainer_with_a_router(torch.arange(4.0))
    engine, model = engine_with_a_router()
    before = engine.weights_checksum()
    engine.update_weights(trainer, in_flight=True)
    assert torch.equal(model.read_weights()[BIAS], torch.arange(4.0))
    llm = FakeLLM(EngineState.SUSPENDED)
    InProcessWeightSync(llm).push(trainer)
    assert list(llm.weights) == list(trainer.state_dict())
    engine.update_weights(trainer_with_a_router(torch.ones(4)), in_flight=True)
    assert len({before, engine.weights_checksum(), one_engine().weights_checksum()}) == 3


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (None, f"lacks 1 .*'{BIAS}'"),
        (torch.ones(5), rf"'{BIAS}' has shape \[5\]"),
        (torch.full((4,), float("nan")), f"'{BIAS}' holds NaN"),
    ],
)
def test_stage_verifies_persistent_buffers(bias: Tensor | None, message: str) -> None:
    trainer = tiny_model(seed=2) if bias is None else trainer_with_a_router(bias)
    with pytest.raises(WeightUpdateError, match=message):
        engine_with_a_router()[0].update_weights(trainer, in_flight=True)


def test_commit_that_fails_restores_persistent_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, model = engine_with_a_router()
    checksum = engine.weights_checksum()
    staged = engine.stage_weights(trainer_with_a_router(torch.arange(4.0)))

    def fail(*_: object) -> None:
        raise RuntimeError("no memory for the packed copies")

    with monkeypatch.context() as patch:
        patch.setattr(model, "refresh", fail)
        with pytest.raises(WeightUpdateError, match="packed copies"):
            engine.commit_weights(staged, in_flight=True)
    assert engine.weights_checksum() == checksum
    assert torch.equal(model.read_weights()[BIAS], torch.zeros(4))


def test_stage_ignores_computed_tables_and_refuses_other_buffers() -> None:
    trainer = tiny_model(seed=2)
    trainer.model.rotary_emb.register_buffer("inv_freq", torch.ones(6))  # persistent: as of old
    engine = tiny_engine(tiny_model(seed=1))
    assert engine.update_weights(trainer, in_flight=True).checksum == plain_checksum()
    with pytest.raises(WeightUpdateError, match=f"lacks .*'{BIAS}'.*leave\\s+out a buffer"):
        engine.update_weights(trainer_with_a_router(torch.ones(4)), in_flight=True)
