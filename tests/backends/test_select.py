"""create_backend: what it picks, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollout.backends.memory.device import DeviceMemory
from rollout.backends.memory.reserved import ReservedMemory
from rollout.backends.select import create_backend
from rollout.config import InferenceConfig
from rollout.errors import ConfigError


@pytest.fixture
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("kind", ["torch_memory_saver", "unified"])
def test_memory_kinds_of_gpus_are_refused_with_the_legal_ones(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"memory_kind='{kind}'.*'device', 'reserved'"):
        create_backend(InferenceConfig(memory_kind=kind))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unified_memory_level", 1),
        ("num_cuda_graphs", 4),
        ("cuda_graph_mixed_prefill_count", 2),
        ("use_cuda_graphs_for_non_decode_steps", False),
        ("use_flashinfer_fused_rope", True),
        ("use_flashinfer_fused_rope", None),
        ("deterministic", True),
    ],
)
def test_a_field_without_effect_on_cpu_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value!r}.*leave it"):
        create_backend(InferenceConfig(**{field: value}))


@pytest.mark.usefixtures("_threads_kept")
def test_num_threads_sets_torchs_threads() -> None:
    create_backend(InferenceConfig(num_threads=2))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_threads_kept")
def test_a_refused_config_changes_no_thread_count() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ConfigError):
        create_backend(InferenceConfig(num_threads=before + 1, memory_kind="unified"))
    assert torch.get_num_threads() == before
