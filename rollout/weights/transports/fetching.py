"""WeightFetcher: what an engine does with a source, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import structs
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import WeightsSource
from rollout.weights.transports import collective, cuda_ipc, directory, shared
from rollout.weights.transports.mirror import WeightMirror
from rollout.weights.transports.receiving import CollectiveReceiver
from rollout.weights.update import NamedTensors


class WeightFetcher:
    """Fetches the tensors of sources for one engine."""

    def __init__(self) -> None:
        receiver = CollectiveReceiver()
        self._by_kind: Mapping[str, Callable[[WeightsSource], dict[str, Tensor]]] = {
            shared.KIND: shared.fetch_shared,
            directory.KIND: directory.fetch_directory,
            collective.KIND: receiver.fetch,
            cuda_ipc.KIND: receiver.fetch,
        }
        self._mirror = WeightMirror(self._fetch)

    def __call__(self, source: WeightsSource) -> NamedTensors:
        """The tensors of `source`, which do not change before the next push. An adapter comes as
        such.

        Raises WeightUpdateError if they are not there any more, or not as the source says.
        """
        tensors = self._fetch(source) if source.builds_on is None else self._mirror.fetch(source)
        if source.lora is None:
            return tensors
        return LoraAdapter(tensors=tensors, **structs.asdict(source.lora))

    def _fetch(self, source: WeightsSource) -> dict[str, Tensor]:
        """The tensors as they travel."""
        fetch = self._by_kind.get(source.kind)
        if fetch is None:
            raise WeightUpdateError(
                f"weights of kind {source.kind!r} cannot be fetched here; only "
                f"{', '.join(sorted(self._by_kind))} can"
            )
        return fetch(source)
