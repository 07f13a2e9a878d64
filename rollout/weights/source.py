"""WeightsSource: the message that says how engines fetch the weights of a push.

Weight transports make it, the coordinator passes it on to the engines, and WeightFetcher reads it.
"""

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
    """Place of one tensor in its source: `num_bytes` from `offset`, row-major."""

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
    """Settings of the adapter whose A and B a source's tensors are: see LoraAdapter."""

    rank: Count
    alpha: Alpha
    use_rslora: bool
    ranks: Annotated[Mapping[str, Count], Meta(max_length=MAX_TENSORS)]
    alphas: Annotated[Mapping[str, Alpha], Meta(max_length=MAX_TENSORS)]


class WeightsSource(WireData, frozen=True, kw_only=True):
    """Address from which engines fetch the weights of a push. The weights do not travel in this
    message.

    kind: the transport, which says how they are fetched. address: in the form of that transport.
    manifest: the place of each tensor, packed by `pack_manifest`; `entries` unpacks it. Empty for
    transports that keep the places with the tensors. checksum: `engine.weights_checksum()` once the
    weights are served. tensors_checksum: checksum of the tensors in the source, before any cast; ""
    where it comes with the tensors. lora: settings of the adapter whose A and B the tensors are;
    None for weights. is_kept: whether they can be fetched after the push. num_members: number of
    engines that take part in the push, set by the coordinator when they stage. builds_on: None
    unless the tensors are a link in a chain of deltas. Then the checksum of the tensors that the
    link changes, "" for the first link.
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

    @property
    def stands_alone(self) -> bool:
        """Whether an engine needs no earlier source: this is neither an adapter nor a change."""
        return self.lora is None and not self.builds_on

    def entries(self) -> Mapping[str, TensorEntry]:
        """Return where each tensor is, by name. Raises WeightUpdateError if the manifest is
        malformed."""
        try:
            return _entries_decoder.decode(self.manifest) if self.manifest else {}
        except FAULTS as fault:
            raise WeightUpdateError(
                f"the manifest of the weights at {self.address!r} cannot be read: {fault!s:.200}"
            ) from fault
