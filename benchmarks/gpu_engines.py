"""Helpers of the GPU benchmarks: device timing, floors, engines with random weights.

Used by `benchmarks.gpu`, `benchmarks.gpu_measures` and `benchmarks.gpu_kernels`.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.gpu_shapes import BLOCK_TOKENS, FloorSizes, Plan, PoolShape, kv_bytes_per_token
from benchmarks.workloads import random_prompts
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.config import DEFAULT_MAX_TOKENS, GIB
from rollout.models import CausalLM
from rollout.models.causal_lm import INIT_STD
from rollout.models.spec import ModelSpec

_T = TypeVar("_T")
_ALL = ("kv_cache", "weights")


class MeasuredDevice:
    """Timing and memory of a device: the current "cuda" device, or "cpu"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = torch.device(name).type == "cuda"
        self._index = torch.cuda.current_device() if self.is_cuda else None

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self._index)

    def timed(self, work: Callable[[], _T]) -> tuple[float, _T]:
        """Return the wall seconds of `work`, and its result.

        Waits for the device before `work` and before the end of the time.
        """
        self.wait()
        start = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - start, result

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the wall seconds of `work`, timed as by `timed`."""
        return self.timed(work)[0]

    def seconds_per_call(self, work: Callable[[], Any], num_calls: int) -> float:
        """Return the mean wall seconds of `num_calls` calls in a row, after an untimed call."""
        work()
        return self.seconds(lambda: _repeat(work, num_calls)) / num_calls

    def seconds_per_replay(self, work: Callable[[], Any], num_calls: int) -> float:
        """Return the mean wall seconds of a call inside a CUDA graph of `num_calls` calls.

        The result contains no launch times. On a CPU this method equals `seconds_per_call`.
        """
        if not self.is_cuda:
            return self.seconds_per_call(work, num_calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # kernels compile, handles open
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            _repeat(work, num_calls)
        graph.replay()
        return self.seconds(graph.replay) / num_calls

    def free_unused(self) -> None:
        """Free unreferenced memory, including torch's cache."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        """Return the device's name and memory, and the versions of torch, CUDA, Triton and
        Python."""
        return {
            "device": torch.cuda.get_device_name(self._index) if self.is_cuda else "cpu",
            "memory_bytes": torch.cuda.mem_get_info(self._index)[1] if self.is_cuda else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _triton_version(),
            "python": platform.python_version(),
        }


def _repeat(work: Callable[[], Any], num_calls: int) -> None:
    for _ in range(num_calls):
        work()


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version


# ---- floors


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Measured rates of a device. A copy of n bytes counts as n bytes.

    device_read_bytes_per_s: rate of summing a buffer.
    device_copy_bytes_per_s: rate of a copy within the device.
    to_device_bytes_per_s, to_host_bytes_per_s: rates of copies from and to pinned host memory.
    matmul_flops_per_s: rate of a product of two square matrices.
    """

    device_read_bytes_per_s: float
    device_copy_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    matmul_flops_per_s: float

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate of the device's memory: of a read, or of a copy's reads and writes if that is
        higher."""
        return max(self.device_read_bytes_per_s, 2 * self.device_copy_bytes_per_s)

    def figures(self) -> dict[str, float]:
        """Return all rates by name, including `memory_bytes_per_s`."""
        return {**asdict(self), "memory_bytes_per_s": self.memory_bytes_per_s}

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> Floors:
        """Return the Floors whose `figures` method returned `figures`."""
        return cls(**{name: figures[name] for name in cls.__dataclass_fields__})


def measure_floors(device: MeasuredDevice, sizes: FloorSizes, dtype: torch.dtype) -> Floors:
    """Measure all rates. The matrices have `dtype`."""
    source = torch.ones(sizes.device_bytes // 4, device=device.name)
    target = torch.empty_like(source)
    num_calls = sizes.num_calls
    copy_s = device.seconds_per_call(lambda: target.copy_(source), num_calls)
    read_s = device.seconds_per_call(source.sum, num_calls)
    num_pinned = sizes.pinned_bytes // 4
    pinned = torch.zeros(num_pinned, pin_memory=device.is_cuda)
    part = target[:num_pinned]
    up_s = device.seconds_per_call(lambda: part.copy_(pinned, non_blocking=True), num_calls)
    down_s = device.seconds_per_call(lambda: pinned.copy_(part, non_blocking=True), num_calls)
    a, b = (
        # Random values, because products of zeros take less power.
        torch.randn(sizes.matrix_size, sizes.matrix_size, device=device.name).to(dtype)
        for _ in range(2)
    )
    product_s = device.seconds_per_call(lambda: a @ b, num_calls)
    return Floors(
        device_read_bytes_per_s=source.nbytes / read_s,
        device_copy_bytes_per_s=source.nbytes / copy_s,
        to_device_bytes_per_s=pinned.nbytes / up_s,
        to_host_bytes_per_s=pinned.nbytes / down_s,
        matmul_flops_per_s=2 * sizes.matrix_size**3 / product_s,
    )


# ---- engines


class _Config:
    """The part of a transformers config that an engine reads."""

    def __init__(self, spec: ModelSpec) -> None:
        self._values = spec.to_hf_config()
        self.model_type = self._values["model_type"]

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)


class RandomWeights(nn.Module):
    """Random weights on the device, with the names and the dtype of a transformers model."""

    def __init__(self, spec: ModelSpec, device: str, seed: int = 0) -> None:
        super().__init__()
        self.config = _Config(spec)
        # An engine copies these on the device. It copies weights of a CausalLM through the host.
        generator = torch.Generator(device).manual_seed(seed)
        for name, slot in CausalLM(spec, "meta").weight_slots().items():
            if name == "lm_head.weight" and spec.tie_word_embeddings:
                continue
            values = torch.ones(slot.shape, dtype=slot.dtype, device=device)
            if values.dim() > 1:
                values.normal_(std=INIT_STD, generator=generator)
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(values, requires_grad=False))


def pool_config(
    spec: ModelSpec,
    pool: PoolShape,
    device: str,
    *,
    memory_kind: str = "device",
    is_eager: bool = False,
) -> InferenceConfig:
    """Return the config of an engine with a KV pool of exactly this shape.

    If `is_eager` is set, the engine captures no CUDA graph.
    """
    block_bytes = kv_bytes_per_token(spec) * BLOCK_TOKENS
    return InferenceConfig(
        device=device,
        memory_kind=memory_kind,
        static_kv_memory_pointers=memory_kind != "device",  # other kinds keep their addresses
        block_size_tokens=BLOCK_TOKENS,
        buffer_size_gb=(pool.num_blocks + 0.5) * block_bytes / GIB,
        max_sequence_length=pool.context_len,
        max_requests=pool.num_rows,
        num_cuda_graphs=0 if is_eager and device != "cpu" else None,
    )


def random_engine(spec: ModelSpec, config: InferenceConfig, device: str) -> DynamicInferenceEngine:
    """Return an engine with random weights that are made on the device."""
    return DynamicInferenceEngine.from_model(RandomWeights(spec, device), config)


class Bench:
    """State that the parts of one process share: plan, device, floors, and one engine.

    The first use of `device` initializes CUDA.
    """

    def __init__(self, plan: Plan, floors: Floors | None = None) -> None:
        """`floors` are rates that another process measured, or None if they are not measured
        yet."""
        self.plan, self.floors = plan, floors
        self._name: str | None = None
        self._engine: DynamicInferenceEngine | None = None

    @cached_property
    def device(self) -> MeasuredDevice:
        return MeasuredDevice(self.plan.device)

    def engine(self, name: str, spec: ModelSpec, pool: PoolShape) -> DynamicInferenceEngine:
        """Return the engine `name`. Closes an engine of another name, then builds this one."""
        if self._engine is None or self._name != name:
            self._close()
            self.device.free_unused()
            config = pool_config(spec, pool, self.plan.device, memory_kind=self.plan.memory_kind)
            self._engine, self._name = random_engine(spec, config, self.plan.device), name
            self.device.free_unused()
        return self._engine

    def recover(self) -> None:
        """Drop a failed engine without closing it.

        Raises the device's error if the device is broken.
        """
        self._engine = None
        self.device.free_unused()
        self.device.wait()

    def _close(self) -> None:
        """Shut the engine down, and release all its memory."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.pause()
            # shutdown alone keeps the weights
            engine.suspend("recompute", release=_ALL, discard_weights=True)
            engine.shutdown()


