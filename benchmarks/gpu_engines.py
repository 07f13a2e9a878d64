"""Engines with random weights made on the device, one at a time, and rows that decode in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_shapes import BLOCK_TOKENS, PoolShape, kv_bytes_per_token
from benchmarks.workloads import random_prompts
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.config import DEFAULT_MAX_TOKENS, GIB
from rollout.models import CausalLM
from rollout.models.causal_lm import INIT_STD
from rollout.models.spec import ModelSpec

_ALL = ("kv_cache", "weights")


def random_model(spec: ModelSpec, device: str, seed: int = 0) -> CausalLM:
    """Random weights drawn on the device; `CausalLM.random` draws on the host, minutes for 8B."""
    model = CausalLM(spec, device)
    generator = torch.Generator(device).manual_seed(seed)
    for slot in model.weight_slots().values():
        values = torch.ones(slot.shape, dtype=slot.dtype, device=device)
        if values.dim() > 1:
            values.normal_(std=INIT_STD, generator=generator)
        slot.write(values)
    return model


def pool_config(
    spec: ModelSpec,
    pool: PoolShape,
    device: str,
    *,
    memory_kind: str = "device",
    is_eager: bool = False,
) -> InferenceConfig:
    """A pool of just that shape. A kind of memory that keeps addresses must hold them; `is_eager`
    captures no step.
    """
    block_bytes = kv_bytes_per_token(spec) * BLOCK_TOKENS
    return InferenceConfig(
        device=device,
        memory_kind=memory_kind,
        static_kv_memory_pointers=memory_kind != "device",
        block_size_tokens=BLOCK_TOKENS,
        buffer_size_gb=(pool.num_blocks + 0.5) * block_bytes / GIB,
        max_sequence_length=pool.context_len,
        max_requests=pool.num_rows,
        num_cuda_graphs=0 if is_eager and device != "cpu" else None,
    )


def close(engine: DynamicInferenceEngine) -> None:
    """Give all memory of the engine back, the weights' too, which shutdown would keep."""
    engine.pause()
    engine.suspend("recompute", release=_ALL, discard_weights=True)
    engine.shutdown()


class EngineHolder:
    """Keeps the engine of the last part for the next one, for building one takes long."""

    def __init__(self, device: MeasuredDevice) -> None:
        self._device = device
        self._name: str | None = None
        self._engine: DynamicInferenceEngine | None = None

    def get(self, name: str, build: Callable[[], DynamicInferenceEngine]) -> DynamicInferenceEngine:
        """The engine of that name; the one of another name is closed first."""
        if self._engine is None or self._name != name:
            self.close()
            self._engine, self._name = build(), name
        return self._engine

    def close(self) -> None:
        """Close the engine in order."""
        engine, self._engine = self._engine, None
        if engine is not None:
            close(engine)
        del engine
        self._device.give_back_unused()

    def forget(self) -> None:
        """Drop an engine that has failed and may not close any more."""
        self._engine = None
        self._device.give_back_unused()


@dataclass(slots=True, kw_only=True)
class DecodingRows:
    """`num_rows` requests with prompts of their own, so that no two share a block of KV."""

    engine: DynamicInferenceEngine
    spec: ModelSpec
    num_rows: int
    prompt_len: int
    _ids: list[int] = field(default_factory=list)

    def start(self, num_new: int) -> None:
        """Queue them, `num_new` tokens each, and step until all of them decode."""
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
        """Abort them and take in what is in flight."""
        for request_id in self._ids:
            self.engine.abort_request(request_id)
        self.settle()

    def settle(self) -> None:
        """Take in all steps in flight."""
        self.engine.pause()
        self.engine.unpause()


def ramp_steps(num_rows: int, prompt_len: int) -> int:
    """Steps until the last of `num_rows` prompts is computed; the first rows decode meanwhile.

    Two more than the prompts alone would take: one in flight, one for what rounding costs.
    """
    prompts_per_step = (DEFAULT_MAX_TOKENS - num_rows) // prompt_len
    return -(-num_rows // prompts_per_step) + 2
