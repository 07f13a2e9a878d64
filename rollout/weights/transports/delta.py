"""DeltaTransport: pushes only the values that have changed since the push before.

Another transport carries each push as a link of a chain. The first link has all tensors. Each
later link has the elements whose bits have changed since the link before. The last tensor of a link
is a description, with the checksums of the weights before and after the link. WeightMirror applies
the links at an engine. Used by `rollout.weights.transports.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import ConfigError, WeightUpdateError
from rollout.models.weights import is_computed
from rollout.weights.fingerprints import fingerprint_on
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import WeightsSource
from rollout.weights.transports.collective import CollectiveTransport
from rollout.weights.transports.directory import DirectoryTransport
from rollout.weights.transports.reading import TensorReader
from rollout.weights.update import Fingerprint, NamedTensors, checksum_of, streamed

INDEX, VALUE, DESCRIPTION = "#index", "#value", "#delta"
WHOLE_EVERY = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size in bytes


class LinkDescription(msgspec.Struct, frozen=True):
    """Description of a link in a chain of deltas.

    `builds_on` is the checksum of the tensors before the link; "" for the first link. `result` is
    the checksum of the tensors after the link. `removed` names the tensors that it removes.
    `parent` is the previous link's address and `tensors_checksum`; None for the first link, and if
    links are not kept.
    """

    builds_on: str
    result: str
    removed: tuple[str, ...] = ()
    parent: tuple[str, str] | None = None


@dataclass(slots=True)
class _Link:
    """The link of a running push. `result` is the checksum of the tensors after the link; "" until
    they are read."""

    builds_on: str
    result: str = ""


class DeltaTransport:
    """A WeightTransport of deltas, whose links another transport carries.

    The trainer's process keeps a copy of the weights in host memory to compare with. Each engine
    keeps a copy to which it applies links. An engine that joins later needs all links of a chain. A
    directory keeps the links until the next whole push. With a collective the engine waits for the
    next whole push.
    """

    def __init__(
        self,
        carrier: DirectoryTransport | CollectiveTransport,
        *,
        whole_every: int = WHOLE_EVERY,
        reject_non_finite: bool = True,
    ) -> None:
        """`whole_every` is the number of links of a chain. The push after a refused push is also
        whole. Raises ConfigError if `whole_every` is below 1."""
        if whole_every < 1:
            raise ConfigError(f"whole_every={whole_every} must be 1 or more; 16 is usual")
        self._carrier, self._whole_every = carrier, whole_every
        self._reader = TensorReader(reject_non_finite=reject_non_finite)
        self._copy: dict[str, Tensor] = {}
        self._fingerprints: dict[str, Fingerprint] = {}
        self._link: _Link | None = None
        self._checksum = ""  # the copy's checksum; "" if the engines may serve other weights
        self._num_links = 0
        self._source: WeightsSource | None = None  # source of the last committed link

    @property
    def kind(self) -> str:
        """The carrier's kind. A WeightsSource is a link if its `builds_on` is not None."""
        return self._carrier.kind

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        return self._carrier.committed

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Publish the changed elements, or all tensors for an adapter or the first link of a chain.
        Raises WeightUpdateError as the carrier does."""
        self.roll_back()
        if isinstance(named_tensors, LoraAdapter):
            return self._carrier.publish(named_tensors)
        is_whole = self._num_links % self._whole_every == 0
        link = self._link = _Link("" if is_whole else self._checksum)
        if not link.builds_on:
            self._copy, self._fingerprints, self._num_links = {}, {}, 0
        return self._carrier.publish(self._encoded(named_tensors, link), builds_on=link.builds_on)

    def send(self, source: WeightsSource) -> None:
        self._carrier.send(source)

    def commit(self) -> None:
        """Commit the carrier's push. The next delta builds on this link."""
        self._carrier.commit()
        if self._link is not None:
            self._checksum, self._source = self._link.result, self._carrier.committed
            self._num_links += 1
            self._link = None

    def roll_back(self) -> None:
        """Roll back the carrier's push. After a rolled-back link the next push is whole."""
        if self._link is not None:  # an engine may have applied the link or not
            self._link, self._checksum, self._num_links = None, "", 0
        self._carrier.roll_back()

    def close(self) -> None:
        """Close the carrier and release the copy of the weights. A second call does nothing."""
        self.roll_back()
        self._carrier.close()
        self._copy = {}

    # ---- one push, as the carrier reads it

    def _encoded(self, named_tensors: NamedTensors, link: _Link) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a link, the description last. Update the copy, and set
        `link.result`."""
        stream = streamed(named_tensors)
        names: set[str] = set()
        try:
            while (pair := next(stream, None)) is not None:
                name = pair[0]
                if not is_computed(name):
                    values = self._reader.values_of(*pair)
                    self._fingerprints[name] = self._reader.fingerprint_of(name, values)
                    names.add(name)
                    yield from self._difference(name, values)
                    del values
                del pair  # before the next one is gathered
        except Exception:
            stream.drain()
            raise
        self._reader.check_finite(self._fingerprints)
        removed = self._copy.keys() - names
        for name in removed:
            del self._copy[name], self._fingerprints[name]
        link.result = checksum_of(self._fingerprints)
        before = self._source if link.builds_on else None
        is_kept = before is not None and before.is_kept
        parent = (before.address, before.tensors_checksum) if before and is_kept else None
        description = LinkDescription(link.builds_on, link.result, tuple(sorted(removed)), parent)
        encoded = bytearray(msgspec.json.encode(description))
        yield DESCRIPTION, torch.frombuffer(encoded, dtype=torch.uint8)

    def _difference(self, name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the changes from the copy to `values`, and update the copy. Yields nothing if no
        element has changed. Otherwise yields the smaller of two: the whole tensor, or the changed
        elements with their indices."""
        copy = self._copy.get(name)
        if copy is None or (copy.dtype, copy.shape) != (values.dtype, values.shape):
            self._copy[name] = values.clone()
            yield name, values
            return
        old_N, new_N = _bits(copy), _bits(values)
        index_C = (old_N != new_N).nonzero().squeeze(1)
        if not len(index_C):
            return
        if len(index_C) * (4 + values.itemsize) >= values.nbytes:
            copy.copy_(values)
            yield name, values
            return
        changed_C = values.reshape(-1)[index_C]
        copy.view(-1)[index_C] = changed_C
        if values.numel() < 2**31:
            index_C = index_C.to(torch.int32)
        yield name + INDEX, index_C
        yield name + VALUE, changed_C


