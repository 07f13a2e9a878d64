"""WeightMirror: an engine's copy of the tensors that a chain of deltas has made so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import WeightUpdateError
from rollout.weights.hashing import fingerprint_on
from rollout.weights.source import WeightsSource
from rollout.weights.transports.delta import LinkDescription, apply_link, description_of
from rollout.weights.update import Fingerprint, checksum_of

_MAX_LINKS = 4096
_Link = tuple[LinkDescription, dict[str, Tensor]]


class WeightMirror:
    """Builds each link on the one before; where it lacks that, on all links since the last whole
    one, if they are kept.
    """

    def __init__(self, fetch: Callable[[WeightsSource], dict[str, Tensor]]) -> None:
        """`fetch` returns the tensors of a link as they travel."""
        self._fetch = fetch
        self._tensors: dict[str, Tensor] = {}
        self._fingerprints: dict[str, Fingerprint] = {}
        self._checksum = ""  # of the tensors, "" while they are those of no link

    @torch.no_grad()
    def fetch(self, source: WeightsSource) -> Mapping[str, Tensor]:
        """The tensors after the link at `source`. They change with the next call.

        Raises WeightUpdateError if the link cannot be fetched, does not fit, or does not make what
        it says.
        """
        for description, link in reversed(self._missing_links(source)):
            self._checksum = ""
            if not description.builds_on:
                self._tensors, self._fingerprints = {}, {}
            try:
                changed = apply_link(self._tensors, link, description)
            except (IndexError, KeyError, RuntimeError) as error:
                raise WeightUpdateError(
                    f"the changes at {source.address!r} do not fit the weights that they build on: "
                    f"{type(error).__name__}: {error}"
                ) from error
            self._verify(description, changed)
        return dict(self._tensors)

    def _missing_links(self, source: WeightsSource) -> list[_Link]:
        """The links from that of `source` back to the first that can be built on what is here."""
        links: list[_Link] = []
        while len(links) < _MAX_LINKS:
            link = self._fetch(source)
            try:
                description = description_of(link)
            except (KeyError, msgspec.MsgspecError) as error:
                raise WeightUpdateError(
                    f"what came from {source.address!r} is no link of a chain: {error}"
                ) from error
            links.append((description, link))
            if description.builds_on in ("", self._checksum):
                return links
            if description.parent is None:
                break
            address, checksum = description.parent
            source = structs.replace(source, address=address, tensors_checksum=checksum)
        raise WeightUpdateError(
            f"the push builds on weights of the checksum {description.builds_on}, and this engine "
            f"has {self._checksum or 'none'}; the next push is whole"
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
                f"the changes make weights of the checksum {checksum}, not {description.result} as "
                "announced; the serving weights are kept"
            )
        self._checksum = checksum
