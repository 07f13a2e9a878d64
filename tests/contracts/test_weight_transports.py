"""Contract of weight transports: all of a push arrives, or nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from rollout import WeightUpdateError
from tests.contracts.weight_fleet import TRANSPORTS, WeightFleet
from tests.lora_adapters import random_adapter
from tests.tiny_models import tiny_engine, tiny_model

NORM = "model.norm.weight"


@pytest.fixture(params=TRANSPORTS, scope="module")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WeightFleet]:
    with WeightFleet(TRANSPORTS[request.param](tmp_path_factory.mktemp("weights"))) as fleet:
        yield fleet


def weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(tiny_model(seed=seed).named_parameters())


@cache
def checksum(seed: int) -> str:
    return tiny_engine(tiny_model(seed=seed)).weights_checksum()


def test_all_engines_serve_what_was_pushed_push_after_push(fleet: WeightFleet) -> None:
    for seed in (1, 2, 1):
        fleet.push(weights(seed))
        assert fleet.checksums() == [checksum(seed)] * 2


def test_a_push_may_come_as_a_module_a_list_or_a_generator(fleet: WeightFleet) -> None:
    given: list[Any] = [
        tiny_model(seed=1),
        list(weights(2).items()),
        ((name, tensor) for name, tensor in weights(3).items()),
    ]
    for seed, named_tensors in enumerate(given, start=1):
        fleet.push(named_tensors)
        assert fleet.checksums() == [checksum(seed)] * 2


def test_a_generator_may_free_each_tensor_when_the_next_is_asked_for(fleet: WeightFleet) -> None:
    """As ZeRO-3 does."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(max(tensor.numel() for tensor in weights(1).values()))
        for name, tensor in weights(1).items():
            whole = memory[: tensor.numel()].view(tensor.shape)
            whole.copy_(tensor.detach())
            yield name, whole
            memory.fill_(7.0)

    fleet.push(gathered())
    assert fleet.checksums() == [checksum(1)] * 2


def test_strided_empty_and_scalar_tensors_of_any_dtype_arrive(fleet: WeightFleet) -> None:
    given = weights(1)
    name = next(name for name, tensor in given.items() if tensor.dim() == 2)
    given[name] = given[name].detach().t().contiguous().t()
    fleet.push(given)
    assert fleet.checksums() == [checksum(1)] * 2
    fleet.push({name: tensor.detach().double() for name, tensor in weights(2).items()})
    assert fleet.checksums() == [checksum(2)] * 2


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.popitem(), "lacks 1 of the model's tensors"),
        (lambda given: given.update({NORM: torch.ones(3)}), f"'{NORM}' has shape"),
        (lambda given: given.update({NORM: torch.full((48,), torch.nan)}), f"'{NORM}' holds NaN"),
        (lambda given: given.update({NORM: torch.empty(48, device="meta")}), f"'{NORM}' is on"),
        (lambda w: w.update({"a\udcff": torch.ones(1)}), r"'a.udcff' .* UTF-8"),
    ],
)
def test_a_push_that_does_not_fit_changes_nothing_after_pushes_that_do(
    fleet: WeightFleet, change: Any, message: str
) -> None:
    fleet.push(weights(1))  # after the fault of the case before
    assert fleet.checksums() == [checksum(1)] * 2
    bad = weights(2)
    change(bad)
    with pytest.raises(WeightUpdateError, match=message):
        fleet.push(bad)
    assert fleet.checksums() == [checksum(1)] * 2


def test_a_source_that_raises_midway_changes_nothing_and_the_next_push_arrives(
    fleet: WeightFleet,
) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1).items():
            yield name, tensor
            if "layers.1" in name:
                raise OSError("the trainer's rank 3 has gone")

    before = fleet.checksums()
    with pytest.raises(WeightUpdateError, match=r"the source, after .*rank 3 has gone"):
        fleet.push(failing())
    assert fleet.checksums() == before
    fleet.push(weights(3))
    assert fleet.checksums() == [checksum(3)] * 2


def test_the_source_is_read_to_its_end_after_a_fault_for_the_other_ranks_gather(
    fleet: WeightFleet,
) -> None:
    names = list(weights(1))
    for bad in (torch.full((48,), torch.nan), torch.empty(48, device="meta")):
        read: list[str] = []

        def counted(bad: torch.Tensor = bad, read: list[str] = read) -> Any:
            for name, tensor in weights(1).items():
                read.append(name)
                yield name, bad if name == names[1] else tensor

        with pytest.raises(WeightUpdateError):
            fleet.push(counted())
        assert read == names


def test_one_engine_that_refuses_rolls_back_all(fleet: WeightFleet) -> None:
    fleet.push(weights(1))

    def refuse() -> None:
        raise WeightUpdateError("rank 1 has no memory")

    fleet.members[1].hinder = refuse
    with pytest.raises(WeightUpdateError, match="rank 1 has no memory"):
        fleet.push(weights(2))
    assert fleet.checksums() == [checksum(1)] * 2
    fleet.members[1].hinder = lambda: None
    fleet.push(weights(3))
    assert fleet.checksums() == [checksum(3)] * 2


def test_an_adapter_arrives_as_one_and_follows_the_weights_below_it(fleet: WeightFleet) -> None:
    fleet.push(weights(1))
    reference = tiny_engine(tiny_model(seed=1))
    for rank in (2, 3):
        adapter = random_adapter(weights(1), rank=rank)
        fleet.push(adapter)
        reference.update_weights(adapter, in_flight=True)
        assert fleet.checksums() == [reference.weights_checksum()] * 2
    fleet.push(weights(2))
    assert fleet.checksums() == [checksum(2)] * 2
    with pytest.raises(WeightUpdateError, match="an adapter with a base"):
        fleet.push(replace(adapter, base={}))
