"""Measurements of the GPU benchmark: decode, prefill, suspends, updates, and other engines.

Used by `benchmarks.gpu`, which runs each function measure_* as a part. Each returns its figures by
name. All times are in seconds.

Shape letters: T tokens, R rows, H query heads, G key/value heads, C context tokens, D head dim.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.contestants import Contestant, RolloutEngine, TransformersGenerate, timed
from benchmarks.gpu_engines import (
    Bench,
    DecodingRows,
    MeasuredDevice,
    RandomWeights,
    measure_floors,
    pool_config,
    ramp_steps,
)
from benchmarks.gpu_shapes import (
    BLOCK_TOKENS,
    PoolShape,
    kv_bytes_per_token,
    prefill_flops,
    weight_bytes_per_step,
)
from benchmarks.workloads import group_workload, random_prompts
from rollout import LLM, DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.backends.base import AttentionBackend, CacheSpec
from rollout.backends.forward_batch import ForwardBatch
from rollout.backends.select import create_backend
from rollout.models.spec import ModelSpec

KV, WEIGHTS = "kv_cache", "weights"
_TOKENS_AHEAD = 4  # more tokens than are measured: no row may end while steps are in flight
_STEPS_AFTER = 3  # steps after a cycle or update, to see whether graphs are captured again
_TOKENS_PER_CYCLE = 16  # upper bound of a row's tokens in one cycle or around one update


def _engine(bench: Bench, shape: str) -> tuple[DynamicInferenceEngine, ModelSpec]:
    """Return the engine and the spec of the plan's model `shape`."""
    spec = bench.plan.shapes[shape]
    return bench.engine(shape, spec, bench.plan.pool), spec


def measure_all_floors(bench: Bench) -> dict[str, Any]:
    """Measure the device's rates, and set `bench.floors` for the later parts."""
    spec = next(iter(bench.plan.shapes.values()))
    bench.floors = measure_floors(bench.device, bench.plan.floors, spec.dtype)
    bench.device.free_unused()
    return bench.floors.figures()


# ---- steps


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """Sizes of a decode measurement: rows, their largest context, and numbers of steps."""

    batch: int
    context_len: int
    num_warm_up: int
    num_steps: int

    @property
    def num_new(self) -> int:
        """Number of tokens that each row generates."""
        ramp = ramp_steps(self.batch, self.context_len)
        return ramp + self.num_warm_up + self.num_steps + _TOKENS_AHEAD

    @property
    def prompt_len(self) -> int:
        """Prompt tokens of a row. Raises ValueError if `context_len` is too small for the steps."""
        if self.num_new >= self.context_len:
            raise ValueError(f"{self.context_len} tokens of context leave no room for a prompt")
        return self.context_len - self.num_new


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWindow:
    """Figures of consecutive decode steps.

    kv_tokens: context tokens that all rows attended to, summed over the steps. At most one token
        per row and step is missing.
    """

    seconds: float
    cpu_seconds: float
    num_steps: int
    kv_tokens: int
    num_graph_captures: int


def decode_window(
    device: MeasuredDevice, engine: DynamicInferenceEngine, spec: ModelSpec, sizes: DecodeSizes
) -> DecodeWindow:
    """Measure decode steps of all rows. Raises RuntimeError if a step also ran a prefill."""
    rows = DecodingRows(engine=engine, spec=spec, num_rows=sizes.batch, prompt_len=sizes.prompt_len)
    sampled_before = engine.stats().num_sampled_tokens
    rows.start(sizes.num_new)
    for _ in range(sizes.num_warm_up):
        engine.step()
    device.wait()
    first = engine.stats()
    cpu_start = time.process_time()

    def all_steps() -> None:
        for _ in range(sizes.num_steps):
            engine.step()

    seconds = device.seconds(all_steps)
    cpu_seconds = time.process_time() - cpu_start
    last = engine.stats()
    rows.end()
    num_decoded = last.num_decode_tokens - first.num_decode_tokens
    if num_decoded != sizes.batch * sizes.num_steps or last.num_steps - first.num_steps != (
        sizes.num_steps
    ):
        raise RuntimeError(f"{num_decoded} tokens in {sizes.num_steps} steps of {sizes.batch} rows")
    # The engine's counters may be a step behind the device.
    num_new = first.num_sampled_tokens - sampled_before
    at_first = sizes.batch * sizes.prompt_len + num_new
    growth = sizes.batch * sizes.num_steps * (sizes.num_steps - 1) // 2
    return DecodeWindow(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        num_steps=sizes.num_steps,
        kv_tokens=at_first * sizes.num_steps + growth,
        num_graph_captures=last.num_graph_captures - first.num_graph_captures,
    )


