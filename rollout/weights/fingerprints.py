"""Fingerprints of weights: hashes of their values, from which checksums are made.

The fingerprints of a tensor's parts add up to the tensor's fingerprint. So each rank of an engine
hashes the parts that it keeps, and the sums equal those of a process with the whole model. Used by
ServedWeights to verify an update, and by weight transports to check the tensors that arrive. It
only reads tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.backends.base import Ops
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.ops.fingerprint import fingerprint, hashed_dtype
from rollout.errors import WeightUpdateError
from rollout.layers.shard import Shard
from rollout.layers.weight_slot import WeightSlot, kept_of
from rollout.models.weights import WeightTable, is_computed
from rollout.weights.update import (
    Fingerprint,
    Origin,
    StagingMemory,
    blaming,
    checked_source,
    checksum_of,
    parts_by_origin,
)

FingerprintOf = Callable[[Tensor, torch.dtype], Tensor]
Key = TypeVar("Key")
_MODULUS = 1 << 64


def fingerprint_on(device: torch.device) -> FingerprintOf:
    """Return `Ops.fingerprint` for tensors of `device`. On the host this may compile it."""
    return cpu_backend("device").ops.fingerprint if device.type == "cpu" else fingerprint


# ---- sums over the ranks of an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShare:
    """One rank's part of the fingerprints of an update. It can be pickled.

    pieces: fingerprints of the model's weights, in their dtypes, by origin. own: fingerprints of
    the tensors as they arrived, if the sender announced their checksum. adapter: fingerprints of an
    adapter's tensors, in the dtypes that `adapter_dtypes` has.
    """

    pieces: Mapping[Origin, Fingerprint]
    own: Mapping[str, Fingerprint] = field(default_factory=dict)
    adapter: Mapping[Origin, Fingerprint] = field(default_factory=dict)
    adapter_dtypes: Mapping[Origin, torch.dtype] = field(default_factory=dict)

    def keys(self) -> set[str]:
        """Return the names of all tensors that it has a part of."""
        return {str(origin) for origin in (*self.pieces, *self.adapter)} | {*self.own}


def sum_of(shares: Sequence[WeightShare]) -> WeightShare:
    """Return the fingerprints of an update, from the shares of all ranks.

    Raises WeightUpdateError if the ranks have staged different tensors.
    """
    first, *others = shares
    if not others:
        return first
    for rank, other in enumerate(others, start=1):
        if odd := first.keys() ^ other.keys():
            raise WeightUpdateError(
                f"ranks 0 and {rank} have staged different updates: only one of them has "
                f"{min(odd)!r}; give all ranks the same tensors"
            )
    return WeightShare(
        pieces=_added([share.pieces for share in shares]),
        own=_added([share.own for share in shares]),
        adapter=_added([share.adapter for share in shares]),
        adapter_dtypes=first.adapter_dtypes,
    )


def _added(shares: Sequence[Mapping[Key, Fingerprint]]) -> dict[Key, Fingerprint]:
    added: dict[Key, Fingerprint] = {}
    for key in shares[0]:
        hashes, counts = zip(*(share[key] for share in shares), strict=True)
        # Hashes are int64 and overflow, as the sums over a tensor's elements do.
        total = (sum(hashes) + _MODULUS // 2) % _MODULUS - _MODULUS // 2
        added[key] = total, sum(counts)
    return added


def checksum_of_shares(shares: Sequence[WeightShare]) -> str:
    """Return the checksum of the weights that all ranks serve, from their `fingerprint_share`."""
    return checksum_of({origin.weight: found for origin, found in sum_of(shares).pieces.items()})


def checksums_of_shares(shares: Sequence[WeightShare]) -> dict[str, str]:
    """Return the checksum of each weight's values by the weight's name, 16 hex digits."""
    pieces = sum_of(shares).pieces
    return {origin.weight: f"{found[0] % _MODULUS:016x}" for origin, found in pieces.items()}


# ---- what one rank hashes


class PartHasher:
    """Hashes what one rank adds to the fingerprint of each tensor: together, ranks hash it once."""

    def __init__(self, ops: Ops[Any], shard: Shard) -> None:
        self._ops, self._shard = ops, shard

    def of_kept(self, slot: WeightSlot, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Hash, as `dtype`, the part of its weight that `slot` keeps: (hash, non-finite), int64
        [2]."""
        if slot.cut is None:
            return self.of_whole(kept, dtype, index=0)
        total = torch.zeros(2, dtype=torch.int64, device=kept.device)
        for part, offsets in slot.cut.counted_parts(kept):
            total = total + self._ops.fingerprint(part, dtype, offsets).to(total.device)
        return total

    def of_whole(self, tensor: Tensor, dtype: torch.dtype, *, index: int) -> Tensor:
        """Hash a tensor that all ranks have, on one of them: the rank that `index` selects.
        Returns zeros on the others."""
        if index % self._shard.size == self._shard.rank:
            return self._ops.fingerprint(tensor, dtype)
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptParts:
    """A rank's parts of the model's weights in an update, and its part of their fingerprints."""

    tensors: Mapping[Origin, Tensor]
    share: WeightShare


