"""GraphExecutor: replays steps from graphs that were captured once for each shape.

Created by `rollout.backends.cuda.backend` as the executor of the CUDA backend, unless graphs are
turned off. Owns the captured graphs and the device memory of their inputs.
`rollout.backends.cuda.cuda_graph` implements GraphDevice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rollout.backends.cuda.graph_shapes import MAX_LOGIT_BYTES, GraphShape, GraphShapes
from rollout.backends.cuda.static_inputs import StaticInputs
from rollout.backends.cuda.uncaptured import merge_results, uncaptured_work
from rollout.backends.executors.eager import EagerExecutor
from rollout.backends.executors.transfer import upload
from rollout.backends.step_tensors import Fetch, HostArray, Program, StepInputs, StepLayout
from rollout.errors import LockstepError
from rollout.parallel.collectives import (
    ONE_RANK,
    CollectiveAbortedError,
    Collectives,
    any_rank,
)
from rollout.step.output import SampleResult, StepOutput, map_arrays

logger = logging.getLogger(__name__)

# Largest difference of log-probs between a replay and an eager run of the same step.
_LOGPROB_TOLERANCE = 1e-2
# A failed capture may keep device memory forever, and mostly all shapes fail for the same reason.
_MAX_FAILED_CAPTURES = 3


class CaptureError(Exception):
    """Raised if a program that ran cannot be captured. `__cause__` is the first error."""


class GraphDevice(Protocol):
    """Captures and replays programs on a device. Implemented by CudaGraphs, and by a fake in
    tests."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of captured graphs."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Return page-locked host memory, flat uint8."""
        ...

    def capture(self, program: Callable[[], Ran]) -> tuple[Callable[[], None], Ran]:
        """Run `program`, then capture it. Return a function that replays it, and the program's
        result, whose tensors each replay writes. Raises CaptureError if the capture fails."""
        ...

    def forget(self) -> None:
        """Release the memory of all graphs as far as possible, after the caller has dropped
        them."""
        ...

    def download(self, result: StepOutput[Tensor]) -> Fetch:
        """Start the copy of the result to the host. The returned function waits for the result."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """Tensors that a captured step writes: its result, and hidden states of its logit rows."""

    result: StepOutput[Tensor]
    hidden_LE: Tensor


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Callable[[], None]
    ran: Ran


class GraphExecutor:
    """`BackendExecutor` with graphs. A graph runs the whole step, from token ids to sampled tokens.

    A shape is captured when a step first needs it, or by `warm_up`. A step runs eagerly if it draws
    no token, if it fits no shape, or if the capture of its shape failed on any rank. Shapes whose
    logits take more than MAX_LOGIT_BYTES are not used. Work that graphs leave out
    (`rollout.backends.cuda.uncaptured`) is launched after the replay, from the graph's hidden
    states.
    """

    overlaps = True

    _static: StaticInputs

    def __init__(
        self,
        device: torch.device,
        graphs: GraphDevice,
        graph_shapes: GraphShapes,
        collectives: Collectives = ONE_RANK,
    ) -> None:
        self._collectives = collectives
        self._device, self._graphs, self._graph_shapes = device, graphs, graph_shapes
        self._eager = EagerExecutor(device)
        self._captured: dict[GraphShape, _Captured] = {}
        self._failed: set[GraphShape] = set()  # equal on all ranks
        self._is_doubtful = False
        self.num_captures = 0

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Bytes of device memory of graphs and of step inputs."""
        num_inputs = self._static.num_bytes + self._eager.num_bytes["inputs"]
        return {"graphs": self._graphs.num_bytes, "inputs": num_inputs}

    def prepare(self, max_blocks: int, vocab_size: int) -> None:
        """Drop the shapes whose logits are too large. Reserve memory for the inputs of the
        remaining shapes, with block tables of `max_blocks`."""
        self._graph_shapes = self._graph_shapes.within(MAX_LOGIT_BYTES, vocab_size)
        shapes = (
            *self._graph_shapes.decode,
            *self._graph_shapes.mixed,
            *self._graph_shapes.scoring,
        )
        self._static = StaticInputs(shapes, max_blocks, self._device, self._graphs.pinned)

    def launch(self, program: Program, inputs: StepInputs[HostArray]) -> Fetch:
        """Replay the smallest graph that the step fits, or run the step eagerly, and start the copy
        of its result. The returned function waits for the result."""
        shape = self._graph_shapes.smallest_for(inputs)
        if self._is_doubtful and shape is not None:
            self._check_replay(program)
        graph = None if shape is None else self._graph_of(program, shape)
        if shape is None or graph is None:
            return self._eager.launch(program, inputs)
        self._static.load(shape, inputs)
        graph.replay()
        fetch = self._graphs.download(_without_padding(graph.ran.result, inputs.layout, shape))
        more = uncaptured_work(inputs, shape.num_rows)
        if more is None:
            return fetch
        fetch_more = self._launch_more(program, more.inputs, graph.ran.hidden_LE)
        return lambda: merge_results(fetch(), fetch_more(), more.samples)

    def _launch_more(
        self, program: Program, inputs: StepInputs[HostArray], hidden_LE: Tensor
    ) -> Fetch:
        """Draw and score from the rows of `hidden_LE` that `inputs` name, without a graph."""
        on_device = upload(inputs, None, self._device)
        rows_LE = hidden_LE.index_select(0, on_device.layout.logit_indices_L)
        return self._graphs.download(program.draw(inputs, on_device, rows_LE))

    def warm_up(self, program: Program) -> int:
        """Capture all shapes that are not captured yet, except shapes that score prompts. Return
        the number of successful captures."""
        before = self.num_captures
        # The largest shape first: smaller shapes reuse its memory.
        for shape in sorted(
            {*self._graph_shapes.decode, *self._graph_shapes.mixed}, key=_size, reverse=True
        ):
            self._graph_of(program, shape)
        return self.num_captures - before

    def after_resume(self, *, has_moved: bool) -> int:
        """Drop all graphs if memory `has_moved`. Otherwise let the next step check one graph.
        Return the number of graphs dropped now."""
        num_dropped = len(self._captured) if has_moved else 0
        if has_moved:
            self._drop_graphs()
        self._is_doubtful = bool(self._captured)
        return num_dropped

    def _graph_of(self, program: Program, shape: GraphShape) -> _Captured | None:
        """Return the shape's graph, captured now if needed. Return None if the shape's steps must
        run eagerly. A collective."""
        if shape not in self._captured and self._may_capture(shape):
            captured = self._capture(program, shape)
            # A graph contains collectives: all ranks replay, or none does.
            if any_rank(self._collectives, captured is None, self._device):
                self._add_failure(shape)
            elif captured is not None:
                self._captured[shape] = captured
                self.num_captures += 1
                logger.info("captured %s", shape)
        return self._captured.get(shape)

    def _may_capture(self, shape: GraphShape) -> bool:
        return shape not in self._failed and len(self._failed) < _MAX_FAILED_CAPTURES

    def _capture(self, program: Program, shape: GraphShape) -> _Captured | None:
        """Capture the shape. Return None and log the error if the capture fails. The program first
        runs without capture, including its collectives. Errors of that run are raised, as in any
        step."""
        on_host = self._static.load(shape, None)
        on_device = self._static.on_device(shape)
        try:
            return _Captured(*self._graphs.capture(lambda: _run(program, on_host, on_device)))
        except CaptureError as error:
            if isinstance(error.__cause__, LockstepError | CollectiveAbortedError):
                raise error.__cause__ from None  # the other ranks cannot be asked any more
            logger.warning("capturing %s failed", shape, exc_info=error.__cause__)
            return None

    def _add_failure(self, shape: GraphShape) -> None:
        self._failed.add(shape)
        logger.warning("%s was not captured on all ranks: its steps run eagerly from now on", shape)
        if len(self._failed) == _MAX_FAILED_CAPTURES:
            logger.warning("%d shapes were not captured: no more are tried", len(self._failed))

    def _check_replay(self, program: Program) -> None:
        """Compare the replay of a step of padding with the same step run eagerly. If they differ,
        drop all graphs, on all ranks."""
        self._is_doubtful = False
        shape = min(self._captured, key=_size)
        on_host = self._static.load(shape, None)
        self._captured[shape].replay()
        replayed = self._graphs.download(self._captured[shape].ran.result)()
        ran = _run(program, on_host, self._static.on_device(shape))
        expected = self._graphs.download(ran.result)()
        # They differ if the graph reads memory that no longer holds the weights.
        is_wrong = not _agree(replayed.samples, expected.samples)
        # All ranks replay, or all capture again: a graph contains collectives.
        if any_rank(self._collectives, is_wrong, self._device):
            logger.warning("replayed steps went wrong after a resume: graphs are captured again")
            self._drop_graphs()

    def _drop_graphs(self) -> None:
        self._captured.clear()
        self._graphs.forget()


