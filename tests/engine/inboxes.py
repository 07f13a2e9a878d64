"""Random configs of small engines, and random commands that several engines can get."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from rollout import DynamicInferenceEngine, SamplingParams
from rollout.requests.record import DynamicInferenceRequestRecord
from tests.engine.random_engines import SAMPLERS, SHARED_TEXT, VOCAB

Records = list[DynamicInferenceRequestRecord]
Command = Callable[[DynamicInferenceEngine], Records]  # returns what it ended
Tensors = Callable[[int], Mapping[str, Any]]  # the weights of an index, from 0 to 3


def random_config(rng: random.Random) -> dict[str, Any]:
    has_prefixes = rng.random() < 0.7
    return {
        "num_blocks": rng.randint(5, 14),
        "block_size_tokens": 4,
        "max_sequence_length": 48,
        "max_requests": rng.randint(2, 6),
        "max_tokens": rng.randint(8, 24),
        "enable_chunked_prefill": rng.random() < 0.5,
        "max_kv_staleness_versions": rng.choice((None, None, 0, 1)),
        "enable_prefix_caching": has_prefixes,
        "prefix_caching_eviction_policy": rng.choice(("lru", "ref_zero"))
        if has_prefixes
        else "ref_zero",
        "prefix_reuse_across_versions": has_prefixes and rng.random() < 0.5,
    }


def random_inbox(rng: random.Random, tensors: Tensors, length: int = 8) -> list[Command]:
    """Return random commands, which read nothing but the engine that they are applied to."""
    makers = (_add, _add, _steps, _steps, _abort, _suspend, _update)
    return [_add(rng, tensors), *(rng.choice(makers)(rng, tensors) for _ in range(length))]


def _add(rng: random.Random, tensors: Tensors) -> Command:
    prompt = SHARED_TEXT[: rng.randint(0, 12)] + rng.choices(range(VOCAB), k=rng.randint(1, 5))
    samples = [
        SamplingParams(
            num_tokens_to_generate=rng.randint(1, 9),
            seed=rng.randrange(9),
            return_log_probs=True,
            **rng.choice(SAMPLERS),
        )
        for _ in range(rng.choice((1, 1, 3)))
    ]
    priority = rng.choice((0, 0, 1))

    def add(engine: DynamicInferenceEngine) -> Records:
        engine.add_group(prompt, samples, priority=priority)
        return []

    return add


def _steps(rng: random.Random, tensors: Tensors) -> Command:
    count = rng.randint(1, 4)
    return lambda engine: [record for _ in range(count) for record in engine.step()]


def _abort(rng: random.Random, tensors: Tensors) -> Command:
    choice = rng.random()

    def abort(engine: DynamicInferenceEngine) -> Records:
        alive = engine.request_ids()
        return [engine.abort_request(alive[int(choice * len(alive))])] if alive else []

    return abort


def _suspend(rng: random.Random, tensors: Tensors) -> Command:
    mode, index = rng.choice(("persist", "offload", "recompute")), rng.randint(0, 2)
    release = rng.choice((["kv_cache"], ["kv_cache", "weights"]))

    def suspend(engine: DynamicInferenceEngine) -> Records:
        engine.pause()
        engine.suspend(mode, release)
        if index:
            engine.resume("weights")
            engine.update_weights(tensors(index))
        engine.resume()
        engine.unpause()
        return []

    return suspend


def _update(rng: random.Random, tensors: Tensors) -> Command:
    index = rng.randint(1, 3)

    def update(engine: DynamicInferenceEngine) -> Records:
        engine.update_weights(tensors(index), in_flight=True)
        return []

    return update
