"""EagerExecutor: runs each step's program directly, without graphs.

Created by `rollout.backends.cpu.backend`, by `rollout.backends.cuda.backend` if graphs are off, and
by `rollout.backends.cuda.graph` for steps that no graph fits. Keeps the latest step's layout on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rollout.backends.executors.transfer import download, upload
from rollout.backends.step_tensors import (
    LAYOUT_TYPES,
    Fetch,
    HostArray,
    Program,
    StepInputs,
    StepLayout,
)


class EagerExecutor:
    """`BackendExecutor` without graphs. On a CPU the step is finished when `launch` returns."""

    num_captures = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The latest step's layout, on the host and on the device.
        self._layout: tuple[StepLayout[HostArray], StepLayout[Tensor]] | None = None
        self.overlaps = device.type != "cpu"

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Bytes of the latest step's layout, which stays on the device."""
        if self._layout is None:
            return {"inputs": 0}
        on_device = self._layout[1]
        return {"inputs": sum(getattr(on_device, name).nbytes for name in LAYOUT_TYPES)}

    def prepare(self, max_blocks: int, vocab_size: int) -> None:
        """No-op: no memory is reserved."""

    def warm_up(self, program: Program) -> int:
        """Return 0: there are no graphs."""
        return 0

    def launch(self, program: Program, inputs: StepInputs[HostArray]) -> Fetch:
        """Start the program and the copy of its result to the host. The returned function waits for
        the result."""
        latest, known = self._layout or (None, None)
        on_device = upload(inputs, known if latest is inputs.layout else None, self._device)
        self._layout = inputs.layout, on_device.layout
        hidden_LE, routing_TLK = program.forward(inputs, on_device)
        result = program.draw(inputs, on_device, hidden_LE)
        if routing_TLK is not None:
            result = replace(result, routing_TLK=routing_TLK)
        return download(result, self._device)

    def after_resume(self, *, has_moved: bool) -> int:
        """Return 0: there are no graphs."""
        return 0