def measure_warm_up(bench: Bench, shape: str) -> dict[str, Any]:
    """Time `warm_up`, which captures all CUDA graphs."""
    engine, _ = _engine(bench, shape)
    seconds, num_captured = bench.device.timed(engine.warm_up)
    return {"seconds": seconds, "num_graph_captures": num_captured}


def measure_decode(bench: Bench, shape: str, batch: int) -> dict[str, Any]:
    """Measure a decode step. Its floor is the time to read weights and KV once."""
    (engine, spec), plan, floors = _engine(bench, shape), bench.plan, bench.floors
    sizes = DecodeSizes(
        batch=batch,
        context_len=plan.context_len,
        num_warm_up=plan.num_warm_up,
        num_steps=plan.num_steps,
    )
    window = decode_window(bench.device, engine, spec, sizes)
    step_s = window.seconds / window.num_steps
    weights = weight_bytes_per_step(spec)
    kv = window.kv_tokens * kv_bytes_per_token(spec) / window.num_steps
    floor_s = None if floors is None else (weights + kv) / floors.memory_bytes_per_s
    return {
        "batch": batch,
        "prompt_len": sizes.prompt_len,
        "mean_context": window.kv_tokens / window.num_steps / batch,
        "num_steps": window.num_steps,
        "step_s": step_s,
        "cpu_s_per_step": window.cpu_seconds / window.num_steps,
        "tokens_per_s": batch / step_s,
        "weight_bytes_per_step": weights,
        "kv_bytes_per_step": kv,
        "floor_s": floor_s,
        "share_of_floor": None if floor_s is None else floor_s / step_s,
        "num_graph_captures": window.num_graph_captures,
    }


def measure_prefill(bench: Bench, shape: str) -> dict[str, Any]:
    """Measure the seconds from queueing prompts to their first tokens, and FLOPs per second.

    Returns figures of the second of two runs. FLOPs count whole prompts, even if the engine skips
    work.
    """
    (engine, spec), plan, floors = _engine(bench, shape), bench.plan, bench.floors
    prompts = random_prompts(spec.vocab_size, [plan.prompt_len] * plan.num_prompts)
    sampling = SamplingParams(num_tokens_to_generate=1, ignore_eos=True, seed=0)

    def compute() -> None:
        engine.add_groups([(prompt, [sampling]) for prompt in prompts])
        while engine.has_unfinished_requests():
            engine.step()

    compute()
    seconds = bench.device.seconds(compute)
    num_tokens = plan.num_prompts * plan.prompt_len
    flops = prefill_flops(spec, plan.prompt_len, plan.num_prompts)
    floor_s = None if floors is None else flops / floors.matmul_flops_per_s
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "flops": flops,
        "flops_per_s": flops / seconds,
        "floor_s": floor_s,
        "share_of_floor": None if floor_s is None else floor_s / seconds,
    }


def measure_host(bench: Bench, batch: int) -> dict[str, Any]:
    """Measure wall and CPU seconds of a decode step of a tiny model: the host's own work.

    Both times include the kernel launches. The CPU time includes busy waiting.
    """
    plan, spec = bench.plan, bench.plan.host_spec
    pool = PoolShape(num_rows=max(plan.host_batches), context_len=BLOCK_TOKENS)
    sizes = DecodeSizes(
        batch=batch,
        context_len=BLOCK_TOKENS,
        num_warm_up=plan.num_warm_up,
        num_steps=plan.num_host_steps,
    )
    window = decode_window(bench.device, bench.engine("host", spec, pool), spec, sizes)
    return {
        "batch": batch,
        "num_steps": window.num_steps,
        "wall_s_per_step": window.seconds / window.num_steps,
        "cpu_s_per_step": window.cpu_seconds / window.num_steps,
        "num_graph_captures": window.num_graph_captures,
    }


# ---- suspends and updates


def held_rows(bench: Bench, shape: str, num_cycles: int) -> DecodingRows:
    """Start decoding rows of the plan's context length. They last for `num_cycles` cycles."""
    (engine, spec), plan = _engine(bench, shape), bench.plan
    num_new = (num_cycles + 1) * _TOKENS_PER_CYCLE
    num_rows, prompt_len = plan.num_held_rows, plan.context_len - num_new
    rows = DecodingRows(engine=engine, spec=spec, num_rows=num_rows, prompt_len=prompt_len)
    rows.start(num_new)
    rows.settle()
    return rows


