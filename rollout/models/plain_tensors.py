"""Plain tensors of a trainer's weights: shards are gathered, and tensors without readable values
are refused.

Compiled code gets the addresses of tensors, and sees no difference between values and a tensor that
only stands for them. So every tensor of a trainer passes here before its address is taken.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_EXTRA_STATE = "_extra_state"  # what a module's get_extra_state returns, under this name
# How torch.compile, FSDP1 and activation checkpointing call the module that they wrap.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ROOT = "module"  # so do DDP and DeepSpeed, which wrap whole models only


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the prefixes of a trainer's wrappers."""
    parts = [part for part in name.split(".") if part not in _WRAPPED]
    while parts and parts[0] == _ROOT:
        del parts[0]
    return ".".join(parts)


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers in the order of `state_dict`, under their plain
    names.

    Tied ones come once.
    """
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not name.endswith(_EXTRA_STATE):
            weights.setdefault(id(tensor), (plain_name(name), tensor))
    return dict(weights.values())


def is_sharded(tensor: object) -> bool:
    """Return whether ranks hold parts of `tensor`: a DTensor, as FSDP2 and tensor parallelism make
    it."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor")


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return `tensor` as a plain one: a view of its own memory, or gathered from all ranks of its
    mesh.

    Gathering is a collective: all ranks call this for the same tensors in the same order. Raises
    TypeError if the gathered tensor is not plain.
    """
    if not is_sharded(tensor):
        # The memory does not contain a negation that torch has put off.
        tensor = tensor.resolve_neg()
        if _is_plain_subclass(tensor):
            # Some operations of torch cannot reach its storage ("OpaqueTensorImpl").
            return tensor.detach().as_subclass(Tensor)
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    if reason := refusal(whole):
        raise TypeError(f"the whole of it {reason}")
    return whole


class GatherBuffer:
    """Memory through which sharded tensors become whole, one after the other.

    A tensor is valid until the next one is gathered. Memory of its own for each tensor would be
    cleared page by page by the system, and freed late by threads of the process group.
    """

    def __init__(self) -> None:
        self._bytes_N: Tensor | None = None

    @torch.no_grad()
    def whole(self, tensor: Tensor) -> Tensor:
        """Return the result of `full_tensor(tensor)`, with the same errors. A collective if it is
        sharded."""
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
            held = self._bytes_N = None  # before the larger one is there
            held = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
            self._bytes_N = held
        return held[:num_bytes].view(like.dtype).view(shape)


def _is_cut_into_rows(tensor: Any) -> bool:
    """Return whether `tensor` is cut along dimension 0 over one group of ranks, as FSDP2 does."""
    kinds = [(type(placement).__name__, placement.is_shard(0)) for placement in tensor.placements]
    return kinds == [("Shard", True)]


def _is_plain_subclass(tensor: Tensor) -> bool:
    """Return whether the type of `tensor` is a Python subclass that leaves torch's operations
    alone."""
    added = [base for base in type(tensor).__mro__ if base not in Tensor.__mro__]
    return bool(added) and not any("__torch_function__" in vars(base) for base in added)


def refusal(tensor: object) -> str | None:
    """Return why the values of `tensor` cannot be read, None if they can.

    The reason is the rest of a sentence that begins with the tensor's name.
    """
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}; send a torch.Tensor"
    if nn.parameter.is_lazy(tensor):
        return "is not initialized yet; run the module once"
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        return f"has layout {layout}; send it dense: to_dense() or its equal"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}); send dequantize() of it"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if is_sharded(tensor):
        return None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}, which is no plain tensor; send it as a torch.Tensor"
    if tensor.numel() and not tensor.data_ptr():
        return "has no values: its memory was freed"
    return None
