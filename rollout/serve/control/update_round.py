"""UpdateRound: tensors that a trainer sends in many calls, until they become one update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.serve.control.announcement import ModelTensors, TensorMetadata


class UpdateRound:
    """Tensors of one update, kept on the host. Each is announced once, then received.

    The engines check whether all of the model's tensors are there; they load all or none. label:
    the latest label that came with tensors.
    """

    def __init__(self, model: ModelTensors | None, max_bytes: int) -> None:
        """model: None if unknown; then the engines refuse wrong tensors at the end."""
        self._model, self._max_bytes = model, max_bytes
        self.label: str | None = None
        self._num_bytes = 0
        self._tensors: dict[str, Tensor | None] = {}  # None: announced, not here yet

    def announce(self, tensors: Sequence[TensorMetadata]) -> None:
        """Check tensors before they come. Raises WeightUpdateError naming the tensor at fault,
        which ends the round.
        """
        for tensor in tensors:
            if self._model is not None:
                self._model.check(tensor)
            if tensor.name in self._tensors:
                raise WeightUpdateError(f"{tensor.name!r} comes twice in the update; send it once")
            self._num_bytes += tensor.num_bytes
            if self._num_bytes > self._max_bytes:
                raise WeightUpdateError(
                    f"with {tensor.name!r} the update has {self._num_bytes} bytes, more than the "
                    f"{self._max_bytes} that its model can have"
                )
            self._tensors[tensor.name] = None

    def add(self, named_tensors: Iterable[tuple[str, Tensor]], label: str | None) -> None:
        """Store announced tensors that were received."""
        self._tensors.update(named_tensors)
        self.label = self.label if label is None else label

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors. Raises WeightUpdateError if there are none, or some are missing."""
        came = {name: tensor for name, tensor in self._tensors.items() if tensor is not None}
        if len(came) < len(self._tensors) or not came:
            raise WeightUpdateError(
                f"the update cannot end: of {len(self._tensors)} announced tensors {len(came)} "
                "have come"
            )
        return came
