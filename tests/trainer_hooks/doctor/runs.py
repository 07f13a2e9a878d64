"""Rollouts of the real engine over tiny models: sound runs, and runs with one mismatch.

Each function of MISMATCHES takes a seed and returns the arguments of `diagnose`, whose finding has
the function's name. Those of SOUND_RUNS lead to no finding. Used by the tests of this directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from rollout import DynamicInferenceRequest, SamplingParams
from rollout.models.checkpoints.loading import build_model
from tests.tiny_models import (
    VOCAB_SIZE,
    drain,
    generate_all,
    pool_gb,
    prompt_of,
    randomize,
    tiny_engine,
    tiny_model,
    tokens_of,
)
from trainer_hooks import Rollout, RolloutBatch, collate_rollouts, token_logprobs

Arguments = dict[str, Any]
FAMILIES = ("qwen3", "llama", "qwen2")
NUM_ROLLOUTS, NUM_TOKENS = 10, 24
NUM_PROMPT_TOKENS = (5, 17, 9, 26, 12)


def model_of(seed: int, **changes: Any) -> Any:
    return tiny_model(FAMILIES[seed % 3], seed=seed, std=0.15 + 0.02 * (seed % 5), **changes)


def params_of(seed: int, **changes: Any) -> SamplingParams:
    options = {
        "num_tokens_to_generate": NUM_TOKENS,
        "return_log_probs": True,
        "logprobs_mode": "temperature",
        "seed": seed,
    }
    return SamplingParams(**(options | changes))


def prompts_of(seed: int) -> list[list[int]]:
    lengths = [NUM_PROMPT_TOKENS[i % 5] for i in range(NUM_ROLLOUTS)]
    return [prompt_of(length, seed + i) for i, length in enumerate(lengths)]


def rollouts_of(
    model: Any, seed: int, engine: dict[str, Any] | None = None, **params: Any
) -> list[DynamicInferenceRequest]:
    """Return the rollouts that an engine over `model` generates."""
    prompts = enumerate(prompts_of(seed))
    wanted = [(prompt, params_of(seed + i, **params)) for i, prompt in prompts]
    return generate_all(tiny_engine(model, **(engine or {})), wanted)


def collated(sources: Sequence[Any], version: int = 0, **options: Any) -> RolloutBatch:
    return collate_rollouts(sources, [0.0] * len(sources), version, **options)


def arguments(model: Any, sources: Sequence[Any], version: int = 0, **options: Any) -> Arguments:
    """Return the arguments of `diagnose` for rollouts of `model`, or of an engine with its
    weights.
    """
    return {
        "batch": collated(sources, version, **options),
        "model": model,
        "sources": sources,
        **options,
    }


# ---- mismatches of the engine


def temperature(seed: int) -> Arguments:
    model = model_of(seed)
    sources = rollouts_of(model, seed, temperature=0.7)
    return arguments(model, sources, temperature=0.7) | {"temperature": 1.0}


def stale_weights(seed: int) -> Arguments:
    """The version is increased, but the new weights never arrive."""
    old, new = model_of(seed), model_of(seed)
    randomize(new, seed=seed + 1)
    engine = tiny_engine(old)
    engine.pause()
    engine.set_generation_epoch(1)
    engine.unpause()
    wanted = [(prompt, params_of(seed + i)) for i, prompt in enumerate(prompts_of(seed))]
    return arguments(new, generate_all(engine, wanted), 1) | {"older_models": {0: old}}


def bf16_head(seed: int) -> Arguments:
    model = model_of(seed)
    built = build_model(model)
    pool = {"buffer_size_gb": pool_gb(model, 512)}
    weight = model.lm_head.weight.detach().bfloat16().float()
    built.lm_head.float32 = lambda hidden_LE: hidden_LE.bfloat16().float() @ weight.T
    return arguments(model, rollouts_of(built, seed, pool))


def bf16_model(seed: int) -> Arguments:
    model = model_of(seed)
    return arguments(model, rollouts_of(model, seed, {"dtype": "bfloat16"}))


def bf16_weights(seed: int) -> Arguments:
    model = model_of(seed)
    rounded = model_of(seed)
    rounded.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    return arguments(model, rollouts_of(rounded, seed))


def tied_head(seed: int) -> Arguments:
    model, tied = model_of(seed), model_of(seed)
    tied.load_state_dict(model.state_dict())
    tied.lm_head.weight.data.copy_(tied.model.embed_tokens.weight)
    return arguments(model, rollouts_of(tied, seed))


def stale_kv(seed: int) -> Arguments:
    """Weights are written into the engine without update_weights, and the KV is kept."""
    old, new = model_of(seed), model_of(seed)
    randomize(new, seed=seed + 1)
    built = build_model(old)
    engine = tiny_engine(built, buffer_size_gb=pool_gb(old, 512))
    for i, prompt in enumerate(prompts_of(seed)):
        engine.add_request(prompt, params_of(seed + i))
    for _ in range(8):
        engine.step()
    write_weights(built, new)
    sources = list(drain(engine).values())
    return arguments(new, sources) | {"older_models": {-1: old}}


def write_weights(built: Any, model: Any) -> None:
    """Write weights in place, unnoticed by the engine."""
    slots = built.weight_slots()
    for name, parameter in model.named_parameters():
        slots[name].write(parameter.detach())
    built.refresh()


def prefix_hits(seed: int) -> Arguments:
    """A prefix cache was kept through an update; the old weights are gone."""
    old, new = model_of(seed), model_of(seed)
    randomize(new, seed=seed + 1)
    built = build_model(old)
    engine = tiny_engine(
        built,
        buffer_size_gb=pool_gb(old, 512),
        enable_prefix_caching=True,
        prefix_caching_eviction_policy="lru",
    )
    shared = prompt_of(24, seed)
    generate_all(engine, [(shared, params_of(seed))])
    write_weights(built, new)
    others = [prompt_of(24, seed + 10 + i) for i in range(5)]
    prompts = [prompt for i, other in enumerate(others) for prompt in (other, [*shared, i, i + 1])]
    wanted = [(prompt, params_of(seed + i)) for i, prompt in enumerate(prompts)]
    return arguments(new, generate_all(engine, wanted))


def truncation(seed: int) -> Arguments:
    """Top-p draws with the log-probs of the whole distribution."""
    model = model_of(seed)
    return arguments(model, rollouts_of(model, seed, top_p=0.9))


def undeclared_truncation(seed: int) -> Arguments:
    model = model_of(seed)
    sources = rollouts_of(model, seed, top_p=0.8, num_tokens_to_generate=48)
    return {"batch": collated(sources), "model": model}


def processed_truncation(seed: int) -> Arguments:
    model = model_of(seed)
    sources = rollouts_of(model, seed, top_p=0.9, top_k=20, logprobs_mode="processed")
    return arguments(model, sources)


def undeclared_processed_truncation(seed: int) -> Arguments:
    model = model_of(seed)
    sources = rollouts_of(model, seed, top_k=20, logprobs_mode="processed")
    return {"batch": collated(sources), "model": model}


def penalties(seed: int) -> Arguments:
    model = model_of(seed)
    reshaping = {"repetition_penalty": 1.3, "logit_bias": {3: 2.0, 7: -1.5}}
    sources = rollouts_of(model, seed, logprobs_mode="processed", **reshaping)
    return arguments(model, sources)


def undeclared_penalties(seed: int) -> Arguments:
    model = model_of(seed)
    sources = rollouts_of(model, seed, logprobs_mode="processed", presence_penalty=0.8)
    return {"batch": collated(sources), "model": model}


# ---- mismatches of the batch


def shifted_mask(seed: int) -> Arguments:
    given = arguments(model_of(seed), rollouts_of(model_of(seed), seed))
    return given | {"batch": _rolled(given["batch"], "mask_BT")}


def shifted_mask_without_sources(seed: int) -> Arguments:
    given = shifted_mask(seed)
    return {"batch": given["batch"], "model": given["model"]}


def shifted_logprobs(seed: int) -> Arguments:
    given = arguments(model_of(seed), rollouts_of(model_of(seed), seed))
    return given | {"batch": _rolled(given["batch"], "behaviour_logprobs_BT")}


def _rolled(batch: RolloutBatch, name: str) -> RolloutBatch:
    return replace(batch, **{name: getattr(batch, name).roll(-1, dims=1)})


def template_drift(seed: int) -> Arguments:
    """The engine's template begins with tokens that the trainer's lacks."""
    model = model_of(seed)
    system = prompt_of(3, seed + 99)
    wanted = [([*system, *p], params_of(seed + i)) for i, p in enumerate(prompts_of(seed))]
    sources = generate_all(tiny_engine(model), wanted)
    given = arguments(model, sources)
    batch = given["batch"]
    cut = {
        field.name: getattr(batch, field.name)[:, 3:]
        for field in fields(batch)
        if field.name.endswith("_BT")
    }
    lengths = {name: getattr(batch, name) - 3 for name in ("lengths_B", "prompt_lengths_B")}
    positions = {"position_ids_BT": cut["position_ids_BT"] - 3}
    return given | {"batch": replace(batch, **(cut | lengths | positions))}


def template_drift_of_prompts(seed: int) -> Arguments:
    model = model_of(seed)
    prompts = prompts_of(seed)
    prompts[4] = [*prompts[4][:-1], (prompts[4][-1] + 1) % VOCAB_SIZE]
    return arguments(model, rollouts_of(model, seed)) | {"prompt_ids": prompts}


def retokenised(seed: int) -> Arguments:
    model = model_of(seed)
    sources = rollouts_of(model, seed)
    batch = collated(sources)
    column = int(batch.prompt_lengths_B[2]) + 4
    batch.tokens_BT[2, column] = (batch.tokens_BT[2, column] + 1) % VOCAB_SIZE
    return arguments(model, sources) | {"batch": batch}


def end_token(seed: int) -> Arguments:
    """The engine does not know the trainer's end token."""
    model = model_of(seed)
    sources = rollouts_of(model, seed)
    return arguments(model, sources) | {"end_ids": [sources[0].generated_tokens[5]]}


