"""update_weights changes all weights or none, and the engine then computes as the new model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor
from transformers import DynamicCache

from rollout import (
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    ModelError,
    NonFiniteLogitsError,
    SamplingParams,
    Status,
    WeightUpdateError,
)
from rollout.backends.cpu.backend import cpu_backend
from rollout.models.checkpoints.loading import build_model
from rollout.weights.served import ServedWeights
from tests.contracts.implementations import OPS
from tests.tiny_models import (
    Margins,
    drain,
    expected_logprobs,
    generate_all,
    generated_logits,
    prompt_of,
    randomize,
    tiny_engine,
    tiny_model,
    tokens_of,
)

Weights = dict[str, Tensor]
PARAMS = SamplingParams(num_tokens_to_generate=8, seed=2, return_log_probs=True)
NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


@cache
def old_model() -> Any:
    return tiny_model("qwen3", seed=1)


@cache
def new_model() -> Any:
    return tiny_model("qwen3", seed=2)


def weights(model: Any) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def with_value(name: str, value: float) -> Callable[[Weights], Any]:
    def poison(source: Weights) -> Weights:
        source[name].view(-1)[-1] = value
        return source

    return poison


def test_update_weights_passes_on_an_error_of_the_source() -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(new_model()).items())[:3]
        raise OSError("disk")

    engine = tiny_engine(old_model())
    checksum = engine.weights_checksum()
    after = f"the source, after '{list(weights(new_model()))[2]}', failed with OSError: disk"
    with pytest.raises(WeightUpdateError, match=after):
        engine.update_weights(source(), in_flight=True)
    assert (engine.weights_checksum(), engine.weights_version) == (checksum, 0)


def test_update_weights_takes_tied_parameters_once_or_equal() -> None:
    tied = tiny_model("llama", tie_word_embeddings=True, seed=1)
    source = weights(tiny_model("llama", tie_word_embeddings=True, seed=2))
    as_head = {HEAD if name == EMBED else name: tensor for name, tensor in source.items()}
    engine, checksums = tiny_engine(tied), set()
    for named in (source, as_head, source | as_head):
        report = engine.update_weights(named, in_flight=True)
        checksums.add((report.checksum, engine.weights_checksum(), report.num_bytes))
    assert len(checksums) == 1
    differing = source | {HEAD: source[EMBED] + 1e-3}
    with pytest.raises(WeightUpdateError, match=f"'{HEAD}' and '{EMBED}' are tied"):
        engine.update_weights(differing, in_flight=True)
    assert engine.weights_version == 3


@pytest.mark.parametrize("name", OPS)
def test_weights_checksum_is_the_same_on_every_backend(name: str) -> None:
    backend = replace(cpu_backend("device"), ops=OPS[name](), fuse_decoder=None)
    model = build_model(old_model())
    served = ServedWeights(model, backend, version=0, reject_non_finite=True)
    model.prepare(backend)
    assert served.checksum() == tiny_engine(old_model()).weights_checksum()
    staged = served.stage(weights(new_model()))
    assert staged.checksum == tiny_engine(new_model()).weights_checksum()


def test_update_weights_takes_equal_nan_in_tied_parameters() -> None:
    tied = tiny_model("llama", tie_word_embeddings=True, seed=1)
    source = with_value(EMBED, float("nan"))(weights(tied))
    engine = tiny_engine(tied, reject_non_finite_weights=False)
    report = engine.update_weights(source | {HEAD: source[EMBED].clone()}, in_flight=True)
    assert report.checksum == engine.weights_checksum()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_update_weights_makes_the_engine_the_new_model(family: str, dtype: torch.dtype) -> None:
    new = tiny_model(family, seed=9)
    source = {name: tensor.to(dtype) for name, tensor in weights(new).items()}
    new.load_state_dict(source, strict=False)  # as rounded
    engine = tiny_engine(tiny_model(family, seed=8))
    report = engine.update_weights(source.items(), in_flight=True)
    assert report.checksum == engine.weights_checksum()
    assert report.checksum == tiny_engine(new).weights_checksum()
    assert report.num_bytes == 4 * sum(p.numel() for p in new.parameters())
    assert 0 < report.stall_seconds < report.seconds
    requests = generate_all(engine, [(prompt_of(n), PARAMS) for n in (1, 9, 30)])
    margins = Margins()
    for request in requests:
        margins.compare_with_oracle(new, request)
        check_logprobs(request, generated_logits(new, request))
    margins.check()


def check_logprobs(request: DynamicInferenceRequest, logits_TV: Any, start: int = 0) -> None:
    expected = [
        expected_logprobs(logits_V, request.sampling_params)[token]
        for logits_V, token in zip(logits_TV, request.generated_tokens[start:], strict=True)
    ]
    assert_allclose(request.generated_log_probs[start:].numpy(), expected, atol=1e-4)


def test_update_weights_takes_a_python_subclass_of_tensor() -> None:
    class Tagged(torch.Tensor):
        pass

    engine = tiny_engine(old_model())
    engine.pause()
    engine.update_weights({k: t.as_subclass(Tagged) for k, t in weights(new_model()).items()})
    assert engine.weights_checksum() == tiny_engine(new_model()).weights_checksum()


def test_update_weights_copies_a_non_contiguous_source() -> None:
    source = weights(new_model())
    source[HEAD] = source[HEAD].T.contiguous().T
    engine = tiny_engine(old_model())
    engine.update_weights(source, in_flight=True)
    checksum = tiny_engine(new_model()).weights_checksum()
    for tensor in source.values():
        tensor.zero_()
    assert engine.weights_checksum() == checksum


def test_from_model_copies_the_given_model() -> None:
    model = tiny_model(seed=5)
    engine = tiny_engine(model)
    checksum = engine.weights_checksum()
    randomize(model, seed=6)
    assert engine.weights_checksum() == checksum
    engine.update_weights(model.named_parameters(), in_flight=True)
    assert engine.weights_checksum() != checksum


# ---- which weights the numbers of a request under way come from


def across_an_update(mode: str) -> DynamicInferenceRequest:
    """Prompt 9, 3 tokens under the old model, 5 under the new one."""
    engine = tiny_engine(old_model(), kv_cache_management_mode=mode)
    request_id = engine.add_request(prompt_of(9), PARAMS)
    for _ in range(3):
        engine.step()
    engine.pause()
    engine.suspend()
    engine.update_weights(weights(new_model()))
    engine.resume()
    engine.unpause()
    return drain(engine)[request_id]


def test_recompute_continues_requests_as_the_new_model() -> None:
    request = across_an_update("recompute")
    check_logprobs(request, generated_logits(new_model(), request)[3:], start=3)
    logits_TV = generated_logits(old_model(), request)
    assert_allclose(
        request.generated_log_probs[:3].numpy(),
        [expected_logprobs(logits_TV[i], PARAMS)[request.generated_tokens[i]] for i in range(3)],
        atol=1e-4,
    )


@pytest.mark.parametrize("mode", ["persist", "offload"])
@torch.no_grad()
def test_update_weights_keeps_the_kv_of_the_old_model(mode: str) -> None:
    request = across_an_update(mode)
    tokens, cache = torch.tensor([tokens_of(request)[:-1]]), DynamicCache()
    # The third token was sampled, but not computed, under the old model.
    old_TV = old_model()(tokens[:, :11], past_key_values=cache, use_cache=True).logits[0, 8:]
    new_TV = new_model()(tokens[:, 11:], past_key_values=cache, use_cache=True).logits[0]
    check_logprobs(request, torch.cat((old_TV, new_TV)).double().numpy())


# ---- weights that are not numbers


def poisoned_engine() -> tuple[DynamicInferenceEngine, Weights]:
    engine = tiny_engine(old_model(), reject_non_finite_weights=False)
    return engine, with_value(NORM, float("nan"))(weights(new_model()))


def test_non_finite_weights_fail_requests_until_the_next_update() -> None:
    engine, poisoned = poisoned_engine()
    ids = [engine.add_request(prompt_of(9), PARAMS) for _ in range(2)]
    engine.step()
    engine.update_weights(poisoned, in_flight=True)
    failed = drain(engine)
    for request_id in ids:
        request = failed[request_id]
        assert (request.status, request.finish_reason) == (Status.FAILED, "error")
        assert len(request.generated_tokens) == len(request.generated_log_probs) == 1
        assert [e.type.name for e in request.events][-2:] == ["ERROR_NONTRANSIENT", "FAIL"]
        assert isinstance(request.events[-2].payload, NonFiniteLogitsError)
        assert "version 1" in str(request.events[-2].payload)
    assert engine.stats().num_failed == 2
    assert engine.stats().num_blocks_used == 0
    engine.update_weights(weights(new_model()), in_flight=True)
    (request,) = generate_all(engine, [(prompt_of(9), PARAMS)])
    check_logprobs(request, generated_logits(new_model(), request))


# ---- models that cannot be built


def test_unknown_model_type_is_refused_with_the_supported_ones(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match=r"'gpt2' is not supported; supported: .*llama.*qwen3"):
        tiny_engine(old_model()).from_model(tmp_path)
    with pytest.raises(ModelError, match="int"):
        DynamicInferenceEngine.from_model(5)
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        DynamicInferenceEngine.from_model("/nowhere")
