"""References in plain torch for the Triton kernels `append_kv` and `copy_tokens`."""

from __future__ import annotations

from torch import Tensor

from rollout.backends.buffers import Strips
from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from rollout.backends.forward_batch import Rotation


def append_kv_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    rotation: Rotation | None = None,
) -> Tensor:
    """Norm and rotate heads, store K and V in the cache, and return Q, as `append_kv`."""
    q_THD, k_TGD = TorchSdpaAttention().rotate(q_THD, k_TGD, rotation)
    blocks_T, offsets_T = slots_T // cache.shape[3], slots_T % cache.shape[3]
    cache[blocks_T, 0, :, offsets_T] = k_TGD
    cache[blocks_T, 1, :, offsets_T] = v_TGD
    return q_THD.contiguous()


def copy_tokens_reference(
    pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
) -> None:
    """Copy tokens of blocks, as `copy_tokens`."""
    pool_BSTD = pool_BN.view(-1, strips.num_strips, strips.num_tokens, strips.bytes_per_token)
    for source, target, length in zip(source_K, target_K, length_K, strict=True):
        pool_BSTD[target, :, :length] = pool_BSTD[source, :, :length]
