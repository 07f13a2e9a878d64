"""The job with model.lora: what it trains, pushes, saves and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout import ConfigError
from tests.trainer_hooks.train.grpo_settings import NUM_KINDS, tiny_settings
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train.adapter import load_adapter, new_adapter
from trainer_hooks.train.main import run_seed
from trainer_hooks.train.settings import LoraSettings

LORA = {"model__lora__rank": 2, "model__lora__alpha": 4.0}


def lora_settings(**changes: Any) -> Any:
    own = {"warmup": "none", "trainer__num_steps": 2, **LORA}
    return tiny_settings(mode="sync", **{**own, **changes})


def steps_of(directory: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "metrics.jsonl") if "train/loss" in row]


def adapter_of(directory: Path, step: int) -> dict[str, torch.Tensor]:
    file = directory / "checkpoints" / f"step_{step:06d}" / "adapter_model.safetensors"
    return load_file(file)


@pytest.mark.parametrize("num_engines", [0, 1])
def test_model_lora_trains_only_the_adapter_and_engines_serve_it_on_the_base(
    tmp_path: Path, num_engines: int
) -> None:
    kl = {"algorithm__loss__kl_coefficient": 0.1, "trainer__learning_rate": 0.05}
    run_seed(tmp_path, lora_settings(num_engines=num_engines, reward=NUM_KINDS, **kl), seed=0)
    first, last = adapter_of(tmp_path, 0), adapter_of(tmp_path, 2)
    assert all(tensor.count_nonzero() == 0 for name, tensor in first.items() if "lora_B" in name)
    assert any(not torch.equal(last[name], first[name]) for name in first)
    assert not list((tmp_path / "checkpoints").glob("*/model.safetensors"))
    rows = steps_of(tmp_path)
    # The reference is the base; the first of a step's two minibatches has the engine's policy.
    assert rows[0]["train/kl"] < rows[1]["train/kl"]
    assert rows[1]["train/kl"] > 1e-4


def test_resumed_lora_run_continues_with_its_adapter(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    four = {"trainer__num_steps": 4, "trainer__checkpoint_interval": 2}
    run_seed(whole, lora_settings(**four), seed=0)
    run_seed(cut, lora_settings(**four), seed=0)
    shutil.rmtree(cut / "checkpoints" / "step_000004")  # as if it had been killed before its end
    run_seed(cut, lora_settings(**four, resume="auto"), seed=0)
    expected, found = adapter_of(whole, 4), adapter_of(cut, 4)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_model_lora_is_refused_with_incompatible_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora with algorithm\.critic"):
        lora_settings(algorithm="ppo", algorithm__group_size=1)
    moving = {"algorithm__loss__kl_coefficient": 0.1, "algorithm__reference__sync_interval": 2}
    with pytest.raises(ConfigError, match=r"sync_interval=2 with model\.lora"):
        lora_settings(**moving)
    with pytest.raises(ConfigError, match=r"rank=0 must be .*at least 1"):
        LoraSettings(rank=0, alpha=1.0)
    run_seed(tmp_path, lora_settings(trainer__num_steps=1), seed=0)
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoints" / "step_000001"
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=3, but the adapter in .* has 2"):
        load_adapter(base, checkpoint, LoraSettings(rank=3, alpha=4.0))
    with pytest.raises(ConfigError, match="is a whole model"):
        load_adapter(base, base, LoraSettings(rank=2, alpha=4.0))
    with pytest.raises(ConfigError, match=r"target_modules='no_such_layer'"):
        new_adapter(base, LoraSettings(rank=2, alpha=4.0, target_modules="no_such_layer"))


def test_lora_pushes_to_an_engine_in_this_process_are_merged_and_replace_discarded_weights() -> (
    None
):
    here, elsewhere = lora_settings(), lora_settings(num_engines=1)
    assert here.weight_sync.release == ("kv_cache", "weights")
    assert (here.merges_adapter, here.discards_weights) == (True, True)
    assert (elsewhere.merges_adapter, elsewhere.discards_weights) == (False, False)


def test_engine_samples_from_base_and_lora_adapter(tmp_path: Path) -> None:
    one = {"algorithm__num_minibatches": 1, "trainer__num_steps": 6, "trainer__learning_rate": 0.05}
    run_seed(tmp_path, lora_settings(**one), seed=0)
    # One minibatch a step, so the trainer recomputes the very policy that has sampled.
    rows = [row for row in steps_of(tmp_path) if row["trainer/step"] > 1]
    assert rows, "the adapter had changed, and rewards had a spread"
    for row in rows:
        ratios = row["train/ratio_min"], row["train/ratio_max"]
        assert ratios == pytest.approx((1.0, 1.0), abs=1e-3)
