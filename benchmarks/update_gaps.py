"""Measure how long in-flight weight updates interrupt one request.

Used by `benchmarks.suspend_resume` and `benchmarks.memory_cycles`. A gap is the time between the
request's last token under old weights and its first token under new weights. It contains one step.
Gaps are compared with the stall that the update reports, and with the median and the longest step.
Two engines are measured: an LLM in this process, and an AsyncLLM with an engine process.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from rollout import LLM, AsyncLLM, DynamicInferenceRequest, InferenceConfig, SamplingParams
from rollout.control.reports import WeightUpdateReport
from rollout.models import CausalLM
from rollout.models.spec import ModelSpec

_TOKENS_BEFORE = 20  # tokens before each update
_PROMPT = list(range(1, 33))


def measure_gaps(spec: ModelSpec, num_updates: int, tokens_per_update: int) -> dict[str, Any]:
    """Return gaps, stalls and steps in seconds, for "in_process" and "engine_process".

    "in_process" is an LLM, "engine_process" an AsyncLLM. `tokens_per_update` is the number of
    tokens that the request generates for each update.
    """
    weights = [CausalLM.random(spec, seed=seed).read_weights() for seed in (1, 2)]
    num_tokens = (num_updates + 1) * tokens_per_update
    length = -(-(len(_PROMPT) + num_tokens) // 256) * 256
    config = InferenceConfig(num_threads=1, max_sequence_length=length, buffer_size_gb=0.25)
    params = SamplingParams(
        num_tokens_to_generate=num_tokens, seed=1, ignore_eos=True, streaming=True
    )
    return {
        "in_process": _in_process(spec, config, params, weights, num_updates),
        "engine_process": asyncio.run(_by_a_fleet(spec, config, params, weights, num_updates)),
    }


def _in_process(
    spec: ModelSpec,
    config: InferenceConfig,
    params: SamplingParams,
    weights: Sequence[dict[str, Tensor]],
    num_updates: int,
) -> dict[str, Any]:
    reports: list[WeightUpdateReport] = []
    with LLM(CausalLM.random(spec), inference_config=config) as llm:

        def push() -> None:
            sampled = llm.stats().num_sampled_tokens
            for index in range(num_updates):
                while llm.stats().num_sampled_tokens < sampled + _TOKENS_BEFORE:
                    time.sleep(0.01)
                reports.append(llm.update_weights(weights[index % 2], in_flight=True))
                sampled = llm.stats().num_sampled_tokens

        pusher = threading.Thread(target=push, daemon=True)
        pusher.start()
        request = llm.generate(_PROMPT, replace(params, streaming=False))
        pusher.join()
    assert isinstance(request, DynamicInferenceRequest)
    return _gaps(request, None, reports)


async def _by_a_fleet(
    spec: ModelSpec,
    config: InferenceConfig,
    params: SamplingParams,
    weights: Sequence[dict[str, Tensor]],
    num_updates: int,
) -> dict[str, Any]:
    reports: list[WeightUpdateReport] = []
    arrivals: list[float] = []
    async with AsyncLLM(CausalLM.random(spec), inference_config=config) as llm:

        async def push() -> None:
            for index in range(num_updates):
                wanted = len(arrivals) + _TOKENS_BEFORE
                while len(arrivals) < wanted:
                    await asyncio.sleep(0.01)
                reports.append(await llm.update_weights(weights[index % 2], in_flight=True))

        pusher = asyncio.ensure_future(push())
        async for item in llm.stream(_PROMPT, params):
            if isinstance(item, DynamicInferenceRequest):
                request = item
            else:
                arrivals += [time.perf_counter()] * len(item)
        await pusher
    return _gaps(request, arrivals, reports)


def _gaps(
    request: DynamicInferenceRequest,
    arrivals: list[float] | None,
    reports: Sequence[WeightUpdateReport],
) -> dict[str, Any]:
    """Return the figures of one request. `arrivals` are the times of its tokens if it was
    streamed."""
    assert request.tpot is not None
    versions = request.policy_versions.tolist()
    changes = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
    assert len(changes) == len(reports), "generation ended before the last update"
    steps = [request.tpot[i] for i in range(2, len(versions)) if i not in changes]
    result = {
        "num_updates": len(reports),
        "num_bytes": reports[0].num_bytes,
        "reported": [report.stall_seconds for report in reports],
        "gaps": [request.tpot[i] for i in changes],
        "step": statistics.median(steps),
        "longest_other_gap": max(steps),
        "seconds": statistics.median(report.seconds for report in reports),
    }
    if arrivals is not None:
        result["stream_gaps"] = [arrivals[i] - arrivals[i - 1] for i in changes]
    return result


def gaps_as_markdown(gaps: dict[str, Any]) -> list[str]:
    """Return a line of text for each entry of a `measure_gaps` result, in milliseconds."""
    lines = []
    for place, result in gaps.items():
        stall, gap = statistics.median(result["reported"]), statistics.median(result["gaps"])
        stream = result.get("stream_gaps")
        seen = f"; at the stream {statistics.median(stream) * 1e3:.0f} ms" if stream else ""
        lines.append(
            f"In-flight updates while one request generates, {place.replace('_', ' ')}: gap "
            f"between two tokens {gap * 1e3:.0f} ms (at most {max(result['gaps']) * 1e3:.0f})"
            f"{seen}; reported stall {stall * 1e3:.0f} ms, a step {result['step'] * 1e3:.0f} ms, "
            f"longest other gap {result['longest_other_gap'] * 1e3:.0f} ms; "
            f"{result['seconds'] * 1e3:.0f} ms an update (median of {result['num_updates']})."
        )
    return lines
