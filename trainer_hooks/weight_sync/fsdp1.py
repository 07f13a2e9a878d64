"""Reads the weights of a model under FSDP1 (FullyShardedDataParallel), one unit at a time.

Used by `trainer_hooks.weight_sync.sources`. Reading gathers units and changes no weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rollout.models.plain_tensors import plain_name

_WRAPPED = "_fsdp_wrapped_module"


def has_units(module: nn.Module) -> bool:
    """Return whether `module` or a part of it is wrapped by FullyShardedDataParallel."""
    return any(map(_is_unit, module.modules()))


def unit_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters and persistent buffers under their plain names, unit by unit.

    A unit is whole in memory while its tensors are read. Gathering it is a collective of its ranks.
    """
    yield from _tensors_outside_units(module, "")
    for path, unit in module.named_modules():
        if _is_unit(unit):
            prefix = f"{path}." if path else ""
            kind: Any = type(unit)  # importing FSDP's module would take seconds
            with kind.summon_full_params(unit, recurse=False, writeback=False):
                yield from _tensors_outside_units(getattr(unit, _WRAPPED), prefix)


def _tensors_outside_units(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if _is_unit(module):
        return
    found: set[int] = set()  # tied tensors come once
    for path, part in _parts_outside_units(module, prefix):
        persistent = {n: b for n, b in part._buffers.items() if n not in _transient(part)}
        for name, tensor in (*part._parameters.items(), *persistent.items()):
            if tensor is not None and id(tensor) not in found:
                found.add(id(tensor))
                yield plain_name(f"{path}{name}"), _readable(tensor.detach())


def _readable(tensor: Tensor) -> Tensor:
    # FSDP1 frees the tensor afterwards, which fails while a NumPy array shares its memory.
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def _parts_outside_units(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module.named_children():
        if not _is_unit(child):
            yield from _parts_outside_units(child, f"{prefix}{name}.")


def _transient(module: nn.Module) -> set[str]:
    return module._non_persistent_buffers_set


def _is_unit(module: nn.Module) -> bool:
    return _WRAPPED in module._modules
