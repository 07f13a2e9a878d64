"""Runs in vLLM's workers: copies the KV cache to the host and returns its memory.

vLLM's own sleep discards the KV cache. Here the allocations of the tag "kv_cache" are backed up as
its sleep backs up the weights, so that its wake_up restores both. Used by
`rollout_vllm.suspension`, on CUDA, by collective_rpc. Source: the interface of vLLM 0.32's
CuMemAllocator; it has not run on a device.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

KV_TAG = "kv_cache"  # vLLM's tag of the KV cache's allocations


def offload_kv_cache(worker: Any) -> int:
    """Copy the KV cache of this worker to the host and release its memory. Returns the bytes
    released. The addresses stay reserved, so block tables and graphs stay valid."""
    from vllm.device_allocator import cumem
    from vllm.utils.torch_utils import PIN_MEMORY

    torch.accelerator.synchronize()  # no step may still write
    released = 0
    for address, allocation in cumem.CuMemAllocator.get_instance().pointer_to_data.items():
        if allocation.tag != KV_TAG or allocation.is_asleep:
            continue
        num_bytes = allocation.handle[1]
        copy = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=PIN_MEMORY)
        cumem.libcudart.cudaMemcpy(copy.data_ptr(), address, num_bytes)
        allocation.cpu_backup_tensor = copy
        try:
            cumem.unmap_and_release(allocation.handle)
        finally:
            allocation.is_asleep = True
        released += num_bytes
    gc.collect()
    torch.accelerator.empty_cache()
    return released
