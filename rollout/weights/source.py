"""WeightsSource: the message that says how engines fetch the weights of a push.

The weight transports create WeightsSources, and `rollout.apis.weight_push` sends them through the
coordinator (`rollout.coordinator`) to the engines. There `rollout.weights.transports.registry`
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from rollout.errors import WeightUpdateError
from rollout.wire import FAULTS, Count, Name, WireData, pack

Alpha = Annotated[float, Meta(ge=-1e9, le=1e9)]  # the bounds exclude NaN
# The largest mixtures have 100,000 tensors, of some 120 bytes each in a manifest.
MAX_TENSORS = 2**18


class TensorEntry(WireData, frozen=True, kw_only=True):
    """Place of a tensor in the source's memory: `num_bytes` bytes from `offset`, row-major."""

    dtype: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    offset: Count
    num_bytes: Count


Entries = Annotated[dict[Name, TensorEntry], Meta(max_length=MAX_TENSORS)]
_entries_decoder = msgspec.msgpack.Decoder(Entries)


def pack_manifest(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the encoded `manifest` of a WeightsSource. Raises ProtocolError for values that cannot
    be encoded."""
    return pack(entries)


class LoraTerms(WireData, frozen=True, kw_only=True):
    """Settings of a LoraAdapter. The tensors A and B are at the source."""

    rank: Count
    alpha: Alpha
    use_rslora: bool
    ranks: Annotated[Mapping[str, Count], Meta(max_length=MAX_TENSORS)]
    alphas: Annotated[Mapping[str, Alpha], Meta(max_length=MAX_TENSORS)]


class WeightsSource(WireData, frozen=True, kw_only=True):
    """Message that says where and how to fetch the weights of a push, without the weights
    themselves.

    kind: name of the transport.
    address: where to fetch, in the form of that transport.
    manifest: the place of each tensor, packed by `pack_manifest`; empty if the transport stores the
        places with the tensors.
    checksum: `weights_checksum()` of an engine that serves the weights; "" until the coordinator
        sets it.
    tensors_checksum: checksum of the tensors at the source, before any cast; "" if it comes with
        the tensors.
    lora: settings of the adapter if the tensors are its A and B; None for weights.
    is_kept: whether the weights can be fetched after the push.
    num_members: number of engines in the push, set by the coordinator.
    builds_on: checksum of the tensors that a delta changes; "" for the first link of a chain of
        deltas, None outside of a chain.
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
        """Whether engines need no earlier source, as for full weights and a chain's first link."""
        return self.lora is None and not self.builds_on

    def entries(self) -> Mapping[str, TensorEntry]:
        """Return the place of each tensor, by name; {} for an empty manifest. Raises
        WeightUpdateError if the manifest is malformed."""
        try:
            return _entries_decoder.decode(self.manifest) if self.manifest else {}
        except FAULTS as fault:
            raise WeightUpdateError(
                f"the manifest of the weights at {self.address!r} cannot be read: {fault!s:.200}; "
                "push again, from the same version of rollout"
            ) from fault
