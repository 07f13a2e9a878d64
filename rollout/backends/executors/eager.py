"""EagerExecutor: run a step's program as it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollout.backends.executors.transfer import download, upload, upload_layout
from rollout.backends.step_tensors import (
    LAYOUT_TYPES,
    Fetch,
    HostArray,
    Program,
    StepInputs,
    StepLayout,
)


class EagerExecutor:
    """Implements `Executor`. On a CPU the work is done when `launch` returns."""

    num_captures = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # That of the latest step, on the host and on the device.
        self._layout: tuple[StepLayout[HostArray], StepLayout[Tensor]] | None = None
        self.overlaps = device.type != "cpu"

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Bytes of the latest step's layout."""
        if self._layout is None:
            return {"inputs": 0}
        on_device = self._layout[1]
        return {"inputs": sum(getattr(on_device, name).nbytes for name in LAYOUT_TYPES)}

    def prepare(self, max_blocks: int, vocab_size: int) -> None:
        """Nothing to prepare."""

    def warm_up(self, program: Program) -> int:
        """Nothing to capture."""
        return 0

    def launch(self, program: Program, inputs: StepInputs[HostArray]) -> Fetch:
        """Start program(inputs); what it returns is queued on its way to the host."""
        if self._layout is None or self._layout[0] is not inputs.layout:
            self._layout = inputs.layout, upload_layout(inputs.layout, self._device)
        on_device = upload(inputs, self._layout[1], self._device)
        return download(program(inputs, on_device), self._device)

    def after_resume(self, *, has_moved: bool) -> int:
        """Nothing was captured."""
        return 0
