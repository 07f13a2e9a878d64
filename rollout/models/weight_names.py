"""The names of a model's weights: those of saved directories, and those of live modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from rollout.layers.experts import Experts
from rollout.layers.linear import Linear
from rollout.layers.weight_slot import WHOLE, TensorSlot, WeightAlias, WeightSlot
from rollout.models.decoder import Embedding
from rollout.models.weights import WeightTable


def table_of(
    model: nn.Module,
    buffers: Mapping[str, Tensor],
    saved_name: Callable[[str], str],
    unserved: tuple[str, ...],
) -> WeightTable:
    """Return the table of the weights of `model`, whose paths of modules are those of live ones.

    `buffers`: the persistent ones by their live names. `saved_name` turns a live name into that of
    the family's directories. `unserved` is the table's.
    """
    slots: dict[str, WeightSlot] = {}
    aliases: dict[str, WeightAlias] = {}
    live: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            named, stacks = module.slots_and_aliases()
            saved_names = {name: saved_name(f"{path}.{name}") for name in named}
            # Per expert no live module has names, so these are no aliases of renamed ones.
            slots |= {saved_names[name]: slot for name, slot in named.items()}
            for stack, alias in stacks.items():
                parts = {saved_names[name]: index for name, index in alias.parts.items()}
                aliases[f"{path}.{stack}"] = WeightAlias(shape=alias.shape, parts=parts)
        else:
            # A linear layer is of several weights, whose names are beside its own.
            parent = path.rpartition(".")[0] if isinstance(module, Linear) else path
            prefix = f"{parent}." if parent else ""
            live |= {prefix + name: slot for name, slot in _own_slots(module).items()}
    live |= {name: TensorSlot(buffer) for name, buffer in buffers.items()}
    for name, slot in live.items():
        slots[saved_name(name)] = slot
        if saved_name(name) != name:
            aliases[name] = WeightAlias(shape=slot.shape, parts={saved_name(name): WHOLE})
    return WeightTable(
        slots=slots,
        aliases=aliases,
        buffers=frozenset({*buffers, *map(saved_name, buffers)}),
        unserved=unserved,
    )


def _own_slots(module: nn.Module) -> dict[str, WeightSlot]:
    if isinstance(module, Linear | Embedding):
        return module.weight_slots()
    return {n: TensorSlot(parameter) for n, parameter in module.named_parameters(recurse=False)}