# ---- mismatches of the trainer


@torch.no_grad()
def _trained(given: Arguments, logprobs_of: Callable[[nn.Module, RolloutBatch], Any]) -> Arguments:
    """Set the trainer's own log-probs to the results of `logprobs_of`."""
    logprobs_BT = logprobs_of(given["model"], given["batch"])
    return given | {"trainer_logprobs_BT": logprobs_BT}


def _sound(seed: int, **changes: Any) -> Arguments:
    model = model_of(seed, **changes)
    return arguments(model, rollouts_of(model, seed))


def dropout(seed: int) -> Arguments:
    given = _sound(seed, attention_dropout=0.1)
    given["model"].train()
    return _trained(given, lambda m, b: token_logprobs(m(b.tokens_BT).logits, b.tokens_BT))


def dropout_left_on(seed: int) -> Arguments:
    given = _sound(seed, attention_dropout=0.1)
    given["model"].train()
    return given


def trainer_temperature(seed: int) -> Arguments:
    model = model_of(seed)
    given = arguments(model, rollouts_of(model, seed, temperature=0.8), temperature=0.8)
    return _trained(given, lambda m, b: token_logprobs(m(b.tokens_BT).logits, b.tokens_BT))


def trainer_shift(seed: int) -> Arguments:
    def logprobs(model: Any, batch: RolloutBatch) -> Any:
        logits_BTV = model(batch.tokens_BT).logits
        return token_logprobs(logits_BTV, batch.tokens_BT).roll(-1, dims=1)

    return _trained(_sound(seed), logprobs)


