"""create_backend: the backend that it chooses, and the fields that it refuses by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rollout.backends.base import Backend
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.memory import DeviceMemory, ReservedMemory
from rollout.backends.select import create_backend
from rollout.config import MEMORY_KINDS, InferenceConfig
from rollout.errors import ConfigError
from rollout.parallel.collectives import ONE_RANK

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_auto_is_the_cpu(device: str) -> None:
    assert create_backend(InferenceConfig(device=device)).device == torch.device("cpu")


def test_a_device_without_backend_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda'.*device='cpu'"):
        create_backend(InferenceConfig(device="cuda"))


@pytest.mark.parametrize(
    ("mode", "static", "kind"),
    [
        ("persist", False, DeviceMemory),
        ("persist", True, DeviceMemory),
        ("offload", False, DeviceMemory),
        ("offload", True, ReservedMemory),
        ("recompute", True, ReservedMemory),
    ],
)
def test_auto_memory_keeps_addresses_only_where_they_would_change(
    mode: str, static: bool, kind: type
) -> None:
    config = InferenceConfig(kv_cache_management_mode=mode, static_kv_memory_pointers=static)
    assert isinstance(create_backend(config).memory, kind)


@pytest.mark.parametrize(("name", "kind"), [("device", DeviceMemory), ("reserved", ReservedMemory)])
def test_a_named_memory_kind_is_taken(name: str, kind: type) -> None:
    assert isinstance(create_backend(InferenceConfig(memory_kind=name)).memory, kind)


@pytest.mark.parametrize("kind", ["torch_memory_saver", "vmm", "unified"])
def test_memory_kinds_of_gpus_are_refused_with_the_legal_ones(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"memory_kind='{kind}'.*'device', 'reserved'"):
        create_backend(InferenceConfig(memory_kind=kind))


@pytest.mark.usefixtures("asked_of_cuda")
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_every_memory_kind_is_served_by_a_device_and_refused_by_name_elsewhere(kind: str) -> None:
    refusals = {}
    for device in ("cpu", "cuda"):
        try:
            create_backend(InferenceConfig(device=device, memory_kind=kind))
        except ConfigError as error:
            refusals[device] = str(error)
    assert len(refusals) < 2, "no device serves it"
    for device, message in refusals.items():
        assert f"memory_kind='{kind}' does not exist on {device.upper()}" in message
        assert "use 'auto' or one of ('device'," in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unified_memory_level", 1),
        ("num_cuda_graphs", 4),
        ("cuda_graph_mixed_prefill_count", 2),
        ("use_cuda_graphs_for_non_decode_steps", False),
        ("use_flashinfer_fused_rope", True),
        ("use_flashinfer_fused_rope", None),
    ],
)
def test_a_field_without_effect_on_cpu_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value!r}.*leave it"):
        create_backend(InferenceConfig(**{field: value}))


# ---- CUDA, without a device: what reaches cuda_backend


@pytest.fixture
def asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the arguments with which `cuda_backend` is called, where torch reports a device."""
    calls: list[dict[str, Any]] = []
    module: Any = ModuleType("rollout.backends.cuda.backend")

    def cuda_backend(memory_kind: str, **arguments: Any) -> Backend:
        calls.append({"memory_kind": memory_kind, **arguments})
        return cpu_backend("device")

    module.cuda_backend = cuda_backend
    monkeypatch.setitem(sys.modules, "rollout.backends.cuda.backend", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return calls


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_auto_is_cuda_where_there_is_a_device(
    asked_of_cuda: list[dict[str, Any]], device: str
) -> None:
    create_backend(InferenceConfig(device=device, max_tokens=50))
    assert asked_of_cuda == [
        {
            "memory_kind": "device",
            "index": None,
            "num_graphs": None,
            "max_mixed_graphs": 16,
            "max_rows": 50,
            "collectives": ONE_RANK,
        }
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_cuda_graphs": 0}, {"num_graphs": 0}),
        ({"num_cuda_graphs": 9, "max_requests": 8}, {"num_graphs": 9, "max_rows": 8}),
        ({"cuda_graph_mixed_prefill_count": 3}, {"max_mixed_graphs": 3}),
        ({"cuda_graph_mixed_prefill_count": None}, {"max_mixed_graphs": 16}),
        ({"use_cuda_graphs_for_non_decode_steps": False}, {"max_mixed_graphs": 0}),
        ({"unified_memory_level": 1}, {"memory_kind": "unified"}),
        ({"memory_kind": "unified"}, {"memory_kind": "unified"}),
        ({"memory_kind": "unified", "unified_memory_level": 1}, {"memory_kind": "unified"}),
        (
            {
                "memory_kind": "unified",
                "static_kv_memory_pointers": True,
                "kv_cache_management_mode": "offload",
            },
            {"memory_kind": "unified"},
        ),
        ({"memory_kind": "device"}, {"memory_kind": "device"}),
        ({"memory_kind": "vmm"}, {"memory_kind": "vmm"}),
        ({"memory_kind": "torch_memory_saver"}, {"memory_kind": "torch_memory_saver"}),
        ({"kv_cache_management_mode": "offload"}, {"memory_kind": "vmm"}),
        ({"kv_cache_management_mode": "recompute"}, {"memory_kind": "vmm"}),
        (
            {"static_kv_memory_pointers": True, "kv_cache_management_mode": "offload"},
            {"memory_kind": "vmm"},
        ),
        ({"static_kv_memory_pointers": True}, {"memory_kind": "device"}),
    ],
)
def test_fields_of_cuda_reach_its_backend(
    asked_of_cuda: list[dict[str, Any]], config: dict[str, Any], expected: dict[str, Any]
) -> None:
    create_backend(InferenceConfig(**config))
    assert {name: asked_of_cuda[0][name] for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"memory_kind": "reserved"},
            "memory_kind='reserved' does not exist on CUDA.*"
            "'auto' or one of .'device', 'vmm', 'torch_memory_saver', 'unified'",
        ),
        ({"use_flashinfer_fused_rope": True}, "use_flashinfer_fused_rope=True has no effect"),
        ({"deterministic": True}, "deterministic=True is not supported on CUDA"),
        ({"unified_memory_level": 1, "memory_kind": "device"}, "contradicts memory_kind='device'"),
    ],
)
def test_fields_that_cuda_does_not_support_are_refused_by_name(
    asked_of_cuda: list[dict[str, Any]], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create_backend(InferenceConfig(device="cuda", **config))
    assert asked_of_cuda == []


def test_an_engine_on_a_cpu_imports_neither_triton_nor_the_memory_saver() -> None:
    """Models of transformers would: torch._dynamo looks for Triton by importing it."""
    program = """
import sys
import torch
before = set(sys.modules)
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.models import CausalLM
from tests.scenarios.memory_probe import SPEC
config = InferenceConfig(device="cpu", buffer_size_gb=0.01, max_sequence_length=512)
engine = DynamicInferenceEngine.from_model(CausalLM.random(SPEC), config)
engine.add_request([1, 2, 3], SamplingParams(num_tokens_to_generate=3))
while engine.has_unfinished_requests():
    engine.step()
print([name for name in ("triton", "torch_memory_saver") if name in sys.modules])
print("sympy" in sys.modules.keys() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "False"], "SymPy alone would take a second"


@pytest.mark.usefixtures("_threads_kept")
def test_num_threads_sets_torchs_threads() -> None:
    create_backend(InferenceConfig(num_threads=2))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_threads_kept")
def test_a_refused_config_changes_no_thread_count() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ConfigError):
        create_backend(InferenceConfig(num_threads=before + 1, memory_kind="vmm"))
    assert torch.get_num_threads() == before
