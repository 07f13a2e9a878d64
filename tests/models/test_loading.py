"""build_model and open_model: models from directories, transformers models, specs and other
CausalLMs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from rollout.errors import ModelError
from rollout.models import CausalLM, ModelSpec, build_model, save_hf_directory
from rollout.models.checkpoints.loading import open_model
from tests.models.hf_models import LLAMA3_ROPE, PROMPT, YARN_ROPE, hf_config, hf_logits, hf_model
from tests.models.oracle_backend import logits_of

NORM = "model.layers.0.input_layernorm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def reference() -> Any:
    return hf_model("qwen3")


@pytest.fixture
def directory(reference: Any, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path)
    return tmp_path


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_build_model_of_a_saved_directory_gives_the_logits_of_its_model(
    tmp_path: Path, is_tied: bool, max_shard_size: str
) -> None:
    saved = hf_model("llama", tie_word_embeddings=is_tied)
    saved.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "1GB")
    logits_TV = logits_of(build_model(str(tmp_path)), PROMPT)
    assert_close(logits_TV, hf_logits(saved, PROMPT), rtol=1e-4, atol=1e-4)


def test_build_model_with_an_added_rope_scaling_gives_the_logits_of_transformers(
    directory: Path,
) -> None:
    """As the Qwen model card says; transformers 5 has saved `rope_parameters`, and they stay."""
    assert "rope_parameters" in json.loads((directory / "config.json").read_text())
    edit_json(directory / "config.json", rope_scaling=YARN_ROPE)
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    logits_TV = logits_of(build_model(directory), PROMPT)
    assert_close(logits_TV, hf_logits(loaded, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": LLAMA3_ROPE, "attention_bias": True}),
        ("qwen2", {"rope_scaling": YARN_ROPE, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_save_hf_directory_writes_what_transformers_loads(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    spec = ModelSpec.from_hf_config(hf_config(family, **changes).to_dict())
    model = build_model(spec, seed=3)
    save_hf_directory(model, tmp_path / "new")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert_close(logits_of(model, PROMPT), hf_logits(loaded, PROMPT), rtol=1e-4, atol=1e-4)
    again = build_model(tmp_path / "new").read_weights()
    assert all(torch.equal(again[name], view) for name, view in model.read_weights().items())


def test_build_model_takes_the_dtype_of_tensors_without_one_in_the_config(tmp_path: Path) -> None:
    """As gpt-oss and MiniMax-M2 were published."""
    hf_model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50KB")
    edit_json(tmp_path / "config.json", dtype=None)
    assert build_model(tmp_path).spec.dtype == torch.bfloat16
    assert build_model(tmp_path, dtype="float32").spec.dtype == torch.float32


def test_open_model_fills_parameters_that_were_moved(directory: Path) -> None:
    spec = ModelSpec.from_hf_config(hf_config("llama", tie_word_embeddings=True).to_dict())
    for source in (directory, str(directory), spec, hf_model("qwen2")):
        model, fill = open_model(source)
        assert fill is not None
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, torch.nan)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        fill()
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        expected = build_model(source).read_weights()
        assert all(torch.equal(expected[n], view) for n, view in model.read_weights().items())


def test_open_model_returns_a_model_with_values_itself() -> None:
    model = CausalLM.random(ModelSpec.from_hf_config(hf_config("llama").to_dict()))
    assert open_model(model) == (model, None)


def test_build_model_uses_the_configs_dtype_or_casts(reference: Any, tmp_path: Path) -> None:
    build_half = build_model(reference, dtype="bfloat16")
    save_hf_directory(build_half, tmp_path)
    assert build_model(tmp_path).spec.dtype == torch.bfloat16
    wide = build_model(tmp_path, dtype=torch.float32)
    assert wide.spec.dtype == torch.float32
    assert torch.equal(wide.read_weights()[NORM], build_half.read_weights()[NORM].float())


def test_build_model_copies_a_transformers_model(reference: Any) -> None:
    model = build_model(reference)
    assert model.spec.dtype == torch.float32
    before = reference.state_dict()[NORM].clone()
    norm = model.weight_slots()[NORM]
    norm.write(torch.zeros(norm.shape))
    assert torch.equal(reference.state_dict()[NORM], before)


def test_build_model_of_float64_needs_a_dtype() -> None:
    double = hf_model("llama").double()
    with pytest.raises(ModelError, match=r"torch\.float64.*float32"):
        build_model(double)
    assert build_model(double, dtype="float32").spec.dtype == torch.float32


def test_build_model_returns_a_causal_lm_itself_unless_cast() -> None:
    model = CausalLM.random(ModelSpec.from_hf_config(hf_config("llama").to_dict()))
    assert build_model(model) is model
    cast = build_model(model, dtype="bfloat16")
    assert cast is not model
    assert model.spec.dtype == torch.float32
    assert torch.equal(cast.read_weights()[NORM], model.read_weights()[NORM].bfloat16())


def test_read_config_joins_end_tokens_of_both_configs(directory: Path) -> None:
    edit_json(directory / "config.json", eos_token_id=[5, 3])
    edit_json(directory / "generation_config.json", eos_token_id=[3, 4])
    assert build_model(directory).spec.eos_token_ids == (5, 3, 4)


def test_read_config_names_a_malformed_end_token_and_its_file(directory: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        edit_json(directory / name, eos_token_id="x")
        with pytest.raises(ModelError, match=rf"eos_token_id='x' in .*/{name} must be a token id"):
            build_model(directory)


def test_build_model_joins_end_tokens_of_both_transformers_configs() -> None:
    model = hf_model("llama", eos_token_id=7)
    model.generation_config.eos_token_id = 2
    assert build_model(model).spec.eos_token_ids == (7, 2)


def test_build_model_ignores_stored_inverse_frequencies(directory: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert name not in build_model(directory).read_weights()


def test_build_model_takes_tied_weights_stored_twice_if_equal(tmp_path: Path) -> None:
    hf_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    embedding = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    build_model(tmp_path)
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        build_model(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), rf"lacks 1 tensors \('{NORM}'\)"),
        (lambda t: t.update(bonus=torch.ones(1)), "'bonus'.*which the model lacks"),
        (lambda t: t.update({NORM: torch.ones(63)}), rf"{NORM}.*\[63\].*\[64\]"),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)}), rf"{NORM}.*int8"),
    ],
    ids=["missing", "extra", "misshaped", "quantized"],
)
def test_build_model_names_a_tensor_that_does_not_fit(
    directory: Path, edit: Callable[[Tensors], object], message: str
) -> None:
    edit_tensors(directory, edit)
    with pytest.raises(ModelError, match=message) as caught:
        build_model(directory)
    assert str(directory) in str(caught.value)


def test_build_model_names_a_missing_file(directory: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        build_model(directory / "nowhere")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors.*save_pretrained"):
        build_model(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        build_model(directory)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_build_model_names_a_damaged_file(directory: Path, file: str) -> None:
    (directory / file).write_bytes((directory / file).read_bytes()[:100])
    with pytest.raises(ModelError, match=file):
        build_model(directory)


def test_build_model_names_a_missing_or_foreign_shard(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = weight_map[NORM]
    edit_json(index, weight_map={**weight_map, "model.norm.weight": f"../{shard}"})
    with pytest.raises(ModelError, match="must be a file of its directory"):
        build_model(tmp_path)
    edit_json(index, weight_map={**weight_map, "ghost": shard})
    with pytest.raises(ModelError, match=f"{shard} lacks 'ghost'"):
        build_model(tmp_path)
    (tmp_path / shard).unlink()
    with pytest.raises(ModelError, match=f"{shard} is missing"):
        build_model(tmp_path)


def test_build_model_refuses_a_module_of_unknown_kind() -> None:
    with pytest.raises(ModelError, match=r"Linear.*ModelSpec"):
        build_model(torch.nn.Linear(2, 2))