def position_ids(seed: int) -> Arguments:
    """Positions for left padding, on rows padded on the right."""

    def logprobs(model: Any, batch: RolloutBatch) -> Any:
        num_padding_B1 = (~batch.attention_mask_BT).sum(1, keepdim=True)
        width = batch.tokens_BT.shape[1]
        positions_BT = (torch.arange(width) - num_padding_B1).clamp(min=0)
        logits_BTV = model(batch.tokens_BT, position_ids=positions_BT).logits
        return token_logprobs(logits_BTV, batch.tokens_BT)

    return _trained(_sound(seed), logprobs)


def position_ids_of_the_batch(seed: int) -> Arguments:
    """The trainer uses the batch's position ids, which are twice the right ones."""
    given = _sound(seed)
    batch = replace(given["batch"], position_ids_BT=given["batch"].position_ids_BT * 2)

    def logprobs(model: Any, batch: RolloutBatch) -> Any:
        logits_BTV = model(batch.tokens_BT, position_ids=batch.position_ids_BT).logits
        return token_logprobs(logits_BTV, batch.tokens_BT)

    return _trained(given | {"batch": batch}, logprobs)


def attention_over_padding(seed: int) -> Arguments:
    """Rows are moved to the right edge without an attention mask."""

    def logprobs(model: Any, batch: RolloutBatch) -> Any:
        rows = []
        for tokens_T, length in zip(batch.tokens_BT, batch.lengths_B.tolist(), strict=True):
            moved_T = tokens_T.roll(len(tokens_T) - length)
            own_T = token_logprobs(model(moved_T[None]).logits, moved_T[None])[0]
            rows.append(own_T.roll(length - len(tokens_T)))
        return torch.stack(rows)

    return _trained(_sound(seed), logprobs)


def packing(seed: int) -> Arguments:
    """All rows are one sequence under one causal mask."""

    def logprobs(model: Any, batch: RolloutBatch) -> Any:
        packed_1T = batch.tokens_BT[batch.attention_mask_BT][None]
        values_T = token_logprobs(model(packed_1T).logits, packed_1T)[0]
        result_BT = torch.zeros(batch.tokens_BT.shape)
        result_BT[batch.attention_mask_BT] = values_T
        return result_BT

    return _trained(_sound(seed), logprobs)


