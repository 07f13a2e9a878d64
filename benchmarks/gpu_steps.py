"""Decode, prefill and the host's share of a step, each beside what physics allows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_engines import DecodingRows, ramp_steps
from benchmarks.gpu_floors import Floors
from benchmarks.gpu_shapes import kv_bytes_per_token, prefill_flops, weight_bytes_per_step
from benchmarks.workloads import random_prompts
from rollout import DynamicInferenceEngine, SamplingParams
from rollout.models.spec import ModelSpec

_TOKENS_AHEAD = 4  # rows must not end while steps computed ahead are in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """`batch` rows, whose contexts are `context_len` tokens at most when the last step is done."""

    batch: int
    context_len: int
    num_warm_up: int
    num_steps: int

    @property
    def num_new(self) -> int:
        """Tokens that a row is asked for."""
        ramp = ramp_steps(self.batch, self.context_len)
        return ramp + self.num_warm_up + self.num_steps + _TOKENS_AHEAD

    @property
    def prompt_len(self) -> int:
        """Raises ValueError if the context is too short for the steps."""
        if self.num_new >= self.context_len:
            raise ValueError(f"{self.context_len} tokens of context leave no room for a prompt")
        return self.context_len - self.num_new


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSizes:
    """Whole prompts, of which each asks for one token."""

    num_prompts: int
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWindow:
    """A run of steps that did nothing but decode, from an idle device to an idle device.

    `kv_tokens` are the tokens of context that all rows of all steps attended to, to within one
    token per row and step: a device that works ahead is a step further than what is counted.
    """

    seconds: float
    cpu_seconds: float
    num_steps: int
    kv_tokens: int
    num_graph_captures: int | None


def num_graph_captures(engine: DynamicInferenceEngine) -> int | None:
    """Graphs captured so far; None where the engine does not count them."""
    count: int | None = getattr(engine.stats(), "num_graph_captures", None)
    return count


def decode_window(
    device: MeasuredDevice, engine: DynamicInferenceEngine, spec: ModelSpec, sizes: DecodeSizes
) -> DecodeWindow:
    """Raises RuntimeError if other steps than those of all rows came between."""
    rows = DecodingRows(engine=engine, spec=spec, num_rows=sizes.batch, prompt_len=sizes.prompt_len)
    sampled_before = engine.stats().num_sampled_tokens
    rows.start(sizes.num_new)
    for _ in range(sizes.num_warm_up):
        engine.step()
    device.wait()
    first, captures = engine.stats(), num_graph_captures(engine)
    cpu_start = time.process_time()

    def all_steps() -> None:
        for _ in range(sizes.num_steps):
            engine.step()

    seconds = device.seconds(all_steps)
    cpu_seconds = time.process_time() - cpu_start
    last, captures_after = engine.stats(), num_graph_captures(engine)
    rows.end()
    num_decoded = last.num_decode_tokens - first.num_decode_tokens
    if num_decoded != sizes.batch * sizes.num_steps or last.num_steps - first.num_steps != (
        sizes.num_steps
    ):
        raise RuntimeError(f"{num_decoded} tokens in {sizes.num_steps} steps of {sizes.batch} rows")
    num_new = first.num_sampled_tokens - sampled_before
    at_first = sizes.batch * sizes.prompt_len + num_new
    growth = sizes.batch * sizes.num_steps * (sizes.num_steps - 1) // 2
    return DecodeWindow(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        num_steps=sizes.num_steps,
        kv_tokens=at_first * sizes.num_steps + growth,
        num_graph_captures=None if captures is None else (captures_after or 0) - captures,
    )


def measure_decode(
    device: MeasuredDevice,
    engine: DynamicInferenceEngine,
    spec: ModelSpec,
    floors: Floors | None,
    sizes: DecodeSizes,
) -> dict[str, Any]:
    """Seconds of a step, beside the time that the memory takes to deliver weights and KV once."""
    window = decode_window(device, engine, spec, sizes)
    step_s = window.seconds / window.num_steps
    weights = weight_bytes_per_step(spec)
    kv = window.kv_tokens * kv_bytes_per_token(spec) / window.num_steps
    floor_s = None if floors is None else (weights + kv) / floors.memory_bytes_per_s
    return {
        "batch": sizes.batch,
        "prompt_len": sizes.prompt_len,
        "mean_context": window.kv_tokens / window.num_steps / sizes.batch,
        "num_steps": window.num_steps,
        "step_s": step_s,
        "cpu_s_per_step": window.cpu_seconds / window.num_steps,
        "tokens_per_s": sizes.batch / step_s,
        "weight_bytes_per_step": weights,
        "kv_bytes_per_step": kv,
        "floor_s": floor_s,
        "share_of_floor": None if floor_s is None else floor_s / step_s,
        "num_graph_captures": window.num_graph_captures,
    }


def measure_prefill(
    device: MeasuredDevice,
    engine: DynamicInferenceEngine,
    spec: ModelSpec,
    floors: Floors | None,
    sizes: PrefillSizes,
) -> dict[str, Any]:
    """Seconds from queued prompts to their first tokens, the second time, beside the matrix units'
    peak. The operations are those of the prompts computed whole; leaving some out is fair.
    """
    prompts = random_prompts(spec.vocab_size, [sizes.prompt_len] * sizes.num_prompts)
    sampling = SamplingParams(num_tokens_to_generate=1, ignore_eos=True, seed=0)

    def compute() -> None:
        engine.add_groups([(prompt, [sampling]) for prompt in prompts])
        while engine.has_unfinished_requests():
            engine.step()

    compute()
    seconds = device.seconds(compute)
    num_tokens = sizes.num_prompts * sizes.prompt_len
    flops = prefill_flops(spec, sizes.prompt_len, sizes.num_prompts)
    floor_s = None if floors is None else flops / floors.matmul_flops_per_s
    return {
        "num_prompts": sizes.num_prompts,
        "prompt_len": sizes.prompt_len,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "flops": flops,
        "flops_per_s": flops / seconds,
        "floor_s": floor_s,
        "share_of_floor": None if floor_s is None else floor_s / seconds,
    }


def measure_host(
    device: MeasuredDevice, engine: DynamicInferenceEngine, spec: ModelSpec, sizes: DecodeSizes
) -> dict[str, Any]:
    """Wall and CPU seconds of `Engine.step` on a model that leaves the device next to idle.

    The wall time holds what the few launches take; the CPU time also what waiting burns.
    """
    window = decode_window(device, engine, spec, sizes)
    return {
        "batch": sizes.batch,
        "num_steps": window.num_steps,
        "wall_s_per_step": window.seconds / window.num_steps,
        "cpu_s_per_step": window.cpu_seconds / window.num_steps,
        "num_graph_captures": window.num_graph_captures,
    }
