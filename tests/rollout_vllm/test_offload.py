"""OFFLOAD over vLLM: refused without sleep mode; on CUDA it uses these parts of vLLM."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from rollout import ConfigError, InferenceConfig
from rollout_vllm.options import engine_arguments
from tests.contracts.vllm_engines import HAS_VLLM, vllm_engine

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")
SLEEP = {"enable_sleep_mode": True}


def test_offload_is_taken_with_enable_sleep_mode_only() -> None:
    offload = InferenceConfig(
        engine="vllm", kv_cache_management_mode="offload", engine_options=SLEEP
    )
    assert engine_arguments(offload)["enable_sleep_mode"]
    with pytest.raises(ConfigError, match=r"'offload'.*enable_sleep_mode.*'persist'"):
        engine_arguments(InferenceConfig(engine="vllm", kv_cache_management_mode="offload"))


@needs_vllm
@pytest.mark.timeout(600)
def test_offload_of_vllm_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"vLLM refuses its arguments: .*[Ss]leep mode"):
        vllm_engine(kv_cache_management_mode="offload", engine_options=SLEEP)


@needs_vllm
def test_offload_kv_cache_uses_the_allocator_as_vllm_has_it() -> None:
    from vllm.config import ModelConfig
    from vllm.device_allocator import DEFERRABLE_TAGS, AllocationData, cumem
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import abstract
    from vllm.v1.worker.gpu_worker import Worker

    from rollout_vllm.offload import KV_TAG

    names = {field.name for field in fields(AllocationData)}
    assert names == {"handle", "tag", "cpu_backup_tensor", "is_asleep"}
    assert "pointer_to_data" in inspect.getsource(cumem.CuMemAllocator.__init__)
    assert {*inspect.signature(cumem.unmap_and_release).parameters} == {"allocation_handle"}
    copy = inspect.signature(CudaRTLibrary.cudaMemcpy)
    assert [*copy.parameters] == ["self", "dst", "src", "count"]
    assert [*inspect.signature(cumem.CuMemAllocator.wake_up).parameters] == ["self", "tags"]
    assert KV_TAG in DEFERRABLE_TAGS
    assert f'tag="{KV_TAG}"' in inspect.getsource(Worker)
    assert "sleeping_tags" in inspect.getsource(abstract.Executor.wake_up)
    assert "method" in inspect.signature(EngineCore.collective_rpc).parameters
    assert ModelConfig.sleep_mode_backend == "cumem"