def _run(program: Program, host: StepInputs[HostArray], inputs: StepInputs[Tensor]) -> Ran:
    """Run the part of a step that a graph holds: the forward pass, and the draws from its first
    rows."""
    hidden_LE, routing_TLK = program.forward(host, inputs)
    drawn = program.draw(host, inputs, hidden_LE[: inputs.layout.num_drawn_logits])
    return Ran(replace(drawn, routing_TLK=routing_TLK), hidden_LE)


def _without_padding(
    result: StepOutput[Tensor], layout: StepLayout[HostArray], shape: GraphShape
) -> StepOutput[Tensor]:
    """Return a graph's result without padding. Log-probs are left out if no sample wants them."""
    draws = StepOutput(samples=result.samples)
    samples = map_arrays(draws, lambda array_S: array_S[: len(layout.draws_S)]).samples
    if not layout.flags.any_logprobs:
        samples = replace(samples, logprobs_S=None)
    routing_TLK = result.routing_TLK
    if routing_TLK is not None:
        # In the graph, prefill tokens come after the room for decode rows.
        num_prefill = len(layout.token_ids_T) - layout.num_decode_rows
        prefilled_TLK = routing_TLK[shape.num_decode_rows :][:num_prefill]
        routing_TLK = routing_TLK[: layout.num_decode_rows]
        routing_TLK = torch.cat([routing_TLK, prefilled_TLK]) if num_prefill else routing_TLK
    return StepOutput(samples=samples, routing_TLK=routing_TLK)


def _size(shape: GraphShape) -> tuple[int, int, int]:
    return shape.num_tokens, shape.num_rows, shape.num_samples


def _agree(left: SampleResult, right: SampleResult) -> bool:
    assert left.logprobs_S is not None
    assert right.logprobs_S is not None
    difference_S = abs(left.logprobs_S - right.logprobs_S)
    return bool(
        (left.token_ids_S == right.token_ids_S).all() and (difference_S <= _LOGPROB_TOLERANCE).all()
    )
