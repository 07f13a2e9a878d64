"""full_tensors: each kind of trainer gives the same names and bits, one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout import WeightUpdateError
from rollout.control.state import EngineState
from rollout.weights.update import WeightStream, by_name, streamed
from tests.lora_adapters import PeftLike
from tests.processes import PROCESSES
from tests.tiny_models import tiny_engine, tiny_model
from tests.trainer_hooks.fakes import FakeLLM
from tests.trainer_hooks.weight_sync.trainers import (
    BUFFER,
    SHARDED,
    WRAPPED,
    digests,
    model_with_a_buffer,
    read_all,
    received,
    with_checkpoints,
)
from trainer_hooks import WeightSync, full_tensors, merged_tensors

Reading = dict[str, Any]


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Reading]]:
    """Return what two ranks of a trainer read, by kind of trainer."""
    store, ends = tmp_path_factory.mktemp("ranks") / "store", []
    for rank in range(2):
        mine, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=read_all, args=(store, rank, theirs))
        process.start()
        theirs.close()
        ends.append((process, mine))
    try:
        found = [dict(received(pipe)) for _, pipe in ends]
        for reading in found:
            assert "error" not in reading, reading["error"]
        yield found
    finally:
        for process, _ in ends:
            process.join(30)
            process.kill()
            process.join()


def whole() -> dict[str, str]:
    """Return the state dict of the unsharded model, tied weights once."""
    state = {n: t for n, t in model_with_a_buffer().state_dict().items() if n != "lm_head.weight"}
    assert BUFFER in state
    return digests(state.items())


@pytest.mark.distributed
@pytest.mark.parametrize("kind", WRAPPED)
def test_every_kind_of_trainer_gives_the_same_weights_on_all_ranks(
    readings: list[Reading], kind: str
) -> None:
    for reading in readings:
        assert reading[kind] == whole()
        assert list(reading[kind]) == list(readings[0][kind]), "the order is that of all ranks"


@pytest.mark.distributed
@pytest.mark.parametrize("kind", SHARDED)
def test_full_tensors_can_read_shards_again(readings: list[Reading], kind: str) -> None:
    for reading in readings:
        assert reading[f"again {kind}"] == whole()


@pytest.mark.distributed
def test_full_tensors_gathers_one_tensor_at_a_time(readings: list[Reading]) -> None:
    assert [reading["places"] for reading in readings] == [1, 1]


@pytest.mark.distributed
def test_refused_push_leaves_no_rank_waiting(readings: list[Reading]) -> None:
    assert readings[0]["pushes"] == ["EngineStateError", f"{len(whole())} tensors"]
    assert readings[1]["pushes"] == ["took part", "took part"]


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["merged", "adapter"])
def test_sharded_adapter_equals_the_adapter_of_the_whole_model(
    readings: list[Reading], what: str
) -> None:
    for reading in readings:
        assert reading[f"sharded peft {what}"] == readings[0][f"peft {what}"]


# ---- in one process


@pytest.mark.drawn(1)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_full_tensors_of_a_compiled_model_have_plain_names(is_checkpointed: bool) -> None:
    model = model_with_a_buffer()
    policy = torch.compile(with_checkpoints(model) if is_checkpointed else model)
    assert digests(full_tensors(policy)) == digests(full_tensors(model_with_a_buffer())) == whole()


def test_merged_tensors_have_the_names_and_bits_of_the_engines_merge() -> None:
    torch.manual_seed(0)
    model = PeftLike("default", r=2, lora_alpha=8)
    layer = model.base_model.model.q_proj
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    (name, merged), *others = merged_tensors(model)
    assert (name, others) == ("q_proj.weight", [])
    assert torch.equal(merged, (layer.base_layer.weight + change * 4.0).detach())


def test_merged_tensors_leave_the_base_of_a_peft_model_unchanged() -> None:
    model = PeftLike("default")
    before = digests((n, t.clone()) for n, t in model.state_dict().items())
    list(merged_tensors(model))
    assert digests(model.state_dict().items()) == before


def reused_memory(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in the memory of the previous one, as a bridge's export does."""
    buffer = torch.empty(max(p.numel() for p in model.parameters()))
    for name, parameter in model.named_parameters():
        view = buffer[: parameter.numel()].view(parameter.shape)
        yield name, view.copy_(parameter.detach())


def test_push_of_an_iterator_that_reuses_its_memory_sends_the_values_it_yielded() -> None:
    model = tiny_model(seed=2)
    expected = tiny_engine(model).weights_checksum()
    engine = tiny_engine(tiny_model(seed=1))
    engine.pause()
    assert WeightSync(engine).push(reused_memory(model)).checksum == expected
    assert engine.weights_checksum() == expected


def test_an_iterator_is_read_once_in_its_own_order_and_not_ahead() -> None:
    begun: list[str] = []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for name in ("module.b", "_orig_mod.a", "c"):
            begun.append(name)
            yield name, torch.ones(1)

    read = full_tensors(pairs())
    assert [next(read)[0], next(read)[0]] == ["b", "a"]
    assert begun == ["module.b", "_orig_mod.a"]


def test_parameters_of_an_iterator_are_staged_live() -> None:
    module, llm = nn.Linear(2, 3), FakeLLM(EngineState.SUSPENDED)
    WeightSync(llm).push(module.named_parameters())
    assert llm.weights["weight"].data_ptr() == module.weight.data_ptr()


def test_push_refuses_a_name_that_occurs_twice() -> None:
    twice = [("module.w", torch.ones(2)), ("w", torch.ones(2))]
    for source in (twice, iter(twice)):
        with pytest.raises(WeightUpdateError, match="'w' comes twice"):
            list(full_tensors(source))


def test_a_source_that_fails_names_the_tensor_before_and_ends_the_stream() -> None:
    def pairs() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.ones(2)
        raise OSError("the bridge broke")

    stream = streamed(pairs())
    with pytest.raises(WeightUpdateError, match=r"after 'first'.*the bridge broke"):
        list(stream)
    stream.drain()
    assert list(stream) == []


def test_a_drained_stream_has_been_read_to_its_end_whatever_it_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read: list[str] = []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            read.append(name)
            yield name, torch.ones(1)
        raise OSError("a peer has gone")

    stream = WeightStream(pairs(), lasts=True)
    next(stream)
    stream.drain()
    assert read == ["a", "b", "c"]
    assert "a peer has gone" in caplog.text


def test_a_stream_is_held_by_name_in_memory_of_its_own_unless_it_lasts() -> None:
    tensor = torch.ones(3)
    for lasts in (True, False):
        held = by_name(WeightStream(iter([("w", tensor)]), lasts=lasts))["w"]
        assert (held.data_ptr() == tensor.data_ptr()) is lasts
        assert torch.equal(held, tensor)