def measure_cycles(bench: Bench, shape: str, owner: str) -> dict[str, Any]:
    """Measure cycles of suspend, resume and one step, relative to copies of the same bytes.

    `owner` is the resource that is released: "kv_cache" or "weights". The first cycle page-locks
    host memory, and its figures are in "first". The other figures are medians of the later cycles.
    """
    plan, floors = bench.plan, bench.floors
    rows = held_rows(bench, shape, plan.num_cycles)
    first, *later = (_cycle(bench.device, rows, owner) for _ in range(plan.num_cycles))
    rows.end()
    medians = {
        name: statistics.median(cycle[name] for cycle in later)
        for name in ("suspend_s", "resume_s", "next_token_s")
    }
    num_bytes = first["num_bytes"]
    down_s = None if floors is None else num_bytes / floors.to_host_bytes_per_s
    up_s = None if floors is None else num_bytes / floors.to_device_bytes_per_s
    return {
        "owner": owner,
        "num_rows": plan.num_held_rows,
        "num_bytes": num_bytes,
        "first": first,
        **medians,
        "copy_down_s": down_s,
        "copy_up_s": up_s,
        "suspend_over_copy": None if down_s is None else medians["suspend_s"] / down_s,
        "resume_over_copy": None if up_s is None else medians["resume_s"] / up_s,
        "num_graph_captures": sum(cycle["num_graph_captures"] for cycle in (first, *later)),
        "has_same_addresses": all(cycle["has_same_addresses"] for cycle in (first, *later)),
        "later": later,
    }


def _cycle(device: MeasuredDevice, rows: DecodingRows, owner: str) -> dict[str, Any]:
    engine = rows.engine
    captures, addresses = engine.stats().num_graph_captures, _addresses(engine)
    engine.pause()
    suspend_s, given = device.timed(lambda: engine.suspend("offload", (owner,)))
    resume_s, _ = device.timed(engine.resume)
    has_same_addresses = _addresses(engine) == addresses
    engine.unpause()
    next_token_s = device.seconds(lambda: _step(rows, 1))
    _step(rows, _STEPS_AFTER)
    return {
        "num_bytes": given.bytes_on_host,
        "bytes_released": given.bytes_released,
        "suspend_s": suspend_s,
        "resume_s": resume_s,
        "next_token_s": next_token_s,
        "num_graph_captures": engine.stats().num_graph_captures - captures,
        "has_same_addresses": has_same_addresses,
    }


def _addresses(engine: DynamicInferenceEngine) -> dict[str, int]:
    return {**engine.kv_data_ptrs(), **engine.weight_data_ptrs()}


def _step(rows: DecodingRows, num_steps: int) -> None:
    """Run `num_steps` decode steps, then commit the step in flight."""
    for _ in range(num_steps):
        rows.engine.step()
    rows.settle()


@torch.no_grad()
def measure_update(bench: Bench, shape: str) -> dict[str, Any]:
    """Measure updates from a trainer's tensors on the same device, while rows decode.

    Staging backs up the served weights on the host. The first update page-locks that memory, and
    its figures begin with "first_". The stall is the time of `commit_weights`. It is compared with
    a copy of the same bytes within the device.
    """
    device, plan = bench.device, bench.plan
    rows = held_rows(bench, shape, plan.num_updates)
    engine, spec = rows.engine, rows.spec
    source = RandomWeights(spec, device.name, seed=1)
    captures = engine.stats().num_graph_captures
    stages, stalls = [], []
    for _ in range(plan.num_updates):
        stage_s, staged = device.timed(lambda: engine.stage_weights(source))
        _step(rows, 1)
        commit = partial(engine.commit_weights, staged, in_flight=True)
        stall_s, report = device.timed(commit)
        _step(rows, _STEPS_AFTER)
        stages.append(stage_s)
        stalls.append(stall_s)
        del staged, commit  # frees the backup, whose memory the next one needs
    captures = engine.stats().num_graph_captures - captures
    rows.end()
    tensors = list(source.parameters())
    room = torch.empty(max(t.numel() for t in tensors), dtype=spec.dtype, device=device.name)

    def copy() -> None:
        for tensor in tensors:
            room[: tensor.numel()].view_as(tensor).copy_(tensor)

    copy_s = device.seconds_per_call(copy, plan.num_updates)
    stall_s = statistics.median(stalls[1:])
    return {
        "num_bytes": report.num_bytes,
        "first_stage_s": stages[0],
        "stage_s": statistics.median(stages[1:]),
        "first_stall_s": stalls[0],
        "stall_s": stall_s,
        "copy_s": copy_s,
        "stall_over_copy": stall_s / copy_s,
        "num_graph_captures": captures,
    }


# ---- peers


