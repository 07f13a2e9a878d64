"""Tiny random transformers models, engines over them, and the margin rule for comparing tokens.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import DynamicInferenceEngine, DynamicInferenceRequest, InferenceConfig, SamplingParams
from rollout.backends.forward_batch import ForwardBatch
from rollout.models.checkpoints.loading import build_model
from rollout.models.plain_tensors import named_weights
from rollout.step.seeds import uniforms
from rollout.text import Tokenizer
from tests.contracts.sampling_oracle import Draw, logprobs, probabilities, processed_logits
from tests.inspected_engine import ChangeBackend, InspectedEngine, changed_backends

IS_LONG = os.environ.get("ROLLOUT_TEST_LONG") == "1"
VOCAB_SIZE = 211
BLOCK_SIZE = 8
MAX_LENGTH = 512
GREEDY_MARGIN = 1e-5
SAMPLING_MARGIN = 1e-4
MAX_EXCEPTIONS_PER_TOKEN = 1e-4
Logits = NDArray[np.float64]


def tiny_model(
    family: str = "qwen3",
    *,
    seed: int = 0,
    std: float = 0.2,
    attention: str | None = None,
    **changes: Any,
) -> Any:
    """A random transformers model of two layers; norms and biases are random too.

    `attention` is transformers' name of an implementation; None for its choice.
    """
    config = tiny_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    randomize(model, seed=seed, std=std)
    return model


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of such a model."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    # transformers writes into the dicts it is given.
    return AutoConfig.for_model(family, **(sizes | deepcopy(changes)))


@torch.no_grad()
def randomize(model: Any, *, seed: int, std: float = 0.2) -> None:
    """Draw all weights and persistent buffers anew, in place, as a trainer's step would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in named_weights(model).items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.normal_(mean, std, generator=generator)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng((seed, length)).integers(0, VOCAB_SIZE, length).tolist()


def pool_gb(model: Any, num_blocks: int, block_size: int = BLOCK_SIZE) -> float:
    """The buffer_size_gb that holds exactly `num_blocks` blocks of a cache in the model's dtype."""
    config, size = model.config, next(model.parameters()).itemsize
    per_layer = 2 * config.num_key_value_heads * config.head_dim
    if hasattr(config, "kv_lora_rank"):
        per_layer = config.kv_lora_rank + config.qk_rope_head_dim
    return num_blocks * block_size * config.num_hidden_layers * per_layer * size / 2**30


def tiny_engine(
    model: Any,
    *,
    num_blocks: int = 512,
    weights_version: int = 0,
    tokenizer: Tokenizer | None = None,
    before_forward: Callable[[ForwardBatch], None] | None = None,
    change_backend: ChangeBackend | None = None,
    **config: Any,
) -> InspectedEngine:
    """An engine with small blocks and a pool of `num_blocks` of them, on the CPU unless it is told
    otherwise: also where there is a device.

    `before_forward` gets the batch of each forward pass, and may raise. `change_backend` returns
    the backend to use in place of the one it gets.
    """
    fields = {
        "block_size_tokens": BLOCK_SIZE,
        "max_sequence_length": MAX_LENGTH,
        "materialize_only_last_token_logits": False,
        "device": "cpu",
        "seed": 0,
    } | config
    if "buffer_size_gb" not in fields:
        fields["buffer_size_gb"] = pool_gb(model, num_blocks, fields["block_size_tokens"] or 64)
    if before_forward is not None:
        model = build_model(model)
        model.register_forward_pre_hook(lambda _, given: before_forward(given[0]))
    with nullcontext() if change_backend is None else changed_backends(change_backend):
        return InspectedEngine.from_model(
            model, InferenceConfig(**fields), tokenizer, weights_version
        )


Finished = dict[int, DynamicInferenceRequest]


def drain(engine: DynamicInferenceEngine, max_steps: int = 20_000) -> Finished:
    """Step until nothing is left; the merged requests by id."""
    finished: Finished = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return finished
        for record in engine.step():
            assert record.request_id not in finished, "a record is handed out once"
            finished[record.request_id] = record.merge()
    raise AssertionError(f"unfinished after {max_steps} steps: {engine.stats()}")


def suspend_and_resume(engine: DynamicInferenceEngine, mode: str | None = None) -> None:
    """Pause, suspend under `mode` (None: the config's), resume and unpause."""
    engine.pause()
    engine.suspend(mode)
    engine.resume()
    engine.unpause()


def generate_all(
    engine: DynamicInferenceEngine, requests: Sequence[tuple[list[int], SamplingParams]]
) -> list[DynamicInferenceRequest]:
    """Generate for all requests at once. Returns them in input order."""
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    finished = drain(engine)
    return [finished[i] for i in ids]


def tokens_of(request: DynamicInferenceRequest) -> list[int]:
    """Prompt and generated tokens."""
    return [*request.prompt_tokens.tolist(), *request.generated_tokens]


# ---- what the trainer's model says


@torch.no_grad()
def full_logits(model: Any, tokens: Sequence[int]) -> Logits:
    """The model's own logits of one full forward pass without a cache, float64 [T, V]."""
    logits = model(torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0].double().numpy()


def generated_logits(model: Any, request: DynamicInferenceRequest) -> Logits:
    """The logits each generated token was sampled from, had `model` made all of the context."""
    num_prompt = len(request.prompt_tokens)
    return full_logits(model, tokens_of(request)[:-1])[num_prompt - 1 :]


