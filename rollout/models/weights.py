"""Copying named tensors into the weights of a model. Every mismatch is an error that names it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from rollout.errors import ModelError
from rollout.layers.weight_slot import WeightSlot
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.models.spec import DTYPES

# Older checkpoints and modules store this table, which the model computes from its config.
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"


def is_computed(name: str) -> bool:
    """Whether the model computes the tensor `name` itself, so that a stored one is ignored."""
    return name.endswith(_COMPUTED_SUFFIX)


class NamedTensors(Protocol):
    """Tensors by name, which may be read one by one: a dict, or a Checkpoint."""

    def keys(self) -> Collection[str]: ...

    def items(self) -> Iterable[tuple[str, Tensor]]: ...


@torch.no_grad()
def copy_weights(slots: Mapping[str, WeightSlot], tensors: NamedTensors, origin: str) -> None:
    """Fill `slots` from `tensors`, casting floating dtypes.

    Tied weights may come under either name, or equal under both. `origin` names the source
    in errors. Sharded tensors are gathered when their turn comes, which is a collective. Raises
    ModelError for missing, unknown, misshaped or quantized tensors and for tied ones that differ;
    `slots` may then be partly written.
    """
    _check_names(slots, tensors.keys(), origin)
    written: dict[int, str] = {}
    for name, tensor in tensors.items():
        if is_computed(name):
            continue
        slot = slots[name]
        _check_tensor(name, tensor, slot, origin)
        tensor = full_tensor(tensor)
        tied_name = written.setdefault(slot.address, name)
        if tied_name == name:
            slot.write(tensor)
        elif not torch.equal(values := slot.read(), tensor.to(values)):
            raise ModelError(
                f"{name!r} and {tied_name!r} differ in {origin}, but its config ties them; "
                "set tie_word_embeddings to false"
            )


def _check_names(slots: Mapping[str, WeightSlot], names: Collection[str], origin: str) -> None:
    given = {name for name in names if not is_computed(name)}
    if extra := sorted(given - slots.keys()):
        raise ModelError(
            f"{origin} has {_listing(extra)} which the model lacks; does its config belong to it?"
        )
    filled = {slots[name].address for name in given}
    missing = [name for name, slot in slots.items() if slot.address not in filled]
    if missing:
        raise ModelError(f"{origin} lacks {_listing(missing)}; save the whole model again")


def _check_tensor(name: str, tensor: Tensor, slot: WeightSlot, origin: str) -> None:
    if reason := refusal(tensor):
        raise ModelError(f"{name!r} in {origin} {reason}")
    if tensor.shape != slot.shape:
        raise ModelError(
            f"{name!r} in {origin} has shape {list(tensor.shape)}, but the config gives "
            f"{list(slot.shape)}; does its config belong to it?"
        )
    if tensor.dtype not in (*DTYPES.values(), torch.float64):
        raise ModelError(
            f"{name!r} in {origin} has dtype {tensor.dtype}; save it as one of {', '.join(DTYPES)}"
        )


def _listing(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > 3 else ''})"
