"""What weights take of a device: while they are loaded, updated and backed up. Bytes are counted.

The device is the meta device, or a host that says it is none; `make gpu-check` has a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.cpu import cpu_backend
from rollout.backends.memory.host_arena import MappedHostArena
from rollout.errors import WeightUpdateError
from rollout.models import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.loading import open_model
from rollout.models.spec import ModelSpec
from rollout.models.weights import copy_weights
from rollout.runner.staged_weights import BackupKeeper, WeightBackup
from rollout.runner.weight_memory import WeightMemory
from rollout.runner.weights import ServedWeights
from tests.device_bytes import DeviceBytes
from tests.tiny_models import tiny_model

META = torch.device("meta")


class MetaMemory:
    """Buffers of a device without bytes. `num_trims`: how often caches were emptied."""

    has_stable_addresses = False

    def __init__(self) -> None:
        self.num_trims = 0

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def trim(self) -> None:
        self.num_trims += 1


@cache
def spec_8b() -> ModelSpec:
    return ModelSpec.from_hf_config(
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
    )


def meta_backend() -> Backend:
    memory: Any = MetaMemory()
    return replace(cpu_backend("device"), device=META, memory=memory)


@pytest.mark.parametrize("keeps_values", [False, True])
def test_an_8b_model_is_loaded_with_no_second_copy_of_its_weights(
    monkeypatch: pytest.MonkeyPatch, *, keeps_values: bool
) -> None:
    """Its checkpoint is host memory that nobody touches."""
    # There are no values to bring to the host and back.
    monkeypatch.setattr(Tensor, "cpu", lambda t: torch.empty(t.shape, dtype=t.dtype))
    backend = meta_backend()
    with DeviceBytes() as device:
        model, _ = open_model(spec_8b(), device=META)
        memory = WeightMemory(model, backend, keeps_values=keeps_values)
        copy_weights(model.weight_table(), Checkpoint(model), "made up")
    assert memory.num_bytes > 15 * 2**30
    assert memory.num_bytes <= device.alive <= device.peak <= 1.05 * memory.num_bytes
    assert backend.memory.num_trims == 1  # type: ignore[attr-defined]


class Checkpoint:
    """Tensors of the model's names and shapes; on meta all addresses are 0, so one of them."""

    def __init__(self, model: CausalLM) -> None:
        self._slots = model.weight_slots()

    def keys(self) -> list[str]:
        return list(self._slots)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        name, slot = next(iter(self._slots.items()))
        yield name, torch.empty(slot.shape, dtype=slot.dtype)


class CountingArena(MappedHostArena):
    """Knows how large it has been."""

    most = 0

    def reserve(self, num_bytes: int) -> Tensor:
        CountingArena.most = max(CountingArena.most, num_bytes)
        return super().reserve(num_bytes)


def test_a_backup_of_an_8b_model_takes_nothing_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = open_model(spec_8b(), device=META)
    for layer in model.linear_layers().values():
        layer.bind(meta_backend())
    with monkeypatch.context() as patch, DeviceBytes() as device:
        patch.setattr(Tensor, "copy_", lambda target, _source: target)
        WeightBackup(model, CountingArena())
    assert device.peak == 0
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes <= CountingArena.most < 1.001 * num_bytes


# ---- whole updates, of a tiny model whose device says that it is no host


@cache
def old_and_new() -> tuple[Any, Any]:
    return tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)


def served_on_a_device() -> ServedWeights:
    backend = replace(cpu_backend("device"), device=META)
    model = build_model(old_and_new()[0])
    served = ServedWeights(model, backend, version=0, reject_non_finite=True)
    # As on CUDA, no product keeps a packed copy.
    for layer in model.linear_layers().values():
        layer.bind(backend)
    model.is_prepared = True
    return served


def in_turn(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict().items()


@pytest.mark.parametrize("source", [lambda m: m, lambda m: m.state_dict()])
def test_an_update_takes_no_more_than_a_bucket_beside_the_weights(
    source: Callable[[Any], Any],
) -> None:
    served, new = served_on_a_device(), old_and_new()[1]
    bucket = max(parameter.nbytes for parameter in new.parameters())
    with DeviceBytes("cpu") as device:
        staged = served.stage(source(new))
        served.commit(staged, None)
    assert served.num_bytes > 3 * bucket
    # The hash of a tensor has temporaries of its size on a host, which the kernel has not.
    assert device.peak <= 2 * bucket
    assert served.version == 1
    assert served.checksum() == served_checksum(new)


def served_checksum(model: Any) -> str:
    own = ServedWeights(
        build_model(model), cpu_backend("device"), version=0, reject_non_finite=True
    )
    return own.checksum()


def test_a_failed_commit_goes_back_to_the_backup_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, new = served_on_a_device(), old_and_new()[1]
    before = served.checksum()
    staged = served.stage(new)
    slots = served._model.weight_slots()
    last = slots["model.norm.weight"]
    with monkeypatch.context() as patch:
        patch.setattr(type(last), "write", failing_at(last.shape, type(last).write))
        with pytest.raises(WeightUpdateError, match="made up"):
            served.commit(staged, None)
    assert (served.checksum(), served.version) == (before, 0)
    served.commit(staged, None)
    assert served.checksum() == served_checksum(new) != before
    served.undo(staged)
    assert (served.checksum(), served.version) == (before, 0)


def failing_at(shape: torch.Size, write: Any) -> Any:
    def failing(slot: Any, values: Tensor, first_row: int = 0) -> None:
        if slot.shape == shape:
            raise RuntimeError("made up")
        write(slot, values, first_row)

    return failing


def test_updates_staged_together_share_a_backup_and_later_ones_its_memory() -> None:
    model = build_model(old_and_new()[0])
    for layer in model.linear_layers().values():
        layer.bind(cpu_backend("device"))
    arenas: list[MappedHostArena] = []

    def create_arena() -> MappedHostArena:
        arenas.append(MappedHostArena())
        return arenas[-1]

    backend = replace(cpu_backend("device"), device=META, create_host_arena=create_arena)
    keeper = BackupKeeper(model, backend)
    first = keeper.backup(0)
    assert keeper.backup(0) is first
    later = keeper.backup(1)
    assert later is not first
    assert len(arenas) == 2, "the first one is in use"
    del first, later
    keeper.backup(2)
    assert len(arenas) == 2


def test_what_an_iterator_yields_is_kept_on_the_host() -> None:
    served, new = served_on_a_device(), old_and_new()[1]
    staged = served.stage(in_turn(new))
    assert all(tensor.device.type == "cpu" for tensor in staged.tensors.values())
    served.commit(staged, None)
    assert served.checksum() == served_checksum(new)