def trainer_bf16(seed: int) -> Arguments:
    def logprobs(model: Any, batch: RolloutBatch) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BTV = model(batch.tokens_BT).logits
        return token_logprobs(logits_BTV, batch.tokens_BT)

    return _trained(_sound(seed), logprobs)


MISMATCHES: dict[str, tuple[str, Callable[[int], Arguments]]] = {
    "temperature": ("temperature", temperature),
    "stale weights": ("stale_weights", stale_weights),
    "bf16 head": ("bf16_head", bf16_head),
    "bf16 engine": ("bf16_model", bf16_model),
    "bf16 weights": ("bf16_weights", bf16_weights),
    "tied head": ("tied_head", tied_head),
    "KV of other weights": ("stale_kv", stale_kv),
    "prefixes of other weights": ("prefix_hits", prefix_hits),
    "top-p draws": ("truncation", truncation),
    "top-p draws, undeclared": ("truncation", undeclared_truncation),
    "truncated log-probs": ("truncation", processed_truncation),
    "truncated log-probs, undeclared": ("truncation", undeclared_processed_truncation),
    "penalties and biases": ("penalties", penalties),
    "presence penalty, undeclared": ("penalties", undeclared_penalties),
    "mask": ("shifted_mask", shifted_mask),
    "mask, without requests": ("shifted_mask", shifted_mask_without_sources),
    "columns of log-probs": ("shifted_mask", shifted_logprobs),
    "template": ("template_drift", template_drift),
    "template, by the trainer's prompts": ("template_drift", template_drift_of_prompts),
    "retokenised completion": ("retokenised", retokenised),
    "end token": ("end_token", end_token),
    "dropout": ("dropout", dropout),
    "dropout, without log-probs": ("dropout", dropout_left_on),
    "temperature of the trainer": ("temperature", trainer_temperature),
    "columns of the trainer": ("shifted_mask", trainer_shift),
    "position ids of left padding": ("position_ids", position_ids),
    "position ids of the batch": ("position_ids", position_ids_of_the_batch),
    "attention to padding": ("attention_over_padding", attention_over_padding),
    "packing without walls": ("packing", packing),
    "autocast in the trainer": ("bf16_model", trainer_bf16),
}


# ---- sound runs


def plain(seed: int) -> Arguments:
    return _trained(_sound(seed), lambda m, b: token_logprobs(m(b.tokens_BT).logits, b.tokens_BT))


def chunked_prefill(seed: int) -> Arguments:
    model = model_of(seed)
    return arguments(model, rollouts_of(model, seed, {"max_tokens": 16, "max_requests": 4}))


