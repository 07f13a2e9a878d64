"""Suspends of an engine on a fake CUDA device: the graphs captured again, and the memory kept.

Steps are computed on the host. `tests/scenarios/test_on_a_device.py` does the same on a GPU.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.backends.buffers import MemoryBackend
from rollout.backends.cuda.device_memory import CudaDeviceMemory
from rollout.backends.cuda.graph_shapes import make_graph_shapes
from rollout.backends.cuda.memory_saver import MemorySaverMemory
from rollout.backends.cuda.unified import UnifiedMemory
from rollout.backends.cuda.vmm import VirtualMemory
from tests.backends.fake_cuda import FakeRuntime, FakeSaver
from tests.backends.repeating_device import graph_engine
from tests.device_bytes import DeviceBytes
from tests.tiny_models import Margins, drain, prompt_of, tiny_model

KINDS: dict[str, Callable[[FakeRuntime], MemoryBackend]] = {
    "device": CudaDeviceMemory,
    "vmm": VirtualMemory,
    "torch_memory_saver": MemorySaverMemory,
    "unified": UnifiedMemory,
}
PARAMS = SamplingParams(num_tokens_to_generate=8, ignore_eos=True)
NUM_CYCLES = 3
GRAPH_SHAPES = make_graph_shapes(4, 4, 2)


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=8)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_three_suspends_capture_again_only_graphs_of_moved_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", FakeSaver().as_module())
    runtime = FakeRuntime()
    memory = KINDS[kind](runtime)
    engine, executor, device = graph_engine(
        monkeypatch,
        model(),
        memory=memory,
        kv_cache_management_mode=mode,
        graph_shapes=GRAPH_SHAPES,
    )
    num_shapes = num_captured = engine.warm_up()
    for seed in range(3):
        engine.add_request(prompt_of(9, seed=seed), PARAMS, request_id=seed)
    for _ in range(NUM_CYCLES):
        engine.step()
        engine.pause()
        before = engine.kv_data_ptrs(), engine.weight_data_ptrs()
        runtime.library.calls.clear()
        suspended = engine.suspend(release=("kv_cache", "weights"))
        assert runtime.library.names().count("empty_cache") == 1
        assert suspended.kept_beside["graphs"] == device.num_bytes == 1 << 20
        assert all(suspended.kept_beside.values()), suspended
        report = engine.resume()
        has_moved = before != (engine.kv_data_ptrs(), engine.weight_data_ptrs())
        assert not (has_moved and memory.has_stable_addresses)
        assert report.graphs_recaptured == (num_shapes if has_moved else 0)
        num_captured += engine.warm_up()
        engine.unpause()
    assert executor.num_captures == num_captured
    assert device.cuda.fatal == []
    margins = Margins()
    for request in drain(engine).values():
        margins.compare_with_oracle(model(), request)
    margins.check()


def test_a_suspend_leaves_only_the_memory_in_its_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake driver counts KV and weights; all other memory is counted as it is allocated."""
    runtime = FakeRuntime()
    total = runtime.free
    with DeviceBytes("cpu") as device_bytes:
        engine, executor, device = graph_engine(
            monkeypatch, model(), memory=VirtualMemory(runtime), graph_shapes=GRAPH_SHAPES
        )
        engine.warm_up()
        for seed, penalty in enumerate((1.0, 1.3)):
            params = replace(PARAMS, repetition_penalty=penalty)
            engine.add_request(prompt_of(9, seed=seed), params, request_id=seed)
        for _ in range(4):
            engine.step()
        engine.pause()
        assert runtime.free < total
        report = engine.suspend("offload", release=("kv_cache", "weights"))
        gc.collect()
        assert runtime.free == total
        listed = sum(report.kept_beside.values()) - report.kept_beside["graphs"]
        # Static inputs come from two places in page-locked host memory; results are the pool's.
        on_host = 2 * report.kept_beside["inputs"]
        assert listed < device_bytes.alive <= listed + on_host + device.num_result_bytes
        assert report.kept_beside["graphs"] == device.num_bytes > device.num_result_bytes
    assert executor.num_captures > 0