def _bits(values: Tensor) -> Tensor:
    """Return the bits of a contiguous tensor as integers, [N]."""
    # As integers a NaN equals itself.
    return values.reshape(-1).view(_BITS[values.itemsize])


def apply_link(
    tensors: dict[str, Tensor], link: dict[str, Tensor], description: LinkDescription
) -> set[str]:
    """Apply a link to `tensors`, and return the names of the changed tensors. Empties `link`.
    Raises IndexError, KeyError or RuntimeError for a link that does not fit the tensors."""
    changed = set()
    for name in description.removed:
        del tensors[name]
    for key in list(link):
        if key.endswith(VALUE):
            continue
        values = link.pop(key)
        name = key.removesuffix(INDEX)
        if name == key:
            tensors[name] = values.clone()  # it may be a view of a file
        else:
            tensors[name].view(-1)[values.long()] = link.pop(name + VALUE)
        changed.add(name)
    return changed


def description_of(link: dict[str, Tensor]) -> LinkDescription:
    """Remove the description from `link` and return it. Raises KeyError if there is none, and
    msgspec.MsgspecError if it is malformed."""
    encoded: Any = link.pop(DESCRIPTION).numpy()
    return msgspec.json.decode(encoded.tobytes(), type=LinkDescription)


_MAX_LINKS = 4096
_ReceivedLink = tuple[LinkDescription, dict[str, Tensor]]


class WeightMirror:
    """An engine's copy of the weights of a chain, to which it applies the links. If the engine
    missed some links, `fetch` first gets and applies them, back to the last whole push, provided
    the transport kept them."""

    def __init__(self, fetch: Callable[[WeightsSource], dict[str, Tensor]]) -> None:
        """`fetch` is the carrier's function that returns the tensors of a link."""
        self._fetch = fetch
        self._tensors: dict[str, Tensor] = {}
        self._fingerprints: dict[str, Fingerprint] = {}
        self._checksum = ""  # the tensors' checksum; "" while a link is applied, or if that failed

    @torch.no_grad()
    def fetch(self, source: WeightsSource) -> Mapping[str, Tensor]:
        """Apply the link at `source`, and return all tensors. The next call changes them. Raises
        WeightUpdateError if a needed link cannot be fetched, does not fit the copy, or does not
        give the checksum that it announces."""
        for description, link in reversed(self._missing_links(source)):
            self._checksum = ""
            if not description.builds_on:
                self._tensors, self._fingerprints = {}, {}
            try:
                changed = apply_link(self._tensors, link, description)
            except (IndexError, KeyError, RuntimeError) as error:
                raise WeightUpdateError(
                    f"the delta at {source.address!r} does not fit the weights that it builds on "
                    f"({type(error).__name__}: {error}); push again: the next push is whole"
                ) from error
            self._verify(description, changed)
        return dict(self._tensors)

    def _missing_links(self, source: WeightsSource) -> list[_ReceivedLink]:
        """Return the link at `source` and the links before it, back to one that fits the copy,
        latest first. Raises WeightUpdateError if the chain does not reach back to the copy or to a
        whole push."""
        links: list[_ReceivedLink] = []
        while len(links) < _MAX_LINKS:
            link = self._fetch(source)
            try:
                description = description_of(link)
            except (KeyError, msgspec.MsgspecError) as error:
                raise WeightUpdateError(
                    f"the push at {source.address!r} is not a link of a chain: {error}"
                ) from error
            links.append((description, link))
            if description.builds_on in ("", self._checksum):
                return links
            if description.parent is None:
                break
            address, checksum = description.parent
            source = structs.replace(source, address=address, tensors_checksum=checksum)
        raise WeightUpdateError(
            f"the push builds on weights with the checksum {description.builds_on}, but this "
            f"engine has {self._checksum or 'none'}; the next push is whole"
        )

    def _verify(self, description: LinkDescription, changed: set[str]) -> None:
        hash_of = fingerprint_on(torch.device("cpu"))
        for name in description.removed:
            self._fingerprints.pop(name, None)
        for name in changed:
            values = self._tensors[name].cpu()
            self._fingerprints[name] = hash_of(values, hashed_dtype(values.dtype)).tolist()
        checksum = checksum_of(self._fingerprints)
        if checksum != description.result:
            raise WeightUpdateError(
                f"the changed weights have the checksum {checksum}, not {description.result} as "
                "announced; the serving weights are kept"
            )
        self._checksum = checksum