def draw_of(params: SamplingParams, uniform: float = 0.5) -> Draw:
    return Draw(
        uniform=uniform,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        mode=params.logprobs_mode,
    )


def expected_logprobs(logits_V: Logits, params: SamplingParams) -> Logits:
    """Log-prob of every token in the request's logprobs_mode, in float64."""
    return logprobs(logits_V, draw_of(params))


# ---- the margin rule


@dataclass
class Margins:
    """Compares tokens and counts those that only rounding explains."""

    num_tokens: int = 0
    exceptions: list[str] = field(default_factory=list)

    def check(self) -> None:
        """At most one exception in 10,000 tokens, or one in all."""
        allowed = max(1.0, self.num_tokens * MAX_EXCEPTIONS_PER_TOKEN)
        assert len(self.exceptions) <= allowed, f"{len(self.exceptions)} of {self.num_tokens}"

    def compare(
        self,
        model: Any,
        request: DynamicInferenceRequest,
        expected_tokens: Sequence[int],
        params: SamplingParams | None = None,
    ) -> bool:
        """Assert equality up to the first token that rounding explains. True if all are equal."""
        params = params or request.sampling_params
        given, expected = request.generated_tokens, list(expected_tokens)
        for index, (token, wanted) in enumerate(zip(given, expected, strict=False)):
            self.num_tokens += 1
            if token == wanted:
                continue
            context = [*request.prompt_tokens.tolist(), *expected[:index]]
            logits_V = processed_logits(
                full_logits(model, context)[-1],
                params,
                request.prompt_tokens.tolist(),
                expected[:index],
            )
            outcomes = possible_tokens(logits_V, params, request.seed or 0, len(context))
            where = f"request {request.request_id}, token {index}: {token} instead of {wanted}"
            assert outcomes >= {token, wanted}, f"{where}, possible were {outcomes}"
            self.exceptions.append(where)
            return False
        assert len(given) == len(expected)
        return True

    def compare_with_oracle(self, model: Any, request: DynamicInferenceRequest) -> None:
        """Each token must be the one that the model's own logits and the request's seed give."""
        num_prompt, params = len(request.prompt_tokens), request.sampling_params
        for index, logits_V in enumerate(generated_logits(model, request)):
            self.num_tokens += 1
            token, position = request.generated_tokens[index], num_prompt + index
            before = request.prompt_tokens.tolist(), request.generated_tokens[:index]
            logits_V = processed_logits(logits_V, params, *before)
            if token == sampled_token(logits_V, params, request.seed, position):
                continue
            outcomes = possible_tokens(logits_V, params, request.seed, position)
            where = f"request {request.request_id}, token {index}: {token}"
            assert token in outcomes, f"{where}, possible were {outcomes}"
            self.exceptions.append(where)


def uniform_of(seed: int, position: int) -> float:
    seeds = np.array([seed % 2**64], dtype=np.uint64)
    return float(uniforms(seeds, np.array([position], dtype=np.int64))[0])


def sampled_token(logits_V: Logits, params: SamplingParams, seed: int, position: int) -> int:
    """The token by inverse CDF in id order, in float64."""
    if params.temperature == 0:
        return int(logits_V.argmax())
    return _inverse_cdf(probabilities(logits_V, draw_of(params)), uniform_of(seed, position))


def possible_tokens(logits_V: Logits, params: SamplingParams, seed: int, position: int) -> set[int]:
    """Tokens that could be drawn within the margins: several only near a decision boundary."""
    if params.temperature == 0:
        return set(np.flatnonzero(logits_V >= logits_V.max() - GREEDY_MARGIN).tolist())
    draw, uniform = draw_of(params), uniform_of(seed, position)
    variants = [draw]
    if draw.top_p:
        shifts = (-SAMPLING_MARGIN, SAMPLING_MARGIN)
        variants += [replace(draw, top_p=min(1.0, draw.top_p + s)) for s in shifts]
    if draw.min_p:
        factors = (1 - SAMPLING_MARGIN, 1 + SAMPLING_MARGIN)
        variants += [replace(draw, min_p=min(1.0, draw.min_p * f)) for f in factors]
    if draw.top_k and _is_tied_at(logits_V, draw.top_k):
        variants += [replace(draw, top_k=draw.top_k + 1), replace(draw, top_k=draw.top_k - 1)]
    outcomes: set[int] = set()
    for variant in variants:
        probabilities_V = probabilities(logits_V, variant)
        first = _inverse_cdf(probabilities_V, max(uniform - SAMPLING_MARGIN, 0.0))
        last = _inverse_cdf(probabilities_V, min(uniform + SAMPLING_MARGIN, 1.0 - 2**-53))
        # Improbable tokens between the two may be drawn, too.
        between = np.flatnonzero(probabilities_V[first : last + 1])
        outcomes.update((first + between).tolist())
    return outcomes


def _is_tied_at(logits_V: Logits, k: int) -> bool:
    ranked = np.sort(logits_V)[::-1]
    return k < len(ranked) and k > 1 and ranked[k - 1] - ranked[k] < GREEDY_MARGIN


def _inverse_cdf(probabilities_V: Logits, uniform: float) -> int:
    cumulative = probabilities_V.cumsum()
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probabilities_V)[-1]))
