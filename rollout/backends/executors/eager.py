"""EagerExecutor: run a step's program as it is."""

from __future__ import annotations

import torch

from rollout.backends.executors.transfer import download, upload
from rollout.backends.step_tensors import Fetch, HostArray, Program, StepInputs


class EagerExecutor:
    """Implements `Executor`. On a CPU the work is done when `launch` returns."""

    num_captures = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.overlaps = device.type != "cpu"

    def prepare(self, max_blocks: int) -> None:
        """Nothing to prepare."""

    def launch(self, program: Program, inputs: StepInputs[HostArray]) -> Fetch:
        """Start program(inputs); what it returns is queued on its way to the host."""
        return download(program(inputs, upload(inputs, self._device)), self._device)

    def after_resume(self, *, has_moved: bool) -> int:
        """Nothing was captured."""
        return 0