def layer_batch(
    attention: AttentionBackend, spec: ModelSpec, num_rows: int, context_len: int, device: str
) -> ForwardBatch:
    """Return a batch of rows that decode one token. Each row has its own blocks of random KV."""
    blocks_per_row = -(-context_len // BLOCK_TOKENS)
    cache_spec = CacheSpec(
        num_layers=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        block_size=BLOCK_TOKENS,
    )
    shape = attention.cache_shape(cache_spec, num_rows * blocks_per_row)
    tables = np.arange(num_rows * blocks_per_row, dtype=np.int32).reshape(num_rows, -1)
    position = context_len - 1
    slots = tables[:, position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
    starts = np.array([*accumulate([1] * num_rows, initial=0)], dtype=np.int32)
    context_lens = np.full(num_rows, context_len, dtype=np.int32)

    def on_device(values: Any) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device)

    return ForwardBatch(
        token_ids_T=torch.zeros(num_rows, dtype=torch.int64, device=device),
        positions_T=torch.full((num_rows,), position, device=device),
        slots_T=on_device(slots.astype(np.int64)),
        block_tables_RM=on_device(tables),
        query_starts_E=on_device(starts),
        context_lens_R=on_device(context_lens),
        query_starts=starts,
        context_lens=context_lens,
        num_decode_rows=num_rows,
        block_size=BLOCK_TOKENS,
        logit_indices_L=torch.zeros(0, dtype=torch.int64, device=device),
        kv=[torch.randn(shape, device=device).to(spec.dtype)],
    )


def measure_layer(bench: Bench, num_rows: int) -> dict[str, Any]:
    """Compare decode attention of one layer with torch's scaled_dot_product_attention.

    Our attention also writes K and V. torch reads contiguous K and V. The floor is the time to read
    K and V once.
    """
    device, plan, floors = bench.device, bench.plan, bench.floors
    spec, context_len = next(iter(plan.shapes.values())), plan.context_len
    backend = create_backend(InferenceConfig(device=device.name, memory_kind="device"))
    attention = backend.attention
    batch = attention.begin(layer_batch(attention, spec, num_rows, context_len, device.name))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device.name).to(spec.dtype)

    q_RHD = random(num_rows, spec.num_heads, spec.head_dim)
    k_RGD, v_RGD = (random(num_rows, spec.num_kv_heads, spec.head_dim) for _ in range(2))
    ours_s = device.seconds_per_replay(
        lambda: attention.attend(q_RHD, k_RGD, v_RGD, 0, batch), plan.num_layer_calls
    )
    k_RGCD, v_RGCD = (
        random(num_rows, spec.num_kv_heads, context_len, spec.head_dim) for _ in range(2)
    )
    q_RHTD = q_RHD.unsqueeze(2)
    torch_s = device.seconds_per_replay(
        lambda: F.scaled_dot_product_attention(q_RHTD, k_RGCD, v_RGCD, enable_gqa=True),
        plan.num_layer_calls,
    )
    num_bytes = k_RGCD.nbytes + v_RGCD.nbytes
    floor_s = None if floors is None else num_bytes / floors.memory_bytes_per_s
    return {
        "num_rows": num_rows,
        "context_len": context_len,
        "kv_bytes": num_bytes,
        "seconds": {"rollout": ours_s, "torch SDPA": torch_s},
        "ratio": torch_s / ours_s,
        "floor_s": floor_s,
        "share_of_floor": None if floor_s is None else floor_s / ours_s,
    }


def device_model(spec: ModelSpec, device: str) -> Any:
    """Return a transformers model with random weights that are made on the device."""
    import transformers  # it may be missing, and its import takes seconds

    values = spec.to_hf_config()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
    return model.eval()


def measure_generate(bench: Bench) -> dict[str, Any]:
    """Compare tokens per second of an LLM and of transformers' `generate`, with log-probs.

    Both have the same weights. `generate` has a static cache and is not compiled. The better of two
    runs counts.
    """
    device, plan = bench.device, bench.plan
    spec = plan.shapes[plan.generate_shape]
    workload = group_workload(
        spec.vocab_size,
        num_prompts=plan.num_generate_rows,
        num_samples=1,
        prompt_len=plan.generate_prompt_len,
        output_len=plan.generate_output_len,
    )
    model = device_model(spec, device.name)

    def best_s(contestant: Contestant) -> float:
        timed(contestant, workload.shortened(3), 0)
        return min(device.seconds(partial(timed, contestant, workload, run)) for run in (1, 2))

    context_len = plan.generate_prompt_len + plan.generate_output_len
    pool = PoolShape(num_rows=plan.num_generate_rows, context_len=context_len)
    config = pool_config(spec, pool, device.name, memory_kind=plan.memory_kind)
    with LLM(model, inference_config=config) as llm:
        ours_s = best_s(RolloutEngine(llm))
    theirs_s = best_s(TransformersGenerate(model, cache="static"))
    seconds = {"rollout": ours_s, "transformers generate": theirs_s}
    return {
        "summary": workload.summary,
        "seconds": seconds,
        "tokens_per_s": {name: workload.num_tokens / s for name, s in seconds.items()},
        "ratio": theirs_s / ours_s,
    }
