"""Device memory of weights while they are loaded, updated and backed up, counted in bytes.

The device is the meta device, or a host that reports another device type. `make gpu-check` uses a
real one.
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
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.memory import MappedHostArena
from rollout.backends.ops.reference import ReferenceOps
from rollout.errors import WeightUpdateError
from rollout.layers.weight_slot import TensorSlot
from rollout.models import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoints.loading import open_model
from rollout.models.spec import ModelSpec
from rollout.models.weights import copy_weights
from rollout.weights.lora_merge import Merger
from rollout.weights.memory import ReusedArena, WeightMemory
from rollout.weights.served import ServedWeights
from rollout.weights.staged import BackupKeeper, HostBackup
from tests.device_bytes import DeviceBytes
from tests.lora_adapters import random_adapter
from tests.tiny_models import tiny_model

META = torch.device("meta")


class MetaMemory:
    """Buffers of a device without bytes. `num_trims`: how often caches were emptied."""

    has_stable_addresses = False

    def __init__(self) -> None:
        self.num_trims = 0
        self._buffers: dict[str, Tensor] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        return self._buffers[name]

    def restore(self, name: str) -> Tensor:
        return self._buffers[name]

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
def test_loading_an_8b_model_makes_no_second_copy(
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


def test_backup_of_an_8b_model_takes_no_device_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = open_model(spec_8b(), device=META)
    memory = WeightMemory(model, meta_backend(), keeps_values=False)
    with monkeypatch.context() as patch, DeviceBytes() as device:
        patch.setattr(Tensor, "copy_", lambda target, _source: target)
        HostBackup(model, memory, ReusedArena(CountingArena))
    assert device.peak == 0
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes <= CountingArena.most < 1.001 * num_bytes


# ---- whole updates of an 8B model, without a byte of it


class CudaCopy:
    """Tensor.copy_ between a host and a device: no values, but the memory that torch takes for it.

    As ATen's copy_kernel_cuda: what is not of one dtype and in order on both sides goes through
    copies that are, on the side that casts, and on the other one.
    """

    def __call__(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        is_plain = (
            target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        )
        if target.device == source.device or is_plain:
            return target
        casts_on = META if non_blocking else torch.device("cpu")
        between = target.dtype if source.device == casts_on else source.dtype
        if source.dtype != between or not source.is_contiguous():
            torch.empty(source.shape, dtype=between, device=source.device)
        if target.dtype != between or not target.is_contiguous():
            torch.empty(target.shape, dtype=between, device=target.device)
        return target


class NoHashes(ReferenceOps):
    """Hashing takes none of a device's memory, but would read all of the host's."""

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Any = None) -> Tensor:
        return torch.zeros(2, dtype=torch.int64)


def without_bytes(patch: pytest.MonkeyPatch) -> None:
    """Let tensors of the meta device have addresses, and be copied as those of a device."""
    copy, move = CudaCopy(), Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.is_meta and args[0] == "cpu":
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return move(tensor, *args, **kwargs)

    patch.setattr(Tensor, "copy_", lambda *args, **kwargs: copy(*args, **kwargs))
    patch.setattr(Tensor, "to", to)
    patch.setattr(Tensor, "cpu", lambda t: to(t, "cpu"))
    patch.setattr(Merger, "merged", lambda merger, base, pair, cut: torch.empty_like(base))
    patch.setattr(
        TensorSlot, "address", property(lambda slot: (id(slot._tensor) << 40) + slot._offset)
    )


def whole_8b(dtype: torch.dtype) -> dict[str, Tensor]:
    """A trainer's weights, none of which is ever written to."""
    slots = open_model(spec_8b(), device=META)[0].weight_slots()
    return {name: torch.empty(slot.shape, dtype=dtype) for name, slot in slots.items()}


def of_8b(kind: str) -> Any:
    if kind == "adapter":
        shapes = {
            f"model.layers.{layer}.self_attn.q_proj.weight": torch.empty(4096, 4096, device="meta")
            for layer in range(_LAYERS)
        }
        return random_adapter(shapes)
    weights = whole_8b(torch.float32 if "float32" in kind else torch.bfloat16)
    return iter(weights.items()) if "stream" in kind else weights


_LAYERS, _LAYER = 4, 4096 * 4096  # that an adapter adapts, and numbers of one


@pytest.mark.parametrize(
    "kind", ["mapping", "mapping in float32", "stream", "stream in float32", "adapter"]
)
def test_update_of_an_8b_model_takes_a_bucket_and_one_host_copy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy of what changes. An adapter keeps what it is put on, too, and adds up in float32."""
    bucket = 48 << 20
    source = of_8b(kind)
    arenas: list[MappedHostArena] = []

    def create_arena() -> MappedHostArena:
        arenas.append(MappedHostArena())
        return arenas[-1]

    backend = replace(meta_backend(), ops=NoHashes(), create_host_arena=create_arena)
    model, _ = open_model(spec_8b(), device=META)
    served = ServedWeights(
        model,
        backend,
        version=0,
        reject_non_finite=True,
        fill=lambda: None,
        bucket_bytes=bucket,
    )
    for layer in model.linear_layers().values():
        layer.bind(backend)
    model.is_prepared = True
    without_bytes(monkeypatch)
    with DeviceBytes("meta") as device, DeviceBytes("cpu") as host:
        staged = served.stage(source)
        served.commit(staged, None)
        served.roll_back(staged)
        served.commit(staged, None)
    in_arenas = sum(arena.num_bytes for arena in arenas)
    changed = 2 * _LAYERS * _LAYER if kind == "adapter" else served.num_bytes
    beside = changed + (4 + 2) * _LAYER if kind == "adapter" else bucket
    assert device.peak <= bucket
    assert changed <= in_arenas < 1.01 * changed
    assert host.peak < 1.01 * beside


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


@pytest.mark.parametrize("source", [lambda m: m, lambda m: m.state_dict()])
def test_update_takes_at_most_a_bucket_of_device_memory(
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


def test_commit_that_fails_restores_the_host_backup(
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
    served.roll_back(staged)
    assert (served.checksum(), served.version) == (before, 0)


def failing_at(shape: torch.Size, write: Any) -> Any:
    def failing(slot: Any, values: Tensor, first_row: int = 0) -> None:
        if slot.shape == shape:
            raise RuntimeError("made up")
        write(slot, values, first_row)

    return failing


def test_updates_staged_together_share_one_backup() -> None:
    model = build_model(old_and_new()[0])
    arenas: list[MappedHostArena] = []

    def create_arena() -> MappedHostArena:
        arenas.append(MappedHostArena())
        return arenas[-1]

    memory = WeightMemory(model, cpu_backend("device"), keeps_values=True)
    keeper = BackupKeeper(model, memory, ReusedArena(create_arena))
    first = keeper.backup(0)
    assert keeper.backup(0) is first
    later = keeper.backup(1)
    assert later is not first
    assert len(arenas) == 2, "the first one is in use"
    del first, later
    keeper.backup(2)
    assert len(arenas) == 2
