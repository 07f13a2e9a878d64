"""Merging of a LoraAdapter into plain weights: base + scale * (B @ A), in float32, cast once.

Used by ServedWeights while it stages an adapter, by `rollout_vllm.adapters`, and by
`trainer_hooks.weight_sync.sources` for trainers that push merged tensors. Changes no tensor that it
is given. Shape letters: R rank, N out features, K in features of a layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.layers.shard import Cut
from rollout.layers.weight_slot import WeightSlot
from rollout.models.causal_lm import CausalLM
from rollout.models.plain_tensors import full_tensor
from rollout.models.weights import WeightTable
from rollout.weights.fingerprints import kept_parts
from rollout.weights.lora import LoraPair
from rollout.weights.update import StagingMemory

_SUMMED_AT_ONCE = 1 << 16  # values, which fit into a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeights:
    """A rank's parts of weights with a merged adapter. Empty for updates without an adapter.

    `tensors` has new values by weight name. `bases` has the adapted weights without the adapter, on
    the host. `follows_served` says whether the adapter was merged into the served weights. If so,
    weights that are not in `tensors` keep their values.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    bases: Mapping[str, Tensor] = field(default_factory=dict)
    follows_served: bool = False


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors on the host, by name. Sharded tensors are gathered in the order of
    names, a collective of all ranks."""
    whole = {name: full_tensor(tensors[name]) for name in sorted(tensors)}
    return {name: tensor.detach().cpu() for name, tensor in whole.items()}


def check_targets(pairs: Mapping[str, LoraPair], model: CausalLM) -> None:
    """Raise WeightUpdateError unless an adapter fits `model`. Each adapted module must be a linear
    layer of the model, with a weight that is not tied, and with the sizes of A and B."""
    slots, linear = model.weight_slots(), model.linear_modules()
    num_users = Counter(slot.address for slot in slots.values())
    for module, pair in pairs.items():
        name = f"{module}.weight"
        if module not in linear or name not in slots:
            kind = "expert weights" if ".experts" in module else "no linear layer of this model"
            raise WeightUpdateError(
                f"{pair.names[0]!r} adapts {module!r}, which is {kind}; leave it out of "
                "target_modules, or merge the adapter in the trainer and push all weights"
            )
        if num_users[slots[name].address] > 1:
            raise WeightUpdateError(
                f"{pair.names[0]!r} adapts {name!r}, which is tied to another layer; leave it out "
                "of target_modules, or set tie_word_embeddings to false"
            )
        check_fit(pair, slots[name].shape)


def check_fit(pair: LoraPair, shape: Sequence[int]) -> None:
    """Raise WeightUpdateError unless B @ A has the shape of the adapted weight."""
    num_outputs, num_inputs = shape
    for name, given, size, what in (
        (pair.names[0], pair.a_RK.shape[1], num_inputs, "in"),
        (pair.names[1], pair.b_NR.shape[0], num_outputs, "out"),
    ):
        if given != size:
            raise WeightUpdateError(
                f"{name!r} has {given} {what} features, but the model's layer has {size}"
            )


def adapt_served(
    pairs: Mapping[str, LoraPair],
    slots: Mapping[str, WeightSlot],
    bases: Mapping[str, Tensor],
    check: Callable[[], None],
    memory: StagingMemory,
) -> AdaptedWeights:
    """Return new values of the weights that the served or the new adapter changes.

    `pairs` is the new adapter. `bases` has the weights that the served adapter changes, without
    that adapter. Weights that only the served adapter changes return to their `bases`.
    `check` is called before each weight, and can raise to cancel. The merged weights are kept in
    `memory`.
    """
    tensors: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    merger = Merger(pairs.values())
    for name, slot in slots.items():
        check()
        base = bases.get(name)
        pair = pairs.get(name.removesuffix(".weight"))
        if pair is not None:
            kept[name] = slot.read().to("cpu", copy=True) if base is None else base
            tensors[name] = memory.keep(
                name, merger.merged(kept[name], pair, slot.cut), is_new=True
            )
        elif base is not None:
            tensors[name] = base
    return AdaptedWeights(tensors=tensors, bases=kept, follows_served=True)


def adapt_given(
    pairs: Mapping[str, LoraPair],
    table: WeightTable,
    source: Mapping[str, Tensor],
    check: Callable[[], None],
    memory: StagingMemory,
) -> AdaptedWeights:
    """Return this rank's parts of all weights in `source`, with the adapter `pairs` merged in.
    Adapted weights have the model's dtypes. `check` is called before each adapted weight, and can
    raise to cancel. The merged weights are kept in `memory`."""
    tensors = {each.weight: kept for each, kept in kept_parts(source, table, memory).items()}
    bases: dict[str, Tensor] = {}
    merger = Merger(pairs.values())
    for module, pair in pairs.items():
        check()
        name = f"{module}.weight"
        slot = table.slots[name]
        bases[name] = tensors[name].detach().to("cpu", slot.dtype, copy=True)
        tensors[name] = memory.keep(name, merger.merged(bases[name], pair, slot.cut), is_new=True)
    return AdaptedWeights(tensors=tensors, bases=bases)


class Merger:
    """Merges A and B into weights, one layer after the other. All products share one buffer."""

    def __init__(self, pairs: Iterable[LoraPair]) -> None:
        # New memory for each product would cost a page fault per 4 KiB, more than the sums.
        sizes = [pair.b_NR.shape[0] * pair.a_RK.shape[1] for pair in pairs]
        self._scratch = torch.empty(max(sizes), dtype=torch.float32)

    @torch.no_grad()
    def merged(self, base_NK: Tensor, pair: LoraPair, cut: Cut | None) -> Tensor:
        """Return base + scale * (B @ A), summed in float32 on the host, in the base's dtype.
        `base_NK` and the result are the part of the [N, K] weight that `cut` keeps, or the whole
        weight if `cut` is None."""
        shape = pair.b_NR.shape[0], pair.a_RK.shape[1]
        change_NK = self._scratch[: math.prod(shape)].view(shape)
        # One product for the whole layer: products of parts might sum in another order.
        torch.mm(pair.b_NR.float(), pair.a_RK.float(), out=change_NK)
        if cut is not None:
            change_NK = cut.of(change_NK)
        num_rows, num_columns = base_NK.shape
        merged_NK = torch.empty_like(base_NK)
        rows_at_once = max(1, _SUMMED_AT_ONCE // num_columns)
        for start in range(0, num_rows, rows_at_once):
            rows = slice(start, start + rows_at_once)
            sum_NK = change_NK[rows].mul_(pair.scale).add_(base_NK[rows].float())
            merged_NK[rows].copy_(sum_NK)
        return merged_NK
