"""EagerExecutor: run a step's program as it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rollout.backends.executors.transfer import download, upload, upload_layout
from rollout.backends.step_tensors import Fetch, HostArray, Program, StepInputs, StepLayout


class EagerExecutor:
    """Implements `Executor`. On a CPU the work is done when `launch` returns."""

    num_captures = 0
    num_bytes: Mapping[str, int] = MappingProxyType({})

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # That of the latest step, on the host and on the device.
        self._layout: tuple[StepLayout[HostArray], StepLayout[Tensor]] | None = None
        self.overlaps = device.type != "cpu"

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
