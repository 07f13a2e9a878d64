"""Stands for torch on a machine with one CUDA device, whose errors are sticky as CUDA's are.

After an illegal access every call of the process fails, until the process ends. Graphs and their
pools of memory are those of tests/backends/fake_graphs.py.
"""

from __future__ import annotations

from faults import happen

from tests.backends.fake_graphs import FakeGraph, FakeTorchCuda

__version__ = "2.11.0+fake"


class AcceleratorError(RuntimeError):
    pass


class Device:
    """torch.cuda, and what a test does there."""

    def __init__(self) -> None:
        self._graphs = FakeTorchCuda()
        self._is_lost = False
        self._is_initialized = False

    def is_available(self) -> bool:
        happen("facts")
        return True

    def is_initialized(self) -> bool:
        return self._is_initialized

    def synchronize(self) -> None:
        self._is_initialized = True
        if self._is_lost:
            raise AcceleratorError(
                "CUDA error: an illegal memory access was encountered\n"
                "Device-side assertions were explicitly omitted for this error check"
            )

    def launch(self) -> None:
        """Run a kernel and wait for it."""
        self.synchronize()
        self._graphs.product()

    def launch_out_of_bounds(self) -> None:
        self._is_lost = True
        self.launch()

    def replayed_graph(self) -> FakeGraph:
        """Capture a product and replay it."""
        self.synchronize()
        graph = self._graphs.CUDAGraph()
        with self._graphs.graph(graph, stream=self._graphs.Stream()):
            self._graphs.product()
        graph.replay()
        return graph


cuda = Device()
