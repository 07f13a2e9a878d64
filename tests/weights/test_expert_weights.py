"""Expert weights in directories, failed commits and suspends; router corrections."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollout import ModelError, WeightUpdateError
from rollout.models import build_model, save_hf_directory
from rollout.models.checkpoints.reader import WEIGHTS_FILE, Checkpoint
from rollout.serve.control.announcement import ModelTensors
from tests.tiny_models import tiny_engine
from tests.weights.expert_dialects import (
    UPDATE_PATHS,
    Weights,
    all_mixtures,
    assert_refused,
    assert_serves,
    corrected_mixtures,
    dialects,
    last_of,
    served,
    stacked_mixtures,
    trainer,
    without,
)


@all_mixtures
def test_commit_that_fails_restores_the_experts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = served(family)
    engine.update_weights(trainer(family, 0), in_flight=True)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory for the packed copies")

    for given in dialects(family, 1):
        staged = engine.stage_weights(given)
        with monkeypatch.context() as patch:
            patch.setattr(model, "refresh", fail)
            with pytest.raises(WeightUpdateError, match="packed copies"):
                engine.commit_weights(staged, in_flight=True)
        assert_serves(family, 0)
    engine.commit_weights(staged, in_flight=True)
    assert_serves(family, 1)


@all_mixtures
def test_experts_survive_suspend_and_discard_weights(family: str) -> None:
    engine, _ = served(family)
    for discard, given in ((False, None), (True, dialects(family, 1).saved)):
        engine.update_weights(dialects(family, 0).live, in_flight=True)
        engine.pause()
        engine.suspend("recompute", ("kv_cache", "weights"), discard_weights=discard)
        assert not any(pointer for n, pointer in engine.weight_data_ptrs().items() if "exp" in n)
        engine.resume()
        if given is not None:
            engine.update_weights(given)
        engine.unpause()
        assert_serves(family, int(discard))


@all_mixtures
def test_weight_slots_cover_every_byte_of_a_mixture_once(family: str) -> None:
    model = build_model(trainer(family, 0))
    tensors = [*model.parameters(), *model.persistent_buffers().values()]
    for tensor in tensors:
        tensor.zero_()
    for slot in model.weight_slots().values():
        slot.write(slot.read() + 1)
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@all_mixtures
def test_build_model_loads_both_dialects_of_experts(family: str, tmp_path: Path) -> None:
    module, weights = trainer(family, 1), dialects(family, 1)
    for kind, tensors in weights._asdict().items():
        module.config.save_pretrained(tmp_path / kind)
        write_tensors(tmp_path / kind, tensors)
        loaded = build_model(tmp_path / kind).read_weights()
        assert all(torch.equal(loaded[name], values) for name, values in weights.saved.items())
    save_hf_directory(build_model(tmp_path / "live"), tmp_path / "ours")
    ours = dict(Checkpoint.open(tmp_path / "ours").items())
    assert ours.keys() == weights.saved.keys()


@stacked_mixtures
def test_build_model_names_missing_experts(family: str, tmp_path: Path) -> None:
    module, weights = trainer(family, 1), dialects(family, 1)
    module.config.save_pretrained(tmp_path)
    gone = last_of([*weights.saved], ".experts.2.")
    write_tensors(tmp_path, without(gone)(weights.saved))
    with pytest.raises(ModelError, match=f"lacks 1 tensors .*'{re.escape(gone)}'"):
        build_model(tmp_path)
    stack = last_of([*weights.live], ".experts.down_proj")
    write_tensors(tmp_path, weights.saved | {stack: weights.live[stack] + 1})
    with pytest.raises(ModelError, match=f"'{re.escape(stack)}'.*hold the same weights and differ"):
        build_model(tmp_path)


def write_tensors(directory: Path, tensors: Weights) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / WEIGHTS_FILE)


@corrected_mixtures
def test_router_corrections_stay_float32(family: str, tmp_path: Path) -> None:
    module, saved = trainer(family, 1), dialects(family, 1).saved
    module.save_pretrained(tmp_path / "theirs")
    model = build_model(tmp_path / "theirs", dtype="bfloat16")
    save_hf_directory(model, tmp_path / "ours")
    engine = tiny_engine(model, buffer_size_gb=0.001)
    engine.update_weights(dialects(family, 0).saved, in_flight=True)
    engine.update_weights(saved, in_flight=True)
    kept = {**model.read_weights(), **build_model(tmp_path / "ours").read_weights()}
    for name, values in saved.items():
        is_correction = name.endswith("e_score_correction_bias")
        expected = values if is_correction else values.bfloat16()
        for weights in (model.read_weights(), kept):
            assert weights[name].dtype == expected.dtype
            assert torch.equal(weights[name], expected), name


def test_build_model_ignores_mtp_layers(tmp_path: Path) -> None:
    """As saved after the others by DeepSeek-V3 and GLM-4.5; transformers ignores them, too."""
    module, saved = trainer("glm4_moe", 1), dialects("glm4_moe", 1).saved
    num_layers = module.config.num_hidden_layers
    extra = {f"model.layers.{num_layers}.eh_proj.weight": torch.ones(3)}
    module.config.save_pretrained(tmp_path)
    write_tensors(tmp_path, saved | extra)
    loaded = build_model(tmp_path)
    assert loaded.read_weights().keys() == saved.keys()
    engine, _ = served("glm4_moe")
    model, rng = ModelTensors.of_directory(tmp_path), np.random.default_rng(0)
    for update in UPDATE_PATHS:
        engine.update_weights(trainer("glm4_moe", 0), in_flight=True)
        update(engine, saved | extra, model, rng)
        assert_serves("glm4_moe", 1)
    unknown = {f"model.layers.{num_layers + 1}.eh_proj.weight": torch.ones(3)}
    assert_refused("glm4_moe", saved | unknown, "model lacks .*eh_proj")
