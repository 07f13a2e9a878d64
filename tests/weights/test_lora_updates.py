"""Updates by a LoraAdapter: the served weights equal, bit for bit, those of the merged full
update."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout import EngineStateError, LoraAdapter, SamplingParams, WeightUpdateError
from rollout.backends.cpu.library import load_library
from rollout.models import CausalLM, build_model
from rollout.models.families.registry import FAMILIES
from tests.family_cases import family_model
from tests.inspected_engine import InspectedEngine
from tests.lora_adapters import SAVED_NAME, Weights, linear_modules, merged, random_adapter
from tests.tiny_models import IS_LONG, generate_all, prompt_of, tiny_engine, tiny_model

PARAMS = SamplingParams(num_tokens_to_generate=6, seed=2)
# Whole panels of 16 and of 32 outputs, so that compiled products pack all matrices in place.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 224}
Q = "model.layers.0.self_attn.q_proj"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_EXAMPLES = 100 if IS_LONG else 15
needs_compiler = pytest.mark.skipif(load_library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "0")


@cache
def trainer(seed: int, *, is_tied: bool = False) -> Any:
    return tiny_model("qwen2", seed=seed, tie_word_embeddings=is_tied, **SIZES)


def weights_of(seed: int, dtype: torch.dtype = torch.float32, **which: Any) -> Weights:
    """What an engine of this dtype serves."""
    model = trainer(seed, **which)
    return {name: p.detach().to(dtype) for name, p in model.named_parameters()}


def served(
    seed: int = 1, dtype: torch.dtype = torch.float32, *, is_tied: bool = False, **config: Any
) -> tuple[InspectedEngine, CausalLM]:
    model = build_model(trainer(seed, is_tied=is_tied), dtype=dtype)
    return tiny_engine(model, buffer_size_gb=0.01, **config), model


def assert_serves(model: CausalLM, expected: Weights) -> None:
    for name, values in model.read_weights().items():
        if name == "lm_head.weight" and model.spec.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        assert torch.equal(bits(values), bits(expected[name])), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


# ---- equal to the merged full update


@st.composite
def adapters(draw: st.DrawFn, modules: list[str]) -> LoraAdapter:
    chosen = draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    return random_adapter(
        weights_of(1),
        chosen,
        seed=draw(st.integers(0, 2**31)),
        rank=draw(st.integers(1, 70)),
        alpha=draw(st.floats(-100, 100, width=32)),
        use_rslora=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_by_an_adapter_equals_the_merged_update(dtype: torch.dtype) -> None:
    engine, model = served(dtype=dtype)
    full_engine, full_model = served(dtype=dtype)
    base = weights_of(1, dtype)

    @settings(max_examples=NUM_EXAMPLES, deadline=None)
    @given(adapters(linear_modules(base)))
    def check(adapter: LoraAdapter) -> None:
        report = engine.update_weights(adapter, in_flight=True)
        assert_serves(model, merged(base, adapter))
        full = full_engine.update_weights(merged(base, adapter), in_flight=True)
        assert_serves(full_model, merged(base, adapter))
        assert report.checksum == full.checksum == engine.weights_checksum()
        assert report.num_bytes <= full.num_bytes

    check()


@pytest.mark.drawn(5)
@needs_compiler
@pytest.mark.parametrize("tune", ["plain", "native", "mkl", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_update_by_an_adapter_works_for_every_packing_and_a_tied_head(
    monkeypatch: pytest.MonkeyPatch, tune: str, dtype: torch.dtype, is_tied: bool
) -> None:
    if tune == "mkl" and dtype is not torch.float32:
        pytest.skip("MKL packs float32 only")
    monkeypatch.setenv("ROLLOUT_TUNE", tune)
    try:
        engine, model = served(dtype=dtype, is_tied=is_tied)
    except Exception as error:
        if tune != "mkl":
            raise
        pytest.skip(f"no MKL here: {error}")
    base = weights_of(1, dtype, is_tied=is_tied)
    modules = [m for m in linear_modules(base) if m != "lm_head"]
    for seed in range(2):
        adapter = random_adapter(base, modules[seed::2], seed=seed)
        engine.update_weights(adapter, in_flight=True)
        expected = merged(base, adapter)
        assert_serves(model, expected)
        # The products compute with these weights, too.
        fresh = tiny_engine(build_model(full_model(expected, is_tied)), buffer_size_gb=0.01)
        requests = [(prompt_of(n), PARAMS) for n in (1, 30)]
        tokens = [r.generated_tokens for r in generate_all(engine, requests)]
        assert tokens == [r.generated_tokens for r in generate_all(fresh, requests)]


def full_model(weights: Weights, is_tied: bool) -> CausalLM:
    """A model that is loaded with these weights."""
    dtype = next(iter(weights.values())).dtype
    model = CausalLM(build_model(trainer(1, is_tied=is_tied), dtype=dtype).spec)
    for name, values in weights.items():
        model.weight_slots()[name].write(values)
    return model


@pytest.mark.parametrize(
    "family", ["phi3", "gemma2", "glm4", "qwen2_moe", "glm4_moe", "deepseek_v3"]
)
def test_update_by_an_adapter_of_fused_projections_and_mixtures(family: str) -> None:
    hf = family_model(family, seed=1)
    engine, full = (tiny_engine(hf, num_blocks=8, max_sequence_length=64) for _ in range(2))
    base = {name: tensor.detach().clone() for name, tensor in hf.state_dict().items()}
    modules = [module for module in linear_modules(base) if module != "lm_head"]
    assert any("shared_expert" in m for m in modules) == bool(FAMILIES[family].mixture)
    adapter = random_adapter(base, modules, name=SAVED_NAME)
    report = engine.update_weights(adapter, in_flight=True)
    assert report.checksum == engine.weights_checksum()
    assert report.checksum == full.update_weights(merged(base, adapter), in_flight=True).checksum


@pytest.mark.parametrize("parameter", ["gate_up_proj", "3.gate_proj"])
def test_stage_refuses_an_adapter_of_experts_by_name(parameter: str) -> None:
    hf = family_model("glm4_moe", seed=1)
    engine = tiny_engine(hf, num_blocks=8, max_sequence_length=64)
    checksum, module = engine.weights_checksum(), f"model.layers.1.mlp.experts.{parameter}"
    with pytest.raises(WeightUpdateError, match=f"{module}', which is expert weights"):
        engine.update_weights(of_module(module), in_flight=True)
    assert engine.weights_checksum() == checksum


# ---- a base that does not drift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_alternate_updates_leave_no_drift(dtype: torch.dtype) -> None:
    engine, model = served(dtype=dtype)
    base, other = weights_of(1, dtype), weights_of(2, dtype)
    modules = linear_modules(base)
    first, second = (random_adapter(base, modules[start::2], seed=start) for start in (0, 1))
    everywhere = random_adapter(base, seed=3, rank=8)
    for turn in range(20):
        push = (first, second, everywhere, other, first, base)[turn % 6]
        engine.update_weights(push, in_flight=True)
        if not isinstance(push, LoraAdapter):
            current, expected = push, push
        else:
            current = other if turn % 6 == 4 else base
            expected = merged(current, push)
        assert_serves(model, expected)
    engine.update_weights(first, in_flight=True)
    engine.update_weights(base, in_flight=True)
    fresh, _ = served(dtype=dtype)
    assert engine.weights_checksum() == fresh.weights_checksum()


@needs_compiler
@pytest.mark.parametrize("tune", ["plain", "native"])
def test_random_schedules_with_adapters_serve_the_last_update(
    monkeypatch: pytest.MonkeyPatch, tune: str
) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", tune)
    engine, model = served(memory_kind="reserved")
    steps = ["adapter", "adapter", "full", "refused", "suspend", "discard", "with base"]

    @settings(max_examples=NUM_EXAMPLES, deadline=None)
    @given(st.data())
    def live(data: st.DataObject) -> None:
        base = expected = weights_of(1)
        engine.update_weights(base, in_flight=True)
        for step in data.draw(st.lists(st.sampled_from(steps), max_size=8)):
            seed = data.draw(st.integers(1, 3))
            adapter = data.draw(adapters(linear_modules(base)))
            if step == "full":
                base = expected = weights_of(seed)
                engine.update_weights(base, in_flight=True)
            elif step == "adapter":
                expected = merged(base, adapter)
                engine.update_weights(adapter, in_flight=True)
            elif step == "with base":
                base = weights_of(seed)
                expected = merged(base, adapter)
                engine.update_weights(replace(adapter, base=base), in_flight=True)
            elif step == "refused":
                with pytest.raises(WeightUpdateError, match="NaN"):
                    engine.update_weights(replace(adapter, alpha=1e300), in_flight=True)
            else:
                engine.pause()
                engine.suspend(
                    "recompute", ("kv_cache", "weights"), discard_weights=step == "discard"
                )
                engine.resume()
                if step == "discard":
                    with pytest.raises(EngineStateError, match="commit a full update first"):
                        engine.update_weights(adapter)
                    engine.update_weights(base)
                    expected = base
                engine.unpause()
            assert_serves(model, expected)

    live()


# ---- the base's memory


def test_base_of_adapted_layers_is_kept_until_the_next_full_update() -> None:
    engine, _ = served(dtype=torch.bfloat16)
    base = weights_of(1, torch.bfloat16)
    assert engine.memory_status().lora_base_bytes == engine.stats().lora_base_bytes == 0
    for modules in ([Q], linear_modules(base), [Q]):
        engine.update_weights(random_adapter(base, modules), in_flight=True)
        num_bytes = sum(base[f"{module}.weight"].nbytes for module in modules)
        assert engine.memory_status().lora_base_bytes == engine.stats().lora_base_bytes == num_bytes
    engine.pause()
    engine.suspend("recompute", ("kv_cache", "weights"))
    assert engine.memory_status().lora_base_bytes == base[f"{Q}.weight"].nbytes
    engine.resume()
    engine.update_weights(base)
    assert engine.memory_status().lora_base_bytes == 0


def test_commit_returns_the_bytes_that_it_changed() -> None:
    engine, _ = served()
    base = weights_of(1)
    size = base[f"{Q}.weight"].nbytes
    report = engine.update_weights(random_adapter(base, [Q]), in_flight=True)
    assert report.num_bytes == size
    # Its layer goes back to its base.
    other = "model.layers.1.self_attn.q_proj"
    assert (
        engine.update_weights(random_adapter(base, [other]), in_flight=True).num_bytes == 2 * size
    )


# ---- one transaction


def test_commit_refuses_an_adapter_staged_before_another_commit() -> None:
    engine, model = served()
    base = weights_of(1)
    first, second = (random_adapter(base, [Q], seed=seed) for seed in (1, 2))
    staged, staged_too = engine.stage_weights(first), engine.stage_weights(second)
    engine.commit_weights(staged, in_flight=True)
    with pytest.raises(WeightUpdateError, match="stage it again"):
        engine.commit_weights(staged_too, in_flight=True)
    assert engine.weights_version == 1
    assert_serves(model, merged(base, first))


def test_commit_refuses_an_adapter_once_the_weights_are_discarded() -> None:
    engine, _ = served()
    staged = engine.stage_weights(random_adapter(weights_of(1), [Q]))
    engine.pause()
    engine.suspend("recompute", ("kv_cache", "weights"), discard_weights=True)
    engine.resume()
    with pytest.raises(EngineStateError, match="cannot commit an adapter"):
        engine.commit_weights(staged)
    engine.update_weights(weights_of(2))


@pytest.mark.parametrize("tune", ["plain", pytest.param("native", marks=needs_compiler)])
def test_commit_that_fails_keeps_the_adapter_from_before(
    monkeypatch: pytest.MonkeyPatch, tune: str
) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", tune)
    engine, model = served()
    base = weights_of(1)
    first, second = (random_adapter(base, seed=seed) for seed in (1, 2))
    engine.update_weights(first, in_flight=True)
    checksum, num_bytes = engine.weights_checksum(), engine.memory_status().lora_base_bytes
    refresh = CausalLM.refresh

    def refresh_and_fail(model: CausalLM, staged: Any = None) -> None:
        refresh(model, staged)
        raise OSError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "refresh", refresh_and_fail)
        with pytest.raises(WeightUpdateError, match="device lost"):
            engine.update_weights(second, in_flight=True)
    assert (engine.weights_version, engine.weights_checksum()) == (1, checksum)
    assert engine.memory_status().lora_base_bytes == num_bytes
    engine.update_weights(second, in_flight=True)
    assert_serves(model, merged(base, second))


@pytest.mark.parametrize("tune", ["plain", pytest.param("native", marks=needs_compiler)])
def test_commit_of_an_adapter_can_be_repeated_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, tune: str
) -> None:
    """The weights are those from before, which it was staged on."""
    monkeypatch.setenv("ROLLOUT_TUNE", tune)
    engine, model = served()
    adapter = random_adapter(weights_of(1), seed=1)
    staged = engine.stage_weights(adapter)
    engine.pause()
    refresh = CausalLM.refresh

    def refresh_and_fail(model: CausalLM, staged: Any = None) -> None:
        refresh(model, staged)
        raise OSError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "refresh", refresh_and_fail)
        with pytest.raises(WeightUpdateError, match="device lost"):
            engine.commit_weights(staged)
    engine.commit_weights(staged)
    assert_serves(model, merged(weights_of(1), adapter))


def with_tensor(half: str, tensor: Tensor, module: str = Q, **fields: Any) -> LoraAdapter:
    adapter = random_adapter(weights_of(1), [Q], **fields)
    name = f"base_model.model.{Q}.lora_{half}.default.weight"
    return replace(adapter, tensors={**adapter.tensors, name: tensor})


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (lambda: with_tensor("A", torch.full((3, 64), torch.nan)), "q_proj.lora_A.*NaN"),
        (
            lambda: with_tensor("B", torch.ones(64, 3), alpha=1e300),
            "q_proj.weight' holds NaN or inf",
        ),
        (lambda: with_tensor("A", torch.ones(3, 63)), "lora_A.* has 63 in features.* has 64"),
        (lambda: with_tensor("B", torch.ones(65, 3)), "lora_B.* has 65 out features.* has 64"),
        (lambda: with_tensor("A", torch.ones(4, 64)), r"lora_A.* has shape \[4, 64\].* rank 3"),
        (lambda: of_module("model.embed_tokens"), "'model.embed_tokens', which is no linear"),
        (lambda: of_module("model.layers.9.self_attn.q_proj"), "layers.9.*no linear layer"),
        (lambda: of_module("model.layers.0.mlp.experts.3.gate_proj"), "which is expert weights"),
        (lambda: replace(with_tensor("A", torch.ones(3, 64)), base={}), "the update lacks"),
    ],
    ids=["nan", "overflow", "in", "out", "rank", "embedding", "layer", "experts", "base"],
)
def test_stage_refuses_an_adapter_that_does_not_fit_by_name(adapter: Any, message: str) -> None:
    engine, _ = served()
    engine.update_weights(random_adapter(weights_of(1)), in_flight=True)
    checksum = engine.weights_checksum()
    with pytest.raises(WeightUpdateError, match=message):
        engine.update_weights(adapter(), in_flight=True)
    assert (engine.weights_checksum(), engine.weights_version) == (checksum, 1)
    assert engine.memory_status().lora_base_bytes > 0


def of_module(module: str) -> LoraAdapter:
    weights = {f"{module}.weight": torch.ones(64, 64)}
    return random_adapter(weights, [module])


def test_stage_refuses_an_adapter_of_a_tied_head() -> None:
    engine, model = served(is_tied=True)
    base = weights_of(1, is_tied=True)
    head = random_adapter({"lm_head.weight": base["model.embed_tokens.weight"]}, ["lm_head"])
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight', which is tied"):
        engine.update_weights(head, in_flight=True)
    assert_serves(model, base)


def test_reject_non_finite_false_takes_an_adapter_with_infinity() -> None:
    engine, model = served(reject_non_finite_weights=False)
    adapter = with_tensor("B", torch.full((64, 3), torch.inf))
    engine.update_weights(adapter, in_flight=True)
    assert not model.read_weights()[f"{Q}.weight"].isfinite().all()


# ---- against PEFT itself


def test_update_by_an_adapter_equals_peft_merge_and_unload() -> None:
    import peft

    hf = tiny_model("qwen2", seed=1, **SIZES)
    engine = tiny_engine(build_model(hf), buffer_size_gb=0.01)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "down_proj", "lm_head"],
        rank_pattern={"down_proj": 7},
        alpha_pattern={r"layers\.1\.mlp\.down_proj": 3},
        init_lora_weights=False,
    )
    model = peft.get_peft_model(hf, config)
    engine.update_weights(LoraAdapter.from_peft(model), in_flight=True)
    checksum = engine.weights_checksum()
    plain = model.merge_and_unload()
    assert engine.update_weights(plain, in_flight=True).checksum == checksum
