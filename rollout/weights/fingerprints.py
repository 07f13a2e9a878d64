"""Fingerprints of weights: hashes of tensors, from which update checks and checksums are made.

The fingerprints of a tensor's parts add up to the tensor's fingerprint. So each rank of an engine
hashes its own parts, and the sums over ranks are the fingerprints of the whole model.

Used by ServedWeights and `rollout.weights.lora_merge` to verify updates, by Worker and the
executors (also `rollout_vllm.executor`) for checksums, and by the weight transports to check what
arrives. Changes no tensor.
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
    """Return the function `Ops.fingerprint` for tensors on `device`. The first call for a CPU can
    compile the function."""
    return cpu_backend("device").ops.fingerprint if device.type == "cpu" else fingerprint


# ---- sums over the ranks of an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShare:
    """One rank's part of the fingerprints of an update. It can be pickled.

    `pieces` has fingerprints of the model's weights, in the model's dtypes. `own` has fingerprints
    of the tensors as they arrived, by name. `own` is empty unless the sender announced a checksum
    of these tensors. `adapter` has fingerprints of an adapter's tensors, in the dtypes in
    `adapter_dtypes`.
    """

    pieces: Mapping[Origin, Fingerprint]
    own: Mapping[str, Fingerprint] = field(default_factory=dict)
    adapter: Mapping[Origin, Fingerprint] = field(default_factory=dict)
    adapter_dtypes: Mapping[Origin, torch.dtype] = field(default_factory=dict)

    def keys(self) -> set[str]:
        """Return the names of all tensors with a fingerprint in this share."""
        return {str(origin) for origin in (*self.pieces, *self.adapter)} | {*self.own}


def sum_of(shares: Sequence[WeightShare]) -> WeightShare:
    """Return the fingerprints of an update: the sums of all ranks' shares, given in rank order.
    Raises WeightUpdateError if the ranks have staged tensors of different names."""
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
        # Sums wrap around as int64, like the sums over a tensor's elements.
        total = (sum(hashes) + _MODULUS // 2) % _MODULUS - _MODULUS // 2
        added[key] = total, sum(counts)
    return added


def checksum_of_shares(shares: Sequence[WeightShare]) -> str:
    """Return the checksum of the served weights from all ranks' shares, in rank order."""
    return checksum_of({origin.weight: found for origin, found in sum_of(shares).pieces.items()})


def checksums_of_shares(shares: Sequence[WeightShare]) -> dict[str, str]:
    """Return a checksum of each weight's values, 16 hex digits, by the weight's name."""
    pieces = sum_of(shares).pieces
    return {origin.weight: f"{found[0] % _MODULUS:016x}" for origin, found in pieces.items()}


# ---- the hashes of one rank


class PartHasher:
    """Hashes one rank's part of each tensor. Together all ranks hash each value once."""

    def __init__(self, ops: Ops[Any], shard: Shard) -> None:
        self._ops, self._shard = ops, shard

    def of_kept(self, slot: WeightSlot, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Hash `kept`, the part of its weight that `slot` keeps on this rank, cast to `dtype`.
        Returns (hash, number of non-finite values), int64 [2]. Only one rank counts values that
        several ranks keep."""
        if slot.cut is None:
            return self.of_whole(kept, dtype, index=0)
        total = torch.zeros(2, dtype=torch.int64, device=kept.device)
        for part, offsets in slot.cut.counted_parts(kept):
            total = total + self._ops.fingerprint(part, dtype, offsets).to(total.device)
        return total

    def of_whole(self, tensor: Tensor, dtype: torch.dtype, *, index: int) -> Tensor:
        """Hash a tensor that every rank has whole. Returns int64 [2]. Only the rank `index`
        modulo the number of ranks hashes the tensor. The other ranks return zeros."""
        if index % self._shard.size == self._shard.rank:
            return self._ops.fingerprint(tensor, dtype)
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptParts:
    """A rank's parts of an update's tensors, and the rank's share of the fingerprints."""

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
    """Check and hash the tensors of a full update; return this rank's parts.

    `wants_own` says whether the share gets `own` fingerprints. `check` is called before each hash,
    and can raise to cancel. Copies of tensors are kept in `memory`. Raises WeightUpdateError naming
    the tensor at fault.
    """
    source = checked_source(given, table, memory)
    own_hashes = dict(memory.own_hashes)  # before `memory` hashes parts, too
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
    """Return the part of each weight that this rank keeps, cut from whole tensors. A part that is
    one range of the weight is a view. A part of several ranges is copied to `memory`."""
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
    `check` is called before each tensor, and can raise to cancel."""
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
    """Return this rank's part of the fingerprints of whole tensors, in the tensors' dtypes. `check`
    is called before each tensor, and can raise to cancel."""
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
    """Return this rank's part of the fingerprints of tensors as they arrived. `known` has
    fingerprints in the model's dtypes. Only tensors that the model casts, splits, renames or does
    not use are hashed again. Tensors that the model computes itself are left out."""
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
    """Return fingerprints as numbers, with one copy to the host for each device."""
    by_device: dict[torch.device, dict[Key, Tensor]] = {}
    for key, hashed in queued.items():
        by_device.setdefault(hashed.device, {})[key] = hashed
    found: dict[Key, Fingerprint] = {}
    for device, rows in by_device.items():
        with blaming(f"checking the tensors on {device}"):
            found |= zip(rows, torch.stack([*rows.values()]).cpu().tolist(), strict=True)
    return found
