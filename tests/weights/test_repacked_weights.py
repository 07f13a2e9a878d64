"""Weights that exist only packed: readers and updates see plain weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout import SamplingParams
from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.library import load_library
from rollout.backends.cpu.native_weight import NativeWeight, packed_bytes
from rollout.models import CausalLM, build_model, save_hf_directory
from tests.tiny_models import generate_all, prompt_of, tiny_engine, tiny_model

# Whole panels of 16 and of 32 outputs, in every matrix.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 224,
    "tie_word_embeddings": True,
}
PARAMS = SamplingParams(num_tokens_to_generate=6, seed=2, return_log_probs=True)
pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "native")


@cache
def trainer(seed: int) -> Any:
    return tiny_model("qwen2", seed=seed, **SIZES)


@cache
def generated(seed: int, tune: str) -> tuple[str, list[list[int]]]:
    """The checksum and tokens of an engine that is built with these weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_TUNE", tune)
        return seen_of(tiny_engine(trainer(seed)))


def seen_of(engine: Any) -> tuple[str, list[list[int]]]:
    requests = generate_all(engine, [(prompt_of(n), PARAMS) for n in (1, 9, 30)])
    return engine.weights_checksum(), [request.generated_tokens for request in requests]


def served(dtype: str = "auto", **config: Any) -> tuple[Any, CausalLM]:
    """An engine and its model, all of whose linear layers are repacked."""
    model = build_model(trainer(1), dtype=dtype)
    engine = tiny_engine(model, buffer_size_gb=0.01, **config)
    assert all(layer.repacked is not None for layer in model.linear_layers().values())
    return engine, model


def weights_of(seed: int) -> dict[str, Tensor]:
    return dict(trainer(seed).named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_inputs", [7, 8, 19, 64])
@pytest.mark.parametrize("rows", [(64,), (32, 96), (24, 40, 7), (1,)])
def test_native_weight_has_each_number_at_its_place_in_a_panel(
    rows: tuple[int, ...], num_inputs: int, dtype: torch.dtype
) -> None:
    library = load_library()
    assert library is not None
    parts = [torch.randn(count, num_inputs).to(dtype) for count in rows]
    weight_NK = torch.cat(parts)
    for lanes in (8, 16):
        packed = NativeWeight.copy_of(Kernels(library), parts, lanes, packed_bytes)
        num_missing = -len(weight_NK) % (2 * lanes)
        padded_PWK = torch.nn.functional.pad(weight_NK, (0, 0, 0, num_missing))
        padded_PWK = padded_PWK.view(-1, 2 * lanes, num_inputs)
        assert torch.equal(packed.panels_PKW, padded_PWK.transpose(1, 2))
        assert torch.equal(packed.to_dense(), weight_NK)
        assert torch.equal(packed.read(0, 1), weight_NK[:1])


def test_repacked_weights_have_the_checksum_and_tokens_of_plain_ones() -> None:
    engine, _ = served()
    assert seen_of(engine) == generated(1, "plain")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repacked_weights_take_no_second_copy(dtype: str) -> None:
    engine, model = served(dtype)
    size = sum(weight.nbytes for weight in {w.data_ptr(): w for w in model.parameters()}.values())
    assert size == getattr(torch, dtype).itemsize * sum(p.numel() for p in trainer(1).parameters())
    reserved = engine.memory_status().resident_bytes["weights"]
    assert size <= reserved <= size + 64 * len(list(model.parameters()))


@pytest.mark.parametrize("kind", ["device", "reserved"])
@pytest.mark.parametrize("discard", [False, True])
def test_repacked_weights_survive_updates_and_suspend(kind: str, discard: bool) -> None:
    engine, _ = served(memory_kind=kind)
    addresses = engine.weight_data_ptrs()
    for seed in (2, 1, 2):
        engine.update_weights(weights_of(seed), in_flight=True)
        assert engine.weight_data_ptrs() == addresses
        engine.pause()
        engine.suspend("recompute", ("kv_cache", "weights"), discard_weights=discard)
        assert not any(engine.weight_data_ptrs().values())
        engine.resume()
        if discard:
            engine.update_weights(weights_of(seed))
        engine.unpause()
        if kind == "reserved":
            assert engine.weight_data_ptrs() == addresses
        addresses = engine.weight_data_ptrs()
        assert seen_of(engine) == generated(seed, "plain")


def test_save_hf_directory_of_repacked_weights_loads_again(tmp_path: Path) -> None:
    engine, model = served()
    engine.update_weights(weights_of(2), in_flight=True)
    save_hf_directory(model, tmp_path)
    again = build_model(tmp_path)
    for name, values in trainer(2).state_dict().items():
        assert torch.equal(again.read_weights()[name], values), name


def test_build_model_casts_repacked_weights() -> None:
    _, model = served()
    cast = build_model(model, dtype="bfloat16").read_weights()
    for name, values in trainer(1).state_dict().items():
        assert torch.equal(cast[name], values.bfloat16()), name


@pytest.mark.parametrize("tune", ["native", "plain"])
def test_build_model_copies_repacked_weights_to_another_engine(
    tune: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = served()
    monkeypatch.setenv("ROLLOUT_TUNE", tune)
    engine = tiny_engine(model, buffer_size_gb=0.01)
    assert (model.lm_head.repacked is None) is (tune == "plain")
    assert seen_of(engine) == generated(1, "plain")
    engine.update_weights(weights_of(2), in_flight=True)
    assert seen_of(engine) == generated(2, "plain")


def test_weight_slot_writes_to_repacked_weights() -> None:
    engine, model = served()
    for name, values in trainer(2).state_dict().items():
        model.weight_slots()[name].write(values)
    model.refresh()
    assert seen_of(engine) == generated(2, "plain")
