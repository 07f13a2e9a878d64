"""StagedWeights: a verified update that waits for its commit, and what it takes to go back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.buffers import HostArena
from rollout.models.causal_lm import CausalLM
from rollout.runner.weight_shares import WeightShare

_ALIGNMENT = 64  # bytes, of each weight's place


class WeightBackup:
    """A copy of the weights that serve now, from which they are restored if replacing them fails.

    It copies only what no packed copy holds: less than all weights where the backend packs them. A
    weight that is packed in its own memory leaves its old values in what was staged for it.
    """

    @torch.no_grad()
    def __init__(self, model: CausalLM, arena: HostArena | None = None) -> None:
        """`arena`: where the copy lies, which belongs to it as long as it lives; None: beside the
        weights. Raises ConfigError if the memory is not to be had."""
        self._layers = list(model.linear_layers().values())
        packed = {
            layer.weight.data_ptr()
            for layer in self._layers
            if layer.packed is not None or layer.repacked is not None
        }
        weights = [
            weight
            for weight in (*model.parameters(), *model.persistent_buffers().values())
            if weight.data_ptr() not in packed
        ]
        if arena is None:
            copies = [weight.detach().clone() for weight in weights]
        else:
            copies = _copied_to(arena, weights)
        self._plain = list(zip(weights, copies, strict=True))
        self._packed: list[tuple[Any, Any]] = []

    def keep_packed(self, staged: Sequence[Any]) -> None:
        """Keep the packed copies that serve now, which `staged` is about to replace."""
        served = [layer.packed for layer in self._layers]
        self._packed = list(zip(served, staged, strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Write all weights back, and their packed copies."""
        for weight, values in self._plain:
            weight.detach().copy_(values)
        for layer, (packed, staged) in zip(self._layers, self._packed, strict=True):
            layer.restore(packed, staged)


def _copied_to(arena: HostArena, weights: Sequence[Tensor]) -> list[Tensor]:
    """Copy weights to the host, one after the other."""
    ends = list(accumulate(-(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT for weight in weights))
    buffer = arena.reserve(ends[-1])
    copies = []
    for weight, start in zip(weights, [0, *ends], strict=False):
        place = buffer[start : start + weight.nbytes]
        copies.append(place.view(weight.dtype).view(weight.shape).copy_(weight.detach()))
    return copies


class BackupKeeper:
    """Makes the backups of one model's weights: on the host, where a device has the weights.

    Those of the same weights are one there, for a host has room for one more copy, not for several;
    its memory, page-locked once, is used again when nobody has the backup any more.
    """

    def __init__(self, model: CausalLM, backend: Backend) -> None:
        self._model, self._create_arena = model, backend.create_host_arena
        self._arena = None if backend.device.type == "cpu" else backend.create_host_arena()
        self._num_writes = 0
        self._latest: Callable[[], WeightBackup | None] = lambda: None

    def backup(self, num_writes: int) -> WeightBackup:
        """Return a backup of the weights that serve now, after so many writes."""
        if self._arena is None:
            return WeightBackup(self._model)
        latest = self._latest()
        if latest is not None and self._num_writes == num_writes:
            return latest
        if latest is not None:  # the memory is in use
            self._arena = self._create_arena()
        made = WeightBackup(self._model, self._arena)
        self._latest, self._num_writes = weakref.ref(made), num_writes
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What served before a commit, the `num_writes`-th, and after the `num_writes_before`-th."""

    num_writes: int
    num_writes_before: int
    backup: WeightBackup
    version: int
    had_values: bool
    bases: Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True)
class StagedWeights:
    """A verified update, which can be committed once. Only ServedWeights changes it.

    `tensors` are the source tensors that a commit copies, tied ones once; the others are there as
    `packed`, what the backend packed for each linear layer. `backup` holds the weights that were
    served after `num_writes` writes. `num_bytes` is the size of the weights that change: all, but
    under an adapter. `bases` has what adapted weights are without it. `follows_served`: it is an
    adapter on the weights that were served. `started_at` is when staging began, on the clock of
    time.perf_counter; `seconds` is how long it took. `share`: this rank's of its fingerprints;
    `checksum` is "" until it is accepted with those of all ranks. `is_spent`: a commit has begun
    and was not undone. `replaced`: what the commit has replaced. `elsewhere`: what the other
    ranks have staged, which ends with this.
    """

    tensors: Mapping[str, Tensor]
    packed: Sequence[Any]
    backup: WeightBackup
    num_writes: int
    num_bytes: int
    bases: Mapping[str, Tensor]
    follows_served: bool
    share: WeightShare
    is_spent: bool = False
    replaced: Replaced | None = None
    elsewhere: Any = None
    checksum: str
    started_at: float
    seconds: float
