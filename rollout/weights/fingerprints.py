"""What one rank reads of a weight update: its parts of the tensors, and its share of their hashes.

The fingerprints of a tensor's parts add up to that of the tensor, so each rank of a group hashes
what it keeps, and the sums are what a process that has the model alone computes.
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
    Holder,
    Piece,
    blaming,
    checked_source,
    checksum_of,
    pieces_of,
)

Key = TypeVar("Key")
_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShare:
    """One rank's addends of fingerprints. It may be pickled and sent to another process.

    `pieces`: of the model's weights in their own dtypes. `own`: of the tensors as they came, if
    their checksum was announced. `adapter`: of an adapter's tensors, each of its own dtype in
    `adapter_dtypes`.
    """

    pieces: Mapping[Piece, Fingerprint]
    own: Mapping[str, Fingerprint] = field(default_factory=dict)
    adapter: Mapping[Piece, Fingerprint] = field(default_factory=dict)
    adapter_dtypes: Mapping[Piece, torch.dtype] = field(default_factory=dict)


def sum_of(shares: Sequence[WeightShare]) -> WeightShare:
    """Return the fingerprints themselves, of the shares of all ranks.

    Raises WeightUpdateError for shares of different tensors.
    """
    first, *others = shares
    if not others:
        return first
    for rank, other in enumerate(others, start=1):
        if odd := _keys(first) ^ _keys(other):
            raise WeightUpdateError(
                f"ranks 0 and {rank} have staged different updates: only one of them has "
                f"{min(odd)!r}; hand all ranks the same tensors"
            )
    return WeightShare(
        pieces=_added([share.pieces for share in shares]),
        own=_added([share.own for share in shares]),
        adapter=_added([share.adapter for share in shares]),
        adapter_dtypes=first.adapter_dtypes,
    )


def _keys(share: WeightShare) -> set[str]:
    """What tensors it is of."""
    return {str(piece) for piece in (*share.pieces, *share.adapter)} | {*share.own}


def _added(shares: Sequence[Mapping[Key, Fingerprint]]) -> dict[Key, Fingerprint]:
    return {key: _total([share[key] for share in shares]) for key in shares[0]}


def _total(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    """Hashes are int64 and overflow, as those of a tensor's elements do."""
    hashes, counts = zip(*fingerprints, strict=True)
    return (sum(hashes) + _MODULUS // 2) % _MODULUS - _MODULUS // 2, sum(counts)


def checksum_of_shares(shares: Sequence[WeightShare]) -> str:
    """Return the checksum of the weights that all ranks serve, by their `fingerprint_share`."""
    return checksum_of({piece.weight: found for piece, found in sum_of(shares).pieces.items()})


def checksums_of_shares(shares: Sequence[WeightShare]) -> dict[str, str]:
    """Return the checksum of each weight's values by the weight's name, 16 hex digits."""
    pieces = sum_of(shares).pieces
    return {piece.weight: f"{found[0] % _MODULUS:016x}" for piece, found in pieces.items()}


class PartHasher:
    """Hashes what one rank adds to the fingerprint of each tensor: together, ranks hash it once."""

    def __init__(self, ops: Ops[Any], shard: Shard) -> None:
        self._ops, self._shard = ops, shard

    def of_kept(self, slot: WeightSlot, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Of the part that `slot` keeps of its weight: (hash, non-finite) as `dtype`, int64 [2]."""
        if slot.cut is None:
            return self.of_whole(kept, dtype, turn=0)
        total = torch.zeros(2, dtype=torch.int64, device=kept.device)
        for part, places in slot.cut.counted_parts(kept):
            total = total + self._ops.fingerprint(part, dtype, places).to(total.device)
        return total

    def of_whole(self, tensor: Tensor, dtype: torch.dtype, *, turn: int) -> Tensor:
        """Of a tensor that all ranks have, which is hashed by the rank whose turn it is."""
        if turn % self._shard.size == self._shard.rank:
            return self._ops.fingerprint(tensor, dtype)
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceParts:
    """What a rank keeps of each of the model's weights in a source, and its share of hashes."""

    pieces: Mapping[Piece, Tensor]
    share: WeightShare


def read_source(
    given: Mapping[str, Tensor],
    table: WeightTable,
    hasher: PartHasher,
    check: Callable[[], None],
    holder: Holder,
    *,
    wants_own: bool,
) -> SourceParts:
    """Read the tensors of a full update. `wants_own`: `own` of the share is wanted, too.

    `check` is called before each tensor. Raises WeightUpdateError naming the tensor at fault.
    """
    source = checked_source(given, table, holder)
    hashes = dict(holder.own_hashes)  # of whole tensors: what is held from here on are parts
    pieces = kept_pieces(source, table, holder)
    fingerprints = hashed_pieces(pieces, table, hasher, check)
    own: dict[str, Fingerprint] = {}
    if wants_own:
        as_given = {name: tensor for name, tensor in given.items() if name not in hashes}
        own = _own_fingerprints(as_given, fingerprints, table, hasher, check) | fetched(hashes)
    return SourceParts(pieces=pieces, share=WeightShare(pieces=fingerprints, own=own))


def kept_pieces(
    source: Mapping[str, Tensor], table: WeightTable, holder: Holder
) -> dict[Piece, Tensor]:
    """Return what this rank keeps of each weight in whole tensors: views, where it is one range of
    its values; `holder` has the others.
    """
    kept: dict[Piece, Tensor] = {}
    for piece, values in pieces_of(source, table).items():
        slot = table.slots[piece.weight]
        kept[piece] = kept_of(slot, values)
        if slot.cut is not None and len(slot.cut.ranges) > 1:
            kept[piece] = holder.hold(piece.weight, kept[piece], is_new=True)
    return kept


def hashed_pieces(
    pieces: Mapping[Piece, Tensor],
    table: WeightTable,
    hasher: PartHasher,
    check: Callable[[], None],
) -> dict[Piece, Fingerprint]:
    """Return this rank's addend of each piece's fingerprint, in the dtype of the model's weight.

    Each is computed on the tensor's device, which need not be the model's.
    """
    queued: dict[Piece, Tensor] = {}
    for piece, kept in pieces.items():
        check()
        with blaming(f"checking {piece}"):
            slot = table.slots[piece.weight]
            queued[piece] = hasher.of_kept(slot, kept, slot.dtype)
    return fetched(queued)


def hashed_wholes(
    tensors: Mapping[str, Tensor], hasher: PartHasher, check: Callable[[], None]
) -> dict[str, Fingerprint]:
    """Return this rank's addend for tensors in their own dtypes, of which it hashes some."""
    queued: dict[str, Tensor] = {}
    for turn, name in enumerate(sorted(tensors)):
        check()
        with blaming(f"checking {name!r}"):
            dtype = hashed_dtype(tensors[name].dtype)
            queued[name] = hasher.of_whole(tensors[name], dtype, turn=turn)
    return fetched(queued)


def _own_fingerprints(
    source: Mapping[str, Tensor],
    known: Mapping[Piece, Fingerprint],
    table: WeightTable,
    hasher: PartHasher,
    check: Callable[[], None],
) -> dict[str, Fingerprint]:
    """Return the addends of the tensors as they came, of which `known` has some.

    Only those that the model casts, takes apart or does not use are read again.
    """
    fingerprints: dict[str, Fingerprint] = {}
    unknown: dict[str, Tensor] = {}
    for name, tensor in source.items():
        slot = table.slots.get(name)
        if slot is not None and slot.dtype == hashed_dtype(tensor.dtype):
            fingerprints[name] = known[Piece(name, name)]
        elif not is_computed(name):
            unknown[name] = tensor
    return fingerprints | hashed_wholes(unknown, hasher, check)


def fetched(queued: Mapping[Key, Tensor]) -> dict[Key, Fingerprint]:
    """Return the numbers of fingerprints, with one copy to the host for each device."""
    by_device: dict[torch.device, dict[Key, Tensor]] = {}
    for key, hashed in queued.items():
        by_device.setdefault(hashed.device, {})[key] = hashed
    fetched: dict[Key, Fingerprint] = {}
    for device, rows in by_device.items():
        with blaming(f"checking the tensors on {device}"):
            values = torch.stack([*rows.values()]).cpu().tolist()
        fetched |= zip(rows, values, strict=True)
    return fetched


FingerprintOf = Callable[[Tensor, torch.dtype], Tensor]


def fingerprint_on(device: torch.device) -> FingerprintOf:
    """`Ops.fingerprint` for tensors of the device. The first call for the host may compile it."""
    return cpu_backend("device").ops.fingerprint if device.type == "cpu" else fingerprint
