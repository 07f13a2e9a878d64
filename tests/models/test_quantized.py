"""Quantised directories load, bit for bit, to the weights that transformers dequantises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rollout import SamplingParams
from rollout.errors import ModelError
from rollout.layers.weight_slot import part_of
from rollout.models import build_model, save_hf_directory
from rollout.models.checkpoints.dequantized import Dequantized
from rollout.models.checkpoints.reader import Checkpoint
from rollout.models.quantization import FP8, MXFP4, quant_method_of
from tests.models.hf_models import hf_model
from tests.run_kind import scaled
from tests.tiny_models import Margins, generate_all, prompt_of, tiny_engine, tiny_model

Tensors = dict[str, Tensor]
FP8_CONFIG = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}


def quantized(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The values as fp8, and the scale of each block of 128 x 128."""
    num_rows, num_columns = weight_NK.shape
    scales_PQ = torch.empty(-(-num_rows // 128), -(-num_columns // 128))
    values_NK = torch.empty(weight_NK.shape, dtype=torch.float8_e4m3fn)
    for p in range(scales_PQ.shape[0]):
        for q in range(scales_PQ.shape[1]):
            block = slice(p * 128, (p + 1) * 128), slice(q * 128, (q + 1) * 128)
            scales_PQ[p, q] = weight_NK[block].abs().max() / 448
            values_NK[block] = (weight_NK[block] / scales_PQ[p, q]).to(values_NK.dtype)
    return values_NK, scales_PQ


def fp8_tensors(tensors: Tensors) -> Tensors:
    """All projections of the layers quantised, the rest as it is."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            out[name], out[f"{name}_scale_inv"] = quantized(tensor.float())
    return out


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An fp8 directory of a bfloat16 model; its gate_proj has scales of 2**n, as DeepSeek's."""
    hf_model("qwen3", head_dim=64, **SIZES).bfloat16().save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(fp8_tensors(tensors)))
    edit_config(tmp_path, quantization_config=FP8_CONFIG)
    return tmp_path


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


# ---- fp8


def test_fp8_directory_loads_to_transformers_dequantized_weights(directory: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()
    model = build_model(directory)
    assert model.spec.dtype == torch.bfloat16
    weights = model.read_weights()
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        assert values.dtype == expected[name].dtype == torch.bfloat16, name
        assert torch.equal(bits(values), bits(expected[name])), name


def test_fp8_directory_loads_in_another_dtype_with_one_rounding(directory: Path) -> None:
    for dtype in (torch.float32, torch.float16):
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()
        values = build_model(directory, dtype=dtype).read_weights()[Q_PROJ]
        assert torch.equal(bits(values), bits(expected[Q_PROJ]))


def test_fp8_model_is_saved_without_quantization(directory: Path, tmp_path: Path) -> None:
    model = build_model(directory)
    save_hf_directory(model, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert all(torch.equal(again[name], values) for name, values in model.read_weights().items())


def test_build_model_takes_a_dequantized_live_model(directory: Path) -> None:
    live = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert torch.equal(build_model(live).read_weights()[Q_PROJ], live.state_dict()[Q_PROJ])


@settings(max_examples=scaled(40), deadline=None)
@given(data=st.data())
def test_fp8_values_of_any_shape_are_scaled_by_their_block(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Odd shapes end in smaller blocks, as in DeepSeek-V3's kv_a_proj_with_mqa, 576 rows."""
    shape = data.draw(st.tuples(st.integers(1, 1300), st.integers(1, 300)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    values[values & 127 == 127] = 0  # NaN
    scales_dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    grid = -(-shape[0] // 128), -(-shape[1] // 128)
    scales = torch.randn(grid, generator=generator).mul(0.01).to(scales_dtype)
    tensors = {"w": values.view(torch.float8_e4m3fn), "w_scale_inv": scales}
    dtype = data.draw(st.sampled_from(DTYPES))
    scale_of_each = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = tensors["w"].float() * scale_of_each[: shape[0], : shape[1]]
    assert torch.equal(
        bits(dequantized(tmp_path_factory.mktemp("w"), tensors, FP8, dtype)["w"]),
        bits(expected.to(dtype)),
    )


def test_fp8_scales_of_8_bits_are_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([[0.25, 2.0**-20], [8.0, 1.0]])
    tensors = {
        "w": torch.randn(256, 256).to(torch.float8_e4m3fn),
        "w_scale_inv": scales.to(torch.float8_e8m0fnu),
    }
    expected = Fp8Dequantize(None)._dequantize_one(*tensors.values(), output_dtype=torch.bfloat16)
    assert torch.equal(dequantized(tmp_path, tensors, FP8, torch.bfloat16)["w"], expected)


def dequantized(directory: Path, tensors: Tensors, method: str, dtype: torch.dtype) -> Tensors:
    save_file(tensors, directory / "model.safetensors")
    view = Dequantized(Checkpoint.open(directory), method, dtype)
    found = dict(view.items())
    assert list(found) == list(view.keys())
    return found


def test_fp8_scales_may_lie_in_another_shard(directory: Path) -> None:
    expected = build_model(directory).read_weights()
    tensors = load_file(directory / "model.safetensors")
    shards: dict[str, Tensors] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, tensor in tensors.items():
        shards[f"model-{1 + name.endswith('scale_inv')}.safetensors"][name] = tensor
    for file_name, part in shards.items():
        save_file(part, directory / file_name)
    weight_map = {name: file_name for file_name, part in shards.items() for name in part}
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    values = build_model(directory).read_weights()
    assert all(torch.equal(values[name], weight) for name, weight in expected.items())


SCALES = f"{Q_PROJ}_scale_inv"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(SCALES), rf"'{Q_PROJ}' has dtype torch.float8_e4m3fn, but its scales"),
        (lambda t: t.pop(Q_PROJ), rf"'{SCALES}' has scales for '{Q_PROJ}', which is missing"),
        (lambda t: t.update({Q_PROJ: torch.ones(256, 128)}), f"'{Q_PROJ}' has scales, but .*32"),
        (lambda t: t.update({SCALES: torch.ones(1, 2)}), r"have shape \[1, 2\] .* needs \[2, 1\]"),
        (lambda t: t.update({SCALES: torch.ones(2, 1).int()}), "torch.int32.* floating"),
        (lambda t: t.update({SCALES: torch.tensor(1.0)}), r"have shape \[\]"),
        (lambda t: t.update({"stray.weight_scale_inv": torch.ones(1)}), "'stray.weight_scale_inv'"),
        (
            lambda t: t.update({f"{Q_PROJ}_activation_scale": torch.ones(1)}),
            "'model.layers.0.self_attn.q_proj.weight_activation_scale'",
        ),
    ],
    ids=["no scales", "no weight", "plain", "grid", "integer", "scalar", "stray", "static"],
)
def test_fp8_tensors_that_do_not_fit_are_refused_by_name(
    directory: Path, edit: Callable[[Tensors], object], message: str
) -> None:
    edit_tensors(directory, edit)
    with pytest.raises(ModelError, match=message):
        build_model(directory)


def test_fp8_experts_load_to_transformers_dequantized_weights(tmp_path: Path) -> None:
    hf = tiny_model(
        "qwen3_moe",
        seed=1,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
    )
    hf.bfloat16().save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(fp8_tensors(tensors)))
    edit_config(tmp_path, quantization_config=FP8_CONFIG | {"modules_to_not_convert": ["gate"]})
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert load_file(tmp_path / "model.safetensors")[name].dtype == torch.float8_e4m3fn
    assert_equal_to_transformers(tmp_path)


def assert_equal_to_transformers(directory: Path) -> None:
    """An engine's model has the bits that transformers loads, under the live module's names."""
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    table, compared = build_model(directory).weight_table(), set()
    for name, tensor in expected.state_dict().items():
        for weight, index in table.parts(name).items():
            values = table.slots[weight].read()
            assert torch.equal(bits(values), bits(part_of(tensor, index))), (name, weight)
            compared.add(weight)
    assert compared == table.slots.keys()


# ---- mxfp4


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    """A directory of a tiny gpt_oss whose experts are mxfp4, as published ones are."""
    config = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 11}
    hf = tiny_model("gpt_oss", seed=1, hidden_size=64, intermediate_size=96, **config)
    hf.bfloat16().save_pretrained(tmp_path)

    def pack(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(2)
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            num_experts, num_inputs, num_rows = tensors.pop(name).shape
            shape = num_experts, num_rows, num_inputs // 32
            drawn = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_blocks"] = drawn
            exponents = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = exponents

    edit_tensors(tmp_path, pack)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    return tmp_path


def test_mxfp4_directory_loads_to_transformers_dequantized_weights(gpt_oss: Path) -> None:
    assert_equal_to_transformers(gpt_oss)


def test_mxfp4_model_generates_as_transformers_and_is_saved_without_quantization(
    gpt_oss: Path, tmp_path: Path
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(gpt_oss, dtype=torch.float32)
    # Transformers 5.17 loads it with angles that were rounded to bfloat16.
    live = type(loaded)(loaded.config).float().eval()
    live.load_state_dict(loaded.state_dict())
    engine = tiny_engine(live, buffer_size_gb=0.01)
    model = build_model(gpt_oss, dtype="float32")
    from_directory = tiny_engine(model, buffer_size_gb=0.01)
    assert from_directory.weights_checksum() == engine.weights_checksum()
    params, margins = SamplingParams(num_tokens_to_generate=12, seed=1), Margins()
    for request in generate_all(from_directory, [(prompt_of(n), params) for n in (3, 30)]):
        margins.compare_with_oracle(live, request)
    margins.check()
    save_hf_directory(model, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert_equal_to_transformers(tmp_path / "plain")


def test_mxfp4_experts_without_scales_are_refused_by_name(gpt_oss: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(gpt_oss, lambda tensors: tensors.pop(f"{name}_scales"))
    with pytest.raises(ModelError, match=f"'{name}_scales' is missing beside '{name}_blocks'"):
        build_model(gpt_oss)


@settings(max_examples=scaled(40), deadline=None)
@given(data=st.data())
def test_mxfp4_values_equal_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Every byte, and every scale: those that leave the range of a dtype, too."""
    num_experts, num_rows, num_blocks = (data.draw(st.integers(1, n)) for n in (3, 9, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shape = num_experts, num_rows, num_blocks
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors = {"mlp.gate_up_proj_blocks": blocks, "mlp.gate_up_proj_scales": scales}
    found = dequantized(tmp_path_factory.mktemp("w"), tensors, MXFP4, dtype)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert found.keys() == {"mlp.gate_up_proj"}
    assert torch.equal(bits(found["mlp.gate_up_proj"]), bits(expected))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"e_scales": None}, "'e_scales' is missing beside 'e_blocks'"),
        ({"e_blocks": None}, "'e_blocks' is missing beside 'e_scales'"),
        ({"e": torch.ones(1)}, "'e' comes twice"),
        ({"e_scales": torch.ones(2, 3, 4)}, "scales of 'e_blocks' have dtype torch.float32"),
        ({"e_blocks": torch.zeros(2, 3, 4, 8).byte()}, r"'e_blocks' has shape \[2, 3, 4, 8\]"),
        ({"e_scales": torch.zeros(2, 3, 5).byte()}, r"scales \[2, 3, 5\]"),
    ],
    ids=["no scales", "no blocks", "twice", "dtype", "bytes", "grid"],
)
def test_mxfp4_blocks_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    tensors = {
        "e_blocks": torch.zeros(2, 3, 4, 16).byte(),
        "e_scales": torch.zeros(2, 3, 4).byte(),
    }
    given_tensors = {n: t for n, t in (tensors | changes).items() if t is not None}
    with pytest.raises(ModelError, match=message):
        dequantized(tmp_path, given_tensors, MXFP4, torch.bfloat16)


# ---- the config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": None}, "'None'"),
        ({"weight_block_size": [64, 128]}, r"\[64, 128\]"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"activation_scheme": "static"}, "'static'"),
        ({"fmt": "e5m2"}, "'e5m2'"),
        ({"expert_dtype": "fp4"}, "'fp4'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_quant_method_of_other_quantizations_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=f"{named}.*save the model dequantised"):
        quant_method_of({"quantization_config": FP8_CONFIG | changes})


def test_quant_method_of_published_configs_is_known() -> None:
    ignored = {"modules_to_not_convert": None, "ignored_layers": ["gate", "lm_head"]}
    for changes in ({}, {"scale_fmt": "ue8m0"}, {"fmt": "float8_e4m3fn", **ignored}):
        assert quant_method_of({"quantization_config": FP8_CONFIG | changes}) == FP8
    gpt_oss = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    assert quant_method_of({"quantization_config": gpt_oss}) == MXFP4
    assert quant_method_of({"quantization_config": None}) is quant_method_of({}) is None
