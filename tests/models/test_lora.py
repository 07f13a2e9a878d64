"""LoraAdapter: names and configs of PEFT are read, and unsupported ones refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rollout import LoraAdapter, ModelError, WeightUpdateError
from rollout.weights.lora import NEUTRAL_VALUES, READ_KEYS, TRAINING_KEYS
from tests.lora_adapters import PEFT_CONFIG, PeftLike

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


def halves(name: str = "base_model.model.{}.lora_{}.weight", rank: int = 2) -> dict[str, Tensor]:
    return {
        name.format(module, half): torch.ones((rank, 6) if half == "A" else (4, rank))
        for module in (Q, UP)
        for half in "AB"
    }


def saved(directory: Path, config: dict[str, Any] = PEFT_CONFIG, **tensors: Tensor) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors or halves(), directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.{}.lora_{}.weight",
        "base_model.model.{}.lora_{}.default.weight",
        "base_model.model.{}.lora_{}.my adapter.weight",
        "{}.lora_{}.weight",
        "{}.lora_{}.default.weight",
    ],
)
def test_lora_pairs_take_every_form_of_a_name(name: str) -> None:
    pairs = LoraAdapter(tensors=halves(name), rank=2, alpha=8).pairs()
    assert list(pairs) == [Q, UP]
    assert pairs[Q].names == (name.format(Q, "A"), name.format(Q, "B"))
    assert (pairs[Q].a_RK.shape, pairs[Q].b_NR.shape) == ((2, 6), (4, 2))


def test_lora_scale_follows_rank_and_alpha_of_each_module() -> None:
    def scales(**fields: Any) -> list[float]:
        pairs = LoraAdapter(tensors=halves(), rank=2, alpha=8, **fields).pairs()
        return [pairs[Q].scale, pairs[UP].scale]

    assert scales() == [4.0, 4.0]
    assert scales(use_rslora=True) == [8 / math.sqrt(2)] * 2
    assert scales(alphas={UP: 3}) == [4.0, 1.5]


def test_from_directory_reads_rank_and_alpha_patterns(tmp_path: Path) -> None:
    tensors = halves() | {f"{UP}.lora_A.weight": torch.ones(5, 6)}
    tensors = {n: t for n, t in tensors.items() if not n.startswith(f"base_model.model.{UP}")}
    tensors[f"{UP}.lora_B.weight"] = torch.ones(4, 5)
    config = PEFT_CONFIG | {
        "rank_pattern": {r"layers\.1\.mlp\.up_proj": 5, "k_proj": 64},
        "alpha_pattern": {"proj": 1, "q_proj": 10, r"model.layers.\d+.mlp.*": 3},
    }
    adapter = LoraAdapter.from_directory(saved(tmp_path, config, **tensors))
    assert (adapter.rank, adapter.alpha) == (2, 8)
    pairs = adapter.pairs()
    assert (pairs[Q].scale, pairs[UP].scale) == (10 / 2, 3 / 5)


def test_from_directory_matches_patterns_at_the_end_of_a_name(tmp_path: Path) -> None:
    config = PEFT_CONFIG | {"alpha_pattern": {"proj": 1, "self_attn": 2, "_proj": 3}}
    assert LoraAdapter.from_directory(saved(tmp_path, config)).alphas == {}


def test_from_directory_names_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing"):
        LoraAdapter.from_directory(tmp_path)
    (saved(tmp_path) / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        LoraAdapter.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base weights"),
        ({"use_qalora": 0}, "use_qalora=0 "),
        ({"alora_invocation_tokens": []}, r"alora_invocation_tokens=\[\]"),
        ({"kasa_config": {}}, r"kasa_config=\{\}"),
        ({"a_later_kind": {"rank": 2}}, "a_later_kind="),
        ({"r": 0}, "rank=0"),
        ({"r": None}, "rank=None"),
        ({"lora_alpha": float("nan")}, "alpha=nan"),
    ],
)
def test_from_directory_refuses_settings_beyond_b_times_a(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(WeightUpdateError, match=named):
        LoraAdapter.from_directory(saved(tmp_path, PEFT_CONFIG | changes))


def test_from_directory_reads_ignores_or_refuses_every_peft_setting(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    known = READ_KEYS | TRAINING_KEYS | NEUTRAL_VALUES.keys()
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == known
    defaults = peft.LoraConfig(r=2, target_modules=["q_proj"]).to_dict()
    saved(tmp_path, {**json.loads(json.dumps(defaults, default=list)), "peft_type": "LORA"})
    assert LoraAdapter.from_directory(tmp_path).rank == 2


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(A), f"has '{B}', but not its lora_A"),
        (lambda t: t.pop(B), f"has '{A}', but not its lora_B"),
        (lambda t: t.update({A: torch.ones(3, 6)}), rf"'{A}' has shape \[3, 6\].*rank 2"),
        (lambda t: t.update({B: torch.ones(2, 4)}), rf"'{B}' has shape \[2, 4\].*rank 2"),
        (lambda t: t.update({A: torch.ones(2)}), rf"'{A}' has shape \[2\]"),
        (lambda t: t.update({A: torch.ones(2, 6).int()}), f"'{A}' has dtype torch.int32"),
        (lambda t: t.update({A: [1.0]}), f"'{A}' is a list"),
        (lambda t: t.update({f"{Q}.lora_A.weight": t[A]}), f"'{Q}.lora_A.weight' and '{A}'"),
        (lambda t: t.update({"x.lora_magnitude_vector.weight": t[A]}), "'x.lora_magnitude_vector"),
        (lambda t: t.update({"x.lora_embedding_A": t[A]}), "'x.lora_embedding_A' is no"),
        (lambda t: t.update({"lm_head.weight": t[A]}), "'lm_head.weight' is no.*modules_to_save"),
        (lambda t: t.clear(), "has no tensors"),
    ],
)
def test_lora_pairs_refuses_unpaired_tensors_by_name(
    edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    tensors: dict[str, Any] = halves()
    edit(tensors)
    with pytest.raises(WeightUpdateError, match=message):
        LoraAdapter(tensors=tensors, rank=2, alpha=8).pairs()


# ---- a live model, as PEFT makes it


def test_from_peft_shares_memory_with_the_model() -> None:
    model = PeftLike("default")
    pair = LoraAdapter.from_peft(model).pairs()["q_proj"]
    layer = model.base_model.model.q_proj
    assert pair.a_RK.data_ptr() == layer.lora_A["default"].weight.data_ptr()
    assert pair.b_NR.data_ptr() == layer.lora_B["default"].weight.data_ptr()
    assert not pair.a_RK.requires_grad
    assert pair.scale == 4.0


def test_from_peft_takes_one_of_several_adapters() -> None:
    model = PeftLike("old", "new")
    layer = model.base_model.model.q_proj
    for chosen, name in ((None, "old"), ("new", "new")):
        pair = LoraAdapter.from_peft(model, chosen).pairs()["q_proj"]
        assert pair.a_RK.data_ptr() == layer.lora_A[name].weight.data_ptr()
    model.active_adapters = ["old", "new"]
    with pytest.raises(WeightUpdateError, match="2 active adapters"):
        LoraAdapter.from_peft(model)
    with pytest.raises(WeightUpdateError, match="no adapter 'newest'; name one of old, new"):
        LoraAdapter.from_peft(model, "newest")


def test_from_peft_refuses_a_model_without_adapters_or_a_changed_scale() -> None:
    with pytest.raises(WeightUpdateError, match="Linear has no peft_config"):
        LoraAdapter.from_peft(nn.Linear(2, 2))
    model = PeftLike("default")
    model.base_model.model.q_proj.scaling["default"] = 3.0
    with pytest.raises(WeightUpdateError, match=r"q_proj' scales its adapter by 3.0.*gives 4.0"):
        LoraAdapter.from_peft(model)
    with pytest.raises(WeightUpdateError, match="use_dora"):
        LoraAdapter.from_peft(PeftLike("default", use_dora=True))
