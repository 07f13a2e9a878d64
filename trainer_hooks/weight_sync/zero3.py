"""Reads weights that DeepSpeed has partitioned (ZeRO stage 3), one parameter at a time.

Used by `trainer_hooks.weight_sync.sources`. Reading changes no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


def is_partitioned(tensor: Tensor) -> bool:
    """Return whether `tensor` is a ZeRO-3 parameter, which is empty between two passes."""
    return hasattr(tensor, "ds_id")


def gathered_partitions(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in the order of names. DeepSpeed frees each tensor before the next.

    Gathering is a collective of all ranks. Tensors that are not partitioned are yielded unchanged.
    """
    import deepspeed

    for name in sorted(weights):
        tensor = weights[name]
        if is_partitioned(tensor):
            with deepspeed.zero.GatheredParameters([tensor]):  # read only: nothing is written back
                yield name, tensor.data
        else:
            yield name, tensor.detach()
