"""Makes the WeightTable of a model: its weights' slots by all names of the weights.

A weight has a name in saved directories, and one in live modules (transformers models in memory).
Used by `rollout.models.causal_lm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from rollout.layers.base import BackendLayer
from rollout.layers.experts import Experts
from rollout.layers.linear import Linear
from rollout.layers.weight_slot import WHOLE, TensorSlot, WeightAlias, WeightSlot, slot_of
from rollout.models.decoder import Embedding
from rollout.models.weights import WeightTable


def table_of(
    model: nn.Module,
    buffers: Mapping[str, Tensor],
    saved_name: Callable[[str], str],
    unserved: tuple[str, ...],
) -> WeightTable:
    """Return the table of the weights of `model`, whose module paths give the live names. `buffers`
    has the persistent buffers by live name. `saved_name` turns a live name into the name in saved
    directories. `unserved` is a field of WeightTable."""
    slots: dict[str, WeightSlot] = {}
    aliases: dict[str, WeightAlias] = {}

    def add(live: str, slot: WeightSlot) -> None:
        saved = saved_name(live)
        slots[saved] = slot
        if saved != live:
            aliases[live] = WeightAlias(shape=slot.shape, parts={saved: WHOLE})

    for path, module in model.named_modules():
        if isinstance(module, Experts):
            named, stacks = module.slots_and_aliases()
            saved_names = {name: saved_name(f"{path}.{name}") for name in named}
            # Live modules have no names for single experts, so single experts get no aliases.
            slots |= {saved_names[name]: slot for name, slot in named.items()}
            for stack, alias in stacks.items():
                parts = {saved_names[name]: index for name, index in alias.parts.items()}
                aliases[f"{path}.{stack}"] = WeightAlias(shape=alias.shape, parts=parts)
        else:
            # A linear layer may hold several weights, named beside the layer and not below it.
            parent = path.rpartition(".")[0] if isinstance(module, Linear) else path
            for name, slot in _own_slots(module).items():
                add(f"{parent}.{name}" if parent else name, slot)
    for name, buffer in buffers.items():
        add(name, TensorSlot(buffer))
    return WeightTable(
        slots=slots,
        aliases=aliases,
        buffers=frozenset({*buffers, *map(saved_name, buffers)}),
        unserved=unserved,
    )


def _own_slots(module: nn.Module) -> dict[str, WeightSlot]:
    if isinstance(module, Linear | Embedding):
        kept = module.weight_slots()
    else:
        parameters = module.named_parameters(recurse=False)
        kept = {name: TensorSlot(parameter) for name, parameter in parameters}
    cuts = module.cuts if isinstance(module, BackendLayer) else {}
    return {name: slot_of(slot, cuts.get(name)) for name, slot in kept.items()}
