"""Contract of WeightSync: engines serve all of a push, or the weights from before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM, AsyncLLM, ConfigError, WeightUpdateError
from tests.apis.fleets import CONFIG, directory, weights
from tests.lora_adapters import merged, random_adapter
from tests.tiny_models import tiny_engine
from trainer_hooks import (
    CheckpointWeightSync,
    CollectiveWeightSync,
    InProcessWeightSync,
    SharedMemoryWeightSync,
    WeightSync,
)

NORM = "model.norm.weight"
# In one order, so that each but the first takes over a fleet from another transport.
IN_OTHER_PROCESSES: dict[str, Callable[[Any, Path], WeightSync]] = {
    "shared memory": lambda llm, path: SharedMemoryWeightSync(llm, in_flight=True),
    "collective": lambda llm, path: CollectiveWeightSync(llm, in_flight=True),
    "checkpoint": lambda llm, path: CheckpointWeightSync(llm, path / "weights", in_flight=True),
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[LLM]:
    """Return an LLM whose engines run in other processes of this machine."""
    with LLM(directory(), None, CONFIG, use_coordinator=True) as llm:
        yield llm


@pytest.fixture(params=["in process", *IN_OTHER_PROCESSES], scope="module")
def pushed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, WeightSync]]:
    """Return an LLM, and the WeightSync that pushes to it."""
    if request.param == "in process":
        with LLM(directory(), None, CONFIG) as llm:
            yield llm, InProcessWeightSync(llm, in_flight=True)
        return
    llm = request.getfixturevalue("fleet")
    yield llm, IN_OTHER_PROCESSES[request.param](llm, tmp_path_factory.mktemp("push"))


@cache
def checksum(version: int) -> str:
    return tiny_engine(weights(version)).weights_checksum()


def test_push_serves_a_module_a_mapping_and_an_iterator_under_the_next_version(
    pushed: tuple[LLM, WeightSync],
) -> None:
    llm, sync = pushed
    sources: list[Any] = [
        weights(1),
        dict(weights(2).named_parameters()),
        ((name, tensor) for name, tensor in weights(3).named_parameters()),
    ]
    for version, source in enumerate(sources, start=1):
        before = llm.weights_version
        report = sync.push(source)
        assert report.version == llm.weights_version == before + 1
        assert report.checksum == llm.weights_checksum() == checksum(version)


def test_push_serves_under_the_version_that_it_is_given(pushed: tuple[LLM, WeightSync]) -> None:
    llm, sync = pushed
    version = llm.weights_version + 5
    assert sync.push(weights(1), version=version).version == llm.weights_version == version
    with pytest.raises(WeightUpdateError, match=f"above the current version {version}"):
        sync.push(weights(2), version=version)
    assert (llm.weights_version, llm.weights_checksum()) == (version, checksum(1))


def test_apush_is_awaited_and_serves_the_same(pushed: tuple[LLM, WeightSync]) -> None:
    llm, sync = pushed
    report = asyncio.run(sync.apush(weights(4)))
    assert report.checksum == llm.weights_checksum() == checksum(4)
    assert report.version == llm.weights_version


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop(NORM), f"lacks 1 of the model's tensors \\('{NORM}'\\)"),
        (lambda given: given.update(other=torch.ones(1)), "tensors that the model lacks"),
        (lambda given: given.update({NORM: torch.ones(3)}), f"'{NORM}' has shape"),
        (lambda given: given[NORM].fill_(float("nan")), f"'{NORM}' holds NaN"),
    ],
    ids=["missing", "unknown", "misshapen", "not finite"],
)
def test_push_of_wrong_tensors_names_them_and_changes_nothing(
    pushed: tuple[LLM, WeightSync], change: Callable[[Any], object], message: str
) -> None:
    llm, sync = pushed
    sync.push(weights(1))
    version = llm.weights_version
    wrong = {name: tensor.detach().clone() for name, tensor in weights(2).named_parameters()}
    change(wrong)
    with pytest.raises(WeightUpdateError, match=message):
        sync.push(wrong)
    assert (llm.weights_version, llm.weights_checksum()) == (version, checksum(1))
    sync.push(weights(2))
    assert llm.weights_checksum() == checksum(2)


def test_push_of_an_adapter_serves_it_on_the_weights_of_before(
    pushed: tuple[LLM, WeightSync],
) -> None:
    llm, sync = pushed
    sync.push(weights(1))
    base = {name: tensor.detach() for name, tensor in weights(1).named_parameters()}
    adapter = random_adapter(base)
    sync.push(adapter)
    expected = tiny_engine(weights(0))
    expected.update_weights(merged(base, adapter), in_flight=True)
    assert llm.weights_checksum() == expected.weights_checksum()
    sync.push(weights(2))
    assert llm.weights_checksum() == checksum(2)


def test_a_transport_that_was_replaced_releases_its_weights_at_the_next_push(
    fleet: LLM, tmp_path: Path
) -> None:
    CheckpointWeightSync(fleet, tmp_path, in_flight=True).push(weights(1))
    assert list(tmp_path.iterdir())
    following = SharedMemoryWeightSync(fleet, in_flight=True)
    assert list(tmp_path.iterdir()), "an engine that comes late needs them"
    following.push(weights(2))
    assert not list(tmp_path.iterdir())
    assert fleet.weights_checksum() == checksum(2)


@pytest.mark.parametrize("kind", IN_OTHER_PROCESSES)
def test_a_weight_sync_between_processes_refuses_an_llm_of_this_process(
    kind: str, tmp_path: Path
) -> None:
    with LLM(directory(), None, CONFIG) as llm:
        with pytest.raises(ConfigError, match="use_coordinator=True"):
            IN_OTHER_PROCESSES[kind](llm, tmp_path)
        with pytest.raises(ConfigError, match="InProcessWeightSync"):
            IN_OTHER_PROCESSES[kind](object(), tmp_path)


def test_push_to_an_asynchronous_llm_is_refused_before_anything_is_sent() -> None:
    llm = AsyncLLM.joined("tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match="await apush"):
        CollectiveWeightSync(llm).push(weights(1))
