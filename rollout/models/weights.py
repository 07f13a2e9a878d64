"""WeightTable: the weights of a model by name; `copy_weights` copies named tensors into them.

`rollout.models.weight_names` makes the table for CausalLM. The modules of `rollout.weights` and
`rollout.serve.control.announcement` read it. `rollout.models.checkpoints.loading` calls
`copy_weights`, which writes the model's weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.errors import ModelError
from rollout.layers.weight_slot import WHOLE, Index, WeightAlias, WeightSlot, kept_of, part_of
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.models.spec import DTYPES

# Older checkpoints store this rotary table, which the model computes from its config.
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"


def is_computed(name: str) -> bool:
    """Return whether the model computes the tensor `name` itself and ignores a stored one."""
    return name.endswith(_COMPUTED_SUFFIX)


class TensorsByName(Protocol):
    """Tensors by name: a dict, or a Checkpoint or Dequantized, which read tensors one by one."""

    def keys(self) -> Collection[str]: ...

    def items(self) -> Iterable[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """The weights of a model, by the names that checkpoints and live modules give them.

    `slots` has each weight's slot by its name in a checkpoint. Tied weights have a slot under each
    of their names, with equal addresses. `aliases` has the names in live modules that differ from
    the checkpoint's names. A stack of experts has one alias for many weights. `buffers` has the
    checkpoint's and live names of persistent buffers, which `named_parameters` omits. `unserved`
    has name prefixes of tensors that checkpoints hold and the model does not use.
    """

    slots: Mapping[str, WeightSlot]
    aliases: Mapping[str, WeightAlias]
    buffers: frozenset[str]
    unserved: tuple[str, ...]

    def is_passed_over(self, name: str) -> bool:
        """Return whether a tensor `name` is ignored, because the model computes it or does not use
        it."""
        return name.endswith(_COMPUTED_SUFFIX) or name.startswith(self.unserved)

    def addresses(self) -> dict[str, int]:
        """Return the current address of each weight. Tied weights have equal addresses."""
        return {name: slot.address for name, slot in self.slots.items()}

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape that a tensor must have, by each name in `slots` and `aliases`."""
        shapes = {name: slot.shape for name, slot in self.slots.items()}
        return shapes | {name: alias.shape for name, alias in self.aliases.items()}

    def parts(self, name: str) -> Mapping[str, Index]:
        """Return which weights a tensor of this name has: by weight, its index into the tensor.
        Raises KeyError for an unknown name."""
        return {name: WHOLE} if name in self.slots else self.aliases[name].parts

    def form(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the model's shape and dtype for a name in `slots` or `aliases`. Raises KeyError
        for any other name."""
        if (slot := self.slots.get(name)) is not None:
            return slot.shape, slot.dtype
        alias = self.aliases[name]
        return alias.shape, self.slots[next(iter(alias.parts))].dtype

    def unknown(self, names: Collection[str]) -> list[str]:
        """Return the members of `names` that are in neither `slots` nor `aliases`, sorted."""
        return sorted(name for name in names if name not in self.slots and name not in self.aliases)

    def missing(self, names: Collection[str]) -> list[str]:
        """Return the names of the weights that tensors of these names do not cover. If `names` has
        an alias, the result has live names where all weights of an alias are missing. Raises
        KeyError for an unknown name."""
        addresses = self.addresses()
        given = {addresses[name] for name in names if name in addresses}
        for name in names:
            if name not in addresses:
                given |= {addresses[part] for part in self.aliases[name].parts}
        missing = [name for name, address in addresses.items() if address not in given]
        if missing and not self.aliases.keys().isdisjoint(names):
            lacking = set(missing)
            for name, alias in self.aliases.items():
                if lacking.issuperset(alias.parts):
                    missing = [name, *(n for n in missing if n not in alias.parts)]
        return missing


@torch.no_grad()
def copy_weights(table: WeightTable, tensors: TensorsByName, origin: str) -> None:
    """Write `tensors` to the slots of `table`, cast to the weights' dtypes.

    A tied weight can come under one of its names, or under several with equal values. `origin`
    names the source in errors. Sharded tensors are gathered one by one, in the order of `tensors`,
    a collective of all ranks. Raises ModelError for missing, unknown or misshaped tensors, for
    dtypes other than DTYPES and float64, for tensors without readable values, and for different
    values of one weight. After an error some slots are already written.
    """
    _check_names(table, tensors.keys(), origin)
    written: dict[int, str] = {}
    for name, tensor in tensors.items():
        if table.is_passed_over(name):
            continue
        _check_tensor(name, tensor, table, origin)
        tensor = full_tensor(tensor)
        for weight, index in table.parts(name).items():
            slot = table.slots[weight]
            values = kept_of(slot, part_of(tensor, index))
            first_name = written.setdefault(slot.address, name)
            if first_name == name:
                slot.write(values)
            elif not torch.equal(held := slot.read(), values.to(held)):
                raise ModelError(_difference(name, first_name, table, origin))


def _difference(name: str, first_name: str, table: WeightTable, origin: str) -> str:
    if table.parts(name).keys().isdisjoint(table.parts(first_name)):
        return (
            f"{name!r} and {first_name!r} differ in {origin}, but its config ties them; "
            "set tie_word_embeddings to false"
        )
    return f"{name!r} and {first_name!r} hold the same weights and differ in {origin}; keep one"


def _check_names(table: WeightTable, names: Collection[str], origin: str) -> None:
    given = {name for name in names if not table.is_passed_over(name)}
    if extra := table.unknown(given):
        raise ModelError(
            f"{origin} has {_listing(extra)} which the model lacks; check that config and weights "
            "belong together"
        )
    if missing := table.missing(given):
        raise ModelError(f"{origin} lacks {_listing(missing)}; save the whole model again")


def _check_tensor(name: str, tensor: Tensor, table: WeightTable, origin: str) -> None:
    if reason := refusal(tensor):
        raise ModelError(f"{name!r} in {origin} {reason}")
    shape, _ = table.form(name)
    if tensor.shape != shape:
        raise ModelError(
            f"{name!r} in {origin} has shape {list(tensor.shape)}, but the config gives "
            f"{list(shape)}; check that config and weights belong together"
        )
    if tensor.dtype not in (*DTYPES.values(), torch.float64):
        raise ModelError(
            f"{name!r} in {origin} has dtype {tensor.dtype}; save it as one of {', '.join(DTYPES)}"
        )


def _listing(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > 3 else ''})"