def read_source(
    given: Mapping[str, Tensor],
    table: WeightTable,
    hasher: PartHasher,
    check: Callable[[], None],
    memory: StagingMemory,
    *,
    wants_own: bool,
) -> KeptParts:
    """Check and hash the tensors of a full update. With `wants_own` the share has `own`, too.

    `check` is called before each tensor. Raises WeightUpdateError naming the tensor at fault.
    """
    source = checked_source(given, table, memory)
    own_hashes = dict(memory.own_hashes)  # of whole tensors: `memory` keeps parts from here on
    tensors = kept_parts(source, table, memory)
    fingerprints = hashed_parts(tensors, table, hasher, check)
    own: dict[str, Fingerprint] = {}
    if wants_own:
        as_given = {name: tensor for name, tensor in given.items() if name not in own_hashes}
        own = _own_fingerprints(as_given, fingerprints, table, hasher, check) | fetched(own_hashes)
    return KeptParts(tensors=tensors, share=WeightShare(pieces=fingerprints, own=own))


def kept_parts(
    source: Mapping[str, Tensor], table: WeightTable, memory: StagingMemory
) -> dict[Origin, Tensor]:
    """Return what this rank keeps of each weight in whole tensors.

    Views where it is one range of the weight's values; `memory` has the others.
    """
    kept: dict[Origin, Tensor] = {}
    for origin, values in parts_by_origin(source, table).items():
        slot = table.slots[origin.weight]
        kept[origin] = kept_of(slot, values)
        if slot.cut is not None and len(slot.cut.ranges) > 1:
            kept[origin] = memory.keep(origin.weight, kept[origin], is_new=True)
    return kept


def hashed_parts(
    parts: Mapping[Origin, Tensor],
    table: WeightTable,
    hasher: PartHasher,
    check: Callable[[], None],
) -> dict[Origin, Fingerprint]:
    """Return this rank's part of each weight's fingerprint, in the dtype of the model's weight.

    Each is computed on the tensor's device, which need not be the model's.
    """
    queued: dict[Origin, Tensor] = {}
    with blaming() as blame:
        for origin, kept in parts.items():
            check()
            blame.culprit = f"checking {origin}"
            slot = table.slots[origin.weight]
            queued[origin] = hasher.of_kept(slot, kept, slot.dtype)
    return fetched(queued)


def hashed_wholes(
    tensors: Mapping[str, Tensor], hasher: PartHasher, check: Callable[[], None]
) -> dict[str, Fingerprint]:
    """Return this rank's part of the fingerprints of whole tensors, in the tensors' dtypes."""
    queued: dict[str, Tensor] = {}
    with blaming() as blame:
        for index, name in enumerate(sorted(tensors)):
            check()
            blame.culprit = f"checking {name!r}"
            dtype = hashed_dtype(tensors[name].dtype)
            queued[name] = hasher.of_whole(tensors[name], dtype, index=index)
    return fetched(queued)


def _own_fingerprints(
    source: Mapping[str, Tensor],
    known: Mapping[Origin, Fingerprint],
    table: WeightTable,
    hasher: PartHasher,
    check: Callable[[], None],
) -> dict[str, Fingerprint]:
    """Return this rank's part of the fingerprints of tensors as they arrived.

    Only tensors that the model casts, takes apart or does not use are hashed again.
    """
    fingerprints: dict[str, Fingerprint] = {}
    unknown: dict[str, Tensor] = {}
    for name, tensor in source.items():
        slot = table.slots.get(name)
        if slot is not None and slot.dtype == hashed_dtype(tensor.dtype):
            fingerprints[name] = known[Origin(name, name)]
        elif not is_computed(name):
            unknown[name] = tensor
    return fingerprints | hashed_wholes(unknown, hasher, check)


def fetched(queued: Mapping[Key, Tensor]) -> dict[Key, Fingerprint]:
    """Return the numbers of fingerprints, with one copy to the host for each device."""
    by_device: dict[torch.device, dict[Key, Tensor]] = {}
    for key, hashed in queued.items():
        by_device.setdefault(hashed.device, {})[key] = hashed
    found: dict[Key, Fingerprint] = {}
    for device, rows in by_device.items():
        with blaming(f"checking the tensors on {device}"):
            found |= zip(rows, torch.stack([*rows.values()]).cpu().tolist(), strict=True)
    return found
