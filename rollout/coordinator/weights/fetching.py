"""WeightFetcher: what an engine does with a source, by its kind."""

from __future__ import annotations

from msgspec import structs

from rollout.coordinator.protocol.weights_source import WeightsSource
from rollout.coordinator.weights import directory, shared
from rollout.errors import WeightUpdateError
from rollout.models.lora import LoraAdapter
from rollout.runner.weight_update import NamedTensors

_KINDS = {shared.KIND: shared.fetch_shared, directory.KIND: directory.fetch_directory}


class WeightFetcher:
    """Fetches the tensors of sources for one engine."""

    def __call__(self, source: WeightsSource) -> NamedTensors:
        """The tensors of `source`, which do not change afterwards. An adapter comes as such.

        Raises WeightUpdateError if they are not there any more, or not as the source says.
        """
        fetch = _KINDS.get(source.kind)
        if fetch is None:
            raise WeightUpdateError(
                f"weights of kind {source.kind!r} cannot be fetched here; only "
                f"{', '.join(sorted(_KINDS))} can"
            )
        tensors = fetch(source)
        if source.lora is None:
            return tensors
        return LoraAdapter(tensors=tensors, **structs.asdict(source.lora))
