"""Plain tensors from a trainer's weights: gathers sharded tensors, refuses unreadable ones.

Compiled code gets the addresses of tensors and cannot see that a tensor has no values of its own.
So a trainer's tensors pass through here first. Used by `rollout.models.weights` and
`rollout.models.checkpoints.loading`, by `rollout.weights` for updates and adapters, by
`rollout_vllm.executor`, and by the modules of `trainer_hooks.update` and
`trainer_hooks.weight_sync`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_EXTRA_STATE = "_extra_state"  # state_dict's name for what get_extra_state returns
# The names that torch.compile, FSDP1 and activation checkpointing give to a wrapped module.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ROOT = "module"  # the name that DDP and DeepSpeed give to a wrapped model


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the parts that trainers' wrappers add, such
    as "_orig_mod"."""
    parts = [part for part in name.split(".") if part not in _WRAPPED]
    while parts and parts[0] == _ROOT:
        del parts[0]
    return ".".join(parts)


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by plain name, in the order of `state_dict`. A
    tied tensor comes once, under its first name."""
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not name.endswith(_EXTRA_STATE):
            weights.setdefault(id(tensor), (plain_name(name), tensor))
    return dict(weights.values())


def is_sharded(tensor: object) -> bool:
    """Return whether `tensor` is a DTensor (FSDP2), which has only a part of the values on each
    rank."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor")


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the values of `tensor` as a plain tensor.

    A sharded tensor is gathered. That is a collective: all ranks of its mesh call this for the same
    tensors in the same order. Otherwise the result shares the memory of `tensor`, unless `tensor`
    is a lazy negation, which is computed into a copy. Raises TypeError if a gathered tensor is not
    plain.
    """
    if not is_sharded(tensor):
        tensor = tensor.resolve_neg()  # a pending negation is not yet in the memory
        if _is_plain_subclass(tensor):
            # Some torch operations cannot reach a subclass's storage ("OpaqueTensorImpl").
            return tensor.detach().as_subclass(Tensor)
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    if reason := refusal(whole):
        raise TypeError(f"the gathered tensor {reason}")
    return whole


class GatherBuffer:
    """A reused buffer into which sharded tensors are gathered, one after the other. A gathered
    tensor is valid until the next one is gathered."""

    def __init__(self) -> None:
        # With new memory for each tensor the system would clear every page, and threads of the
        # process group would free it late.
        self._bytes_N: Tensor | None = None

    @torch.no_grad()
    def whole(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as `full_tensor` does, with the same errors. A collective if `tensor` is
        sharded. Tensors that FSDP2 sharded by rows are gathered into the buffer."""
        if not is_sharded(tensor) or not _is_cut_into_rows(tensor):
            return full_tensor(tensor)
        sharded: Any = tensor
        # The group gathers on its own device, from which shards may be offloaded.
        shard = sharded.to_local().to(sharded.device_mesh.device_type)
        if type(shard) is not Tensor:
            return full_tensor(tensor)
        gathered = self._view(tuple(sharded.shape), shard)
        group = sharded.device_mesh.get_group()
        # Broadcasts write in place, where an all-gather of gloo takes the same memory once more.
        for rank, rows in enumerate(gathered.chunk(sharded.device_mesh.size())):
            if rank == sharded.device_mesh.get_local_rank():
                rows.copy_(shard)
            dist.broadcast(rows, dist.get_global_rank(group, rank), group)
        return gathered

    def _view(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        num_bytes = math.prod(shape) * like.itemsize
        held = self._bytes_N
        if held is None or held.numel() < num_bytes or held.device != like.device:
            held = self._bytes_N = None  # frees it before the larger one is allocated
            held = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
            self._bytes_N = held
        return held[:num_bytes].view(like.dtype).view(shape)


def _is_cut_into_rows(tensor: Any) -> bool:
    """Return whether one group of ranks shards `tensor` along dimension 0, as FSDP2 does."""
    kinds = [(type(placement).__name__, placement.is_shard(0)) for placement in tensor.placements]
    return kinds == [("Shard", True)]


def _is_plain_subclass(tensor: Tensor) -> bool:
    """Return whether the type of `tensor` is a subclass without a `__torch_function__`."""
    added = [base for base in type(tensor).__mro__ if base not in Tensor.__mro__]
    return bool(added) and not any("__torch_function__" in vars(base) for base in added)


def refusal(tensor: object) -> str | None:
    """Return why the values of `tensor` cannot be read; None if they can be read. The text
    continues a sentence that begins with the tensor's name."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}; send a torch.Tensor"
    if nn.parameter.is_lazy(tensor):
        return "is not initialized yet; run the module once"
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        return f"has layout {layout}; send a dense tensor, such as its to_dense()"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}); send its dequantize()"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if is_sharded(tensor):
        return None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}, not a plain tensor; send it as a torch.Tensor"
    if tensor.numel() and not tensor.data_ptr():
        return "has no values: its memory was freed"
    return None