@dataclass(slots=True, kw_only=True)
class DecodingRows:
    """`num_rows` requests with different prompts. No two requests share a KV block."""

    engine: DynamicInferenceEngine
    spec: ModelSpec
    num_rows: int
    prompt_len: int
    _ids: list[int] = field(default_factory=list)

    def start(self, num_new: int) -> None:
        """Queue the requests, with `num_new` tokens each, and step until all prompts are computed.

        Raises RuntimeError if the prompts take more steps than `ramp_steps` expects.
        """
        sampling = SamplingParams(
            num_tokens_to_generate=num_new, ignore_eos=True, return_log_probs=True, seed=0
        )
        prompts = random_prompts(self.spec.vocab_size, [self.prompt_len] * self.num_rows)
        before = self.engine.stats().num_prefill_tokens
        groups = self.engine.add_groups([(prompt, [sampling]) for prompt in prompts])
        self._ids = [request_id for ids in groups for request_id in ids]
        wanted = before + self.num_rows * self.prompt_len
        for _ in range(ramp_steps(self.num_rows, self.prompt_len) + 2):
            self.engine.step()
            if self.engine.stats().num_prefill_tokens == wanted:
                return
        raise RuntimeError("the prompts were not computed within the steps they should take")

    def end(self) -> None:
        """Abort the requests, and commit the steps in flight."""
        for request_id in self._ids:
            self.engine.abort_request(request_id)
        self.settle()

    def settle(self) -> None:
        """Commit the steps in flight, by a pause and an unpause."""
        self.engine.pause()
        self.engine.unpause()


def ramp_steps(num_rows: int, prompt_len: int) -> int:
    """Return an upper bound of the steps until the last prompt is computed.

    The rows whose prompts are already computed decode in the same steps.
    """
    # Two more than the prompts alone take: one for a step in flight, one for rounding.
    prompts_per_step = (DEFAULT_MAX_TOKENS - num_rows) // prompt_len
    return -(-num_rows // prompts_per_step) + 2