def prefix_caching(seed: int) -> Arguments:
    model = model_of(seed)
    engine = tiny_engine(model, enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    shared = prompt_of(24, seed)
    first = generate_all(engine, [(shared, params_of(seed))])
    wanted = [([*shared, i], params_of(seed + i)) for i in range(6)]
    sources = first + generate_all(engine, wanted)
    assert any(source.num_cached_tokens for source in sources)
    return arguments(model, sources)


def group_fork(seed: int) -> Arguments:
    model = model_of(seed)
    engine = tiny_engine(model)
    engine.add_group(prompt_of(13, seed), [params_of(seed + i) for i in range(8)])
    return arguments(model, list(drain(engine).values()))


def _suspended(mode: str) -> Callable[[int], Arguments]:
    def run(seed: int) -> Arguments:
        model = model_of(seed)
        return arguments(model, _with_break(tiny_engine(model), mode, seed))

    return run


def _updated(mode: str) -> Callable[[int], Arguments]:
    def run(seed: int) -> Arguments:
        old, new = model_of(seed), model_of(seed)
        randomize(new, seed=seed + 1)
        sources = _with_break(tiny_engine(old), mode, seed, new)
        return arguments(new, sources, 1) | {"older_models": {0: old}}

    return run


def _with_break(engine: Any, mode: str, seed: int, new: Any = None) -> list[Any]:
    """Return rollouts interrupted after 8 steps by a suspend in `mode`, or by an update in
    flight.
    """
    for i, prompt in enumerate(prompts_of(seed)):
        engine.add_request(prompt, params_of(seed + i))
    for _ in range(8):
        engine.step()
    if mode == "in_flight":
        engine.update_weights(new, in_flight=True)
    else:
        engine.pause()
        engine.suspend(mode)
        if new is not None:
            engine.update_weights(new)
        engine.resume()
        engine.unpause()
    return list(drain(engine).values())


def several_updates(seed: int) -> Arguments:
    """Rollouts over KV of three versions, and one rollout that was prefilled again in between."""
    models = [model_of(seed) for _ in range(3)]
    for version, model in enumerate(models):
        randomize(model, seed=seed + version)
    engine = tiny_engine(models[0])
    for i, prompt in enumerate(prompts_of(seed)):
        engine.add_request(prompt, params_of(seed + i))
    for model in models[1:]:
        for _ in range(7):
            engine.step()
        engine.update_weights(model, in_flight=True)
    sources = list(drain(engine).values())
    return arguments(models[2], sources, 2) | {"older_models": dict(enumerate(models[:2]))}


def several_turns(seed: int, **params: Any) -> Arguments:
    model = model_of(seed)
    engine, sources = tiny_engine(model, enable_prefix_caching=True), []
    for i, prompt in enumerate(prompts_of(seed)[:5]):
        turns, context = [], prompt
        for turn in range(3):
            own = params_of(seed + 7 * i + turn, num_tokens_to_generate=9, **params)
            turns += generate_all(engine, [(context, own)])
            context = [*tokens_of(turns[-1]), *prompt_of(4, seed + turn)]
        sources.append(Rollout(turns))
    return arguments(model, sources)


def several_sequences(seed: int) -> Arguments:
    """The last turn's prompt drops earlier generated tokens."""
    given = several_turns(seed)
    model, sources = given["model"], []
    for i, source in enumerate(given["sources"]):
        context = [*source.requests[0].prompt_tokens.tolist(), *prompt_of(3, seed + i)]
        turn = generate_all(tiny_engine(model), [(context, params_of(seed + i))])
        sources.append(Rollout([*source.requests, *turn], sequence_starts=(0, 3)))
    return arguments(model, sources)


def bf16_on_both_sides(seed: int) -> Arguments:
    model = model_of(seed).bfloat16()
    return arguments(model, rollouts_of(model, seed))


def bf16_engine_that_is_meant(seed: int) -> Arguments:
    return bf16_model(seed) | {"engine_dtype": torch.bfloat16}


def truncation_that_is_meant(seed: int) -> Arguments:
    return processed_truncation(seed) | {"logprobs_mode": "processed"}


def penalties_that_are_meant(seed: int) -> Arguments:
    return penalties(seed) | {"logprobs_mode": "processed"}


def min_tokens_that_is_meant(seed: int) -> Arguments:
    """The end tokens of the model, and stop tokens, are impossible at first."""
    model = model_of(seed, eos_token_id=[11, 12])
    sources = rollouts_of(
        model, seed, logprobs_mode="processed", min_tokens=NUM_TOKENS // 2, stop_token_ids=(3, 7)
    )
    return arguments(model, sources) | {"logprobs_mode": "processed"}


def penalties_of_turns_that_are_meant(seed: int) -> Arguments:
    """Penalties count the tokens that this turn generated, not earlier turns' tokens."""
    given = several_turns(
        seed, logprobs_mode="processed", presence_penalty=0.7, repetition_penalty=1.2
    )
    return given | {"logprobs_mode": "processed"}


def top_p_that_cuts_nothing(seed: int) -> Arguments:
    model = model_of(seed)
    return arguments(model, rollouts_of(model, seed, top_p=1.0))


def without_sources(seed: int) -> Arguments:
    given = _sound(seed)
    return {"batch": given["batch"], "model": given["model"]}


SOUND_RUNS: dict[str, Callable[[int], Arguments]] = {
    "plain": plain,
    "without requests": without_sources,
    "chunked prefill": chunked_prefill,
    "prefix hits": prefix_caching,
    "group fork": group_fork,
    "suspend, persist": _suspended("persist"),
    "suspend, offload": _suspended("offload"),
    "suspend, recompute": _suspended("recompute"),
    "update in flight": _updated("in_flight"),
    "update, persist": _updated("persist"),
    "update, offload": _updated("offload"),
    "update, recompute": _updated("recompute"),
    "several updates": several_updates,
    "several turns": several_turns,
    "several token sequences": several_sequences,
    "bf16 on both sides": bf16_on_both_sides,
    "bf16 engine, declared": bf16_engine_that_is_meant,
    "truncation, declared": truncation_that_is_meant,
    "penalties, declared": penalties_that_are_meant,
    "min_tokens, declared": min_tokens_that_is_meant,
    "penalties of turns, declared": penalties_of_turns_that_are_meant,
    "top_p of 1": top_p_that_cuts_nothing,
}
