"""WeightsSource: how engines get the weights of a push, as it travels in messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from rollout.errors import WeightUpdateError
from rollout.wire import FAULTS, Count, Name, WireData, pack

Alpha = Annotated[float, Meta(ge=-1e9, le=1e9)]  # which excludes NaN
# The largest mixtures have 100,000 tensors, of some 120 bytes each in a manifest.
MAX_TENSORS = 2**18


class TensorEntry(WireData, frozen=True, kw_only=True):
    """Where one tensor is in its source: `num_bytes` from `offset`, row-major."""

    dtype: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    offset: Count
    num_bytes: Count


Entries = Annotated[dict[Name, TensorEntry], Meta(max_length=MAX_TENSORS)]
_entries_decoder = msgspec.msgpack.Decoder(Entries)


def pack_manifest(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the manifest of these tensors. Raises ProtocolError if a value cannot be sent."""
    return pack(entries)


class LoraTerms(WireData, frozen=True, kw_only=True):
    """What the tensors of a source mean if they are A and B of an adapter: see LoraAdapter."""

    rank: Count
    alpha: Alpha
    use_rslora: bool
    ranks: Annotated[Mapping[str, Count], Meta(max_length=MAX_TENSORS)]
    alphas: Annotated[Mapping[str, Alpha], Meta(max_length=MAX_TENSORS)]


class WeightsSource(WireData, frozen=True, kw_only=True):
    """Where weights can be fetched; they never travel over these sockets.

    kind: how they are fetched. address: from where. manifest: where each tensor is, packed by
    `pack_manifest`, which only those that fetch unpack; empty for kinds that say so elsewhere.
    checksum: of all tensors, as `engine.weights_checksum()` reports it once
    they are served. tensors_checksum: of the tensors in the source, before any cast, "" where that
    comes with them. lora: None if the tensors are all weights. is_kept: whether they can be fetched
    after the push. num_members: how many engines take part in the push, as the coordinator says in
    a Prepare. builds_on: None if these are tensors; else they are a link in a chain of deltas, and
    this is the checksum of what it builds on, "" for the first link.
    """

    kind: Name
    address: Name
    manifest: bytes
    checksum: Name
    tensors_checksum: Name = ""
    lora: LoraTerms | None = None
    is_kept: bool = True
    num_members: Count = 0
    builds_on: Name | None = None

    def entries(self) -> Mapping[str, TensorEntry]:
        """Return where each tensor is, by name. Raises WeightUpdateError if the manifest is
        malformed."""
        try:
            return _entries_decoder.decode(self.manifest) if self.manifest else {}
        except FAULTS as fault:
            raise WeightUpdateError(
                f"the manifest of the weights at {self.address!r} cannot be read: {fault!s:.200}"
            ) from fault
