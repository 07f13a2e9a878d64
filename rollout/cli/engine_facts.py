"""The values that an engine works with, and where they come from, for `rollout explain`.

Used by `rollout.cli.explain`. It reads the parts of an engine and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rollout.config import GIB, InferenceConfig
from rollout.engine.build import EngineBuild
from rollout.engine.engine import Engine
from rollout.worker.kv_cache import bytes_per_block
from rollout.worker.loading import DEFAULT_BUFFER_GB, DEFAULT_MEMORY_FRACTION, longest_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A value that an engine works with.

    why: where the value comes from; "" if that is evident."""

    name: str
    value: Any
    why: str = ""


def summary(build: EngineBuild) -> str:
    """Return one sentence on what the engine serves, on which device, and how many sequences at
    once."""
    spec, sizes = build.model.spec, build.sizes
    dtype, device = str(spec.dtype).removeprefix("torch."), build.backend.device
    per_block = bytes_per_block(build.backend.attention, build.model.cache_spec(sizes.block_size))
    at_once = min(sizes.num_rows, sizes.num_blocks // sizes.max_blocks_per_row)
    return (
        f"{spec.family}, {spec.num_layers} layers, {dtype} on {device}: "
        f"{_gib(build.weights.num_bytes)} of weights and {_gib(per_block * sizes.num_blocks)} of "
        f"KV cache, which holds {at_once:,} sequences of {sizes.max_sequence_length:,} tokens at "
        "once"
    )


def facts_of(build: EngineBuild) -> dict[str, list[Fact]]:
    """Return the facts of an engine by the title of their section, in the order of printing."""
    return {
        "model": list(_model(build)),
        "device": list(_device(build)),
        "KV blocks": list(_blocks(build)),
        "memory": list(_memory(build)),
        "limits": list(_limits(build)),
        "kernels": list(_kernels(build)),
    }


def described_facts(engine: Engine) -> dict[str, list[Fact]]:
    """Return what an engine of another package says about itself, by the title of the section."""
    return {
        title: [Fact(name=name, value=text) for name, text in texts.items()]
        for title, texts in engine.describe().items()
    }


def _model(build: EngineBuild) -> Iterator[Fact]:
    spec = build.model.spec
    yield Fact(name="family", value=spec.family)
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size"):
        yield Fact(name=name, value=getattr(spec, name))
    if spec.moe_layers:
        of_layers = f"in {spec.num_moe_layers} of {spec.num_layers} layers"
        why = f"{spec.experts_per_token} of them for a token, {of_layers}"
        yield Fact(name="num_experts", value=spec.num_experts, why=why)
    dtype, given = str(spec.dtype).removeprefix("torch."), build.config.dtype
    yield Fact(name="dtype", value=dtype, why="the model's" if given == "auto" else "as given")


def _device(build: EngineBuild) -> Iterator[Fact]:
    config, backend = build.config, build.backend
    why = "the best that is there" if config.device == "auto" else "as given"
    yield Fact(name="device", value=str(backend.device), why=why)
    threads = "torch's default" if config.num_threads is None else "as given"
    yield Fact(name="num_threads", value=torch.get_num_threads(), why=threads)
    yield Fact(name="deterministic", value=config.deterministic)


def _blocks(build: EngineBuild) -> Iterator[Fact]:
    config, sizes = build.config, build.sizes
    why = "the device's default" if config.block_size_tokens is None else "as given"
    yield Fact(name="block_size_tokens", value=sizes.block_size, why=why)
    yield Fact(name="num_blocks", value=sizes.num_blocks, why=_why_blocks(build))
    per_sequence = sizes.max_blocks_per_row
    yield Fact(
        name="full sequences at once",
        value=sizes.num_blocks // per_sequence,
        why=f"{per_sequence} blocks each",
    )
    yield Fact(name="kv_cache_management_mode", value=config.kv_cache_management_mode.value)
    yield Fact(name="enable_prefix_caching", value=config.enable_prefix_caching)


def _why_blocks(build: EngineBuild) -> str:
    config, sizes = build.config, build.sizes
    if config.buffer_size_gb is not None:
        return f"what buffer_size_gb={config.buffer_size_gb} holds"
    if sizes.num_rows * sizes.max_blocks_per_row == sizes.num_blocks:
        return f"what {sizes.num_rows} full sequences need"
    share = f"{DEFAULT_MEMORY_FRACTION:.0%} of {_gib(build.backend.memory_bytes)}"
    return f"what a pool of {DEFAULT_BUFFER_GB:g} GiB holds, or one of {share} if less"


def _memory(build: EngineBuild) -> Iterator[Fact]:
    config, backend, sizes = build.config, build.backend, build.sizes
    yield Fact(name="weights", value=_gib(build.weights.num_bytes))
    per_block = bytes_per_block(backend.attention, build.model.cache_spec(sizes.block_size))
    why = f"{sizes.num_blocks} blocks of {per_block:,} bytes"
    yield Fact(name="KV cache", value=_gib(per_block * sizes.num_blocks), why=why)
    if build.routing is not None:
        why = "record_routing: on the host, as slots are first written to"
        yield Fact(name="routing", value=_gib(build.routing.num_bytes), why=why)
    yield Fact(name="all memory", value=_gib(backend.memory_bytes), why="that this process may use")
    kind = "chosen for the KV mode" if config.memory_kind == "auto" else "as given"
    yield Fact(name="memory kind", value=type(backend.memory).__name__, why=kind)


def _limits(build: EngineBuild) -> Iterator[Fact]:
    config, sizes = build.config, build.sizes
    longest = longest_sequence(config, build.model.spec)
    if config.max_sequence_length is not None:
        why = "as given"
    elif sizes.max_sequence_length == longest:
        why = "the model's longest"
    else:
        why = f"what the KV pool holds; the model allows {longest}"
    yield Fact(name="max_sequence_length", value=sizes.max_sequence_length, why=why)
    yield Fact(name="max_requests", value=sizes.num_rows, why=_why_rows(config, build))
    why = "the default" if config.max_tokens is None else "as given"
    yield Fact(name="max_tokens", value=sizes.max_tokens, why=f"{why}; tokens of one step")
    chunked = "long prompts are split over steps" if config.enable_chunked_prefill else ""
    yield Fact(name="enable_chunked_prefill", value=config.enable_chunked_prefill, why=chunked)
    scores = not config.materialize_only_last_token_logits
    why = "" if scores else "materialize_only_last_token_logits=false allows them"
    yield Fact(name="prompt log-probs", value=scores, why=why)


def _why_rows(config: InferenceConfig, build: EngineBuild) -> str:
    num_rows = build.sizes.num_rows
    if num_rows == config.max_requests:
        return "as given"
    if num_rows == build.sizes.num_blocks:
        return "each request needs a block"
    if num_rows == build.sizes.max_tokens:
        return "each request needs a token of every step"
    return "the default"


def _kernels(build: EngineBuild) -> Iterator[Fact]:
    backend = build.backend
    yield Fact(name="operations", value=type(backend.ops).__name__)
    yield Fact(name="attention", value=type(backend.attention).__name__)
    yield Fact(name="executor", value=type(backend.executor).__name__)
    fused = build.model.fused
    why = "the device, or the model's layers, have none; they run one by one"
    yield Fact(
        name="forward pass in one call",
        value="never" if fused is None else fused.explain(),
        why=why if fused is None else "",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.3f} GiB"
