"""WeightFetcher: what an engine does with a source, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import structs
from torch import Tensor

from rollout.coordinator.protocol.weights_source import WeightsSource
from rollout.coordinator.weights import collective, directory, shared
from rollout.coordinator.weights.receiving import CollectiveReceiver
from rollout.errors import WeightUpdateError
from rollout.models.lora import LoraAdapter
from rollout.runner.weight_update import NamedTensors


class WeightFetcher:
    """Fetches the tensors of sources for one engine."""

    def __init__(self) -> None:
        self._by_kind: Mapping[str, Callable[[WeightsSource], dict[str, Tensor]]] = {
            shared.KIND: shared.fetch_shared,
            directory.KIND: directory.fetch_directory,
            collective.KIND: CollectiveReceiver().fetch,
        }

    def __call__(self, source: WeightsSource) -> NamedTensors:
        """The tensors of `source`, which do not change afterwards. An adapter comes as such.

        Raises WeightUpdateError if they are not there any more, or not as the source says.
        """
        fetch = self._by_kind.get(source.kind)
        if fetch is None:
            raise WeightUpdateError(
                f"weights of kind {source.kind!r} cannot be fetched here; only "
                f"{', '.join(sorted(self._by_kind))} can"
            )
        tensors = fetch(source)
        if source.lora is None:
            return tensors
        return LoraAdapter(tensors=tensors, **structs.asdict(source.lora))
