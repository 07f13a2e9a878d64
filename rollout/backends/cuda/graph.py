"""GraphExecutor: replay steps that were captured once for their shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rollout.backends.cuda.graph_shapes import MAX_LOGIT_BYTES, GraphShape, GraphShapes
from rollout.backends.cuda.left_out import left_out, with_more
from rollout.backends.cuda.static_inputs import StaticInputs
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

# Between a replay and the same kernels launched one by one, on the same inputs.
_LOGPROB_TOLERANCE = 1e-2
# Each may keep a pool of device memory for good, and what fails one shape mostly fails them all.
_MAX_FAILED_CAPTURES = 3


class CaptureError(Exception):
    """A program that has run cannot be captured. Its cause is the first thing that went wrong."""


class GraphDevice(Protocol):
    """What capturing asks of a device. `num_bytes`: what captured graphs take of it."""

    @property
    def num_bytes(self) -> int: ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that the device copies from by itself, flat uint8."""
        ...

    def capture(self, program: Callable[[], Ran]) -> tuple[Callable[[], None], Ran]:
        """(how to run `program` again, the tensors its result is in each time). Runs it first.

        Raises CaptureError where the program runs and its capture fails.
        """
        ...

    def forget(self) -> None:
        """All graphs are dropped: give their memory back, as far as that is possible."""
        ...

    def download(self, result: StepOutput[Tensor]) -> Fetch:
        """Queue the result's way to the host; the function returned waits for it."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What a captured step leaves: its result, and the rows that logits are made of."""

    result: StepOutput[Tensor]
    hidden_LE: Tensor


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Callable[[], None]
    ran: Ran


class GraphExecutor:
    """Implements `Executor`. A graph holds the whole step, from token ids to sampled tokens.

    A shape is captured when a step first needs it, or by `warm_up`. Steps that fit none, and those
    with more logits than MAX_LOGIT_BYTES, run eagerly. What a graph leaves out, see `left_out`, is
    launched behind its replay, from the hidden states that it leaves.

    Steps of a shape whose capture has failed on any rank run eagerly, too, on all ranks.
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
        self._failed: set[GraphShape] = set()  # the same on all ranks
        self._is_doubtful = False
        self.num_captures = 0

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Bytes of the device that captured steps take."""
        num_inputs = self._static.num_bytes + self._eager.num_bytes["inputs"]
        return {"graphs": self._graphs.num_bytes, "inputs": num_inputs}

    def prepare(self, max_blocks: int, vocab_size: int) -> None:
        """Reserve the places of all inputs; block tables take as much as `max_blocks` needs."""
        self._graph_shapes = self._graph_shapes.within(MAX_LOGIT_BYTES, vocab_size)
        shapes = (
            *self._graph_shapes.decode,
            *self._graph_shapes.mixed,
            *self._graph_shapes.scoring,
        )
        self._static = StaticInputs(shapes, max_blocks, self._device, self._graphs.pinned)

    def launch(self, program: Program, inputs: StepInputs[HostArray]) -> Fetch:
        """Replay the smallest graph that the step fits; what it returns is queued to the host."""
        shape = self._graph_shapes.smallest_for(inputs)
        if self._is_doubtful and shape is not None:
            self._check_replay(program)
        graph = None if shape is None else self._graph_of(program, shape)
        if shape is None or graph is None:
            return self._eager.launch(program, inputs)
        self._static.load(shape, inputs)
        graph.replay()
        fetch = self._graphs.download(_without_padding(graph.ran.result, inputs.layout, shape))
        more = left_out(inputs, shape.num_rows)
        if more is None:
            return fetch
        fetch_more = self._launch_more(program, more.inputs, graph.ran.hidden_LE)
        return lambda: with_more(fetch(), fetch_more(), more.samples)

    def _launch_more(
        self, program: Program, inputs: StepInputs[HostArray], hidden_LE: Tensor
    ) -> Fetch:
        """Draw and score from some of these rows, with no graph."""
        on_device = upload(inputs, None, self._device)
        rows_LE = hidden_LE.index_select(0, on_device.layout.logit_indices_L)
        return self._graphs.download(program.draw(inputs, on_device, rows_LE))

    def warm_up(self, program: Program) -> int:
        """Capture all shapes that are not captured yet, except those that score prompts. Returns
        the number of captures that succeed.

        The largest comes first: the others then find room in the memory that it has left.
        """
        before = self.num_captures
        for shape in sorted(
            {*self._graph_shapes.decode, *self._graph_shapes.mixed}, key=_size, reverse=True
        ):
            self._graph_of(program, shape)
        return self.num_captures - before

    def after_resume(self, *, has_moved: bool) -> int:
        """Drop the graphs if what they point to is elsewhere; else check one before a step.

        Returns how many were dropped.
        """
        num_dropped = len(self._captured) if has_moved else 0
        if has_moved:
            self._drop_graphs()
        self._is_doubtful = bool(self._captured)
        return num_dropped

    def _graph_of(self, program: Program, shape: GraphShape) -> _Captured | None:
        """Return the shape's graph, captured if it is not yet; None where its steps run eagerly."""
        if shape not in self._captured and self._may_capture(shape):
            captured = self._capture(program, shape)
            # A graph holds sums of all ranks: all of them replay, or none does.
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
        """Return the captured shape, None if that fails: its error is logged.

        Raises what the program raises: it is run before, with the sums in which ranks wait for
        each other, so that an error in it is one of a step.
        """
        on_host = self._static.load(shape, None)
        on_device = self._static.on_device(shape)
        try:
            return _Captured(*self._graphs.capture(lambda: _run(program, on_host, on_device)))
        except CaptureError as error:
            if isinstance(error.__cause__, LockstepError | CollectiveAbortedError):
                raise error.__cause__ from None  # no rank is left to agree with
            logger.warning("capturing %s failed", shape, exc_info=error.__cause__)
            return None

    def _add_failure(self, shape: GraphShape) -> None:
        self._failed.add(shape)
        logger.warning("%s is not captured on all ranks: its steps run eagerly from now on", shape)
        if len(self._failed) == _MAX_FAILED_CAPTURES:
            logger.warning("%d shapes could not be captured: no more are tried", len(self._failed))

    def _check_replay(self, program: Program) -> None:
        """Replay a step of nothing but padding, and compare with the same step run eagerly.

        A graph that points to memory which is no longer the weights' gives something else. All
        graphs are dropped then.
        """
        self._is_doubtful = False
        shape = min(self._captured, key=_size)
        on_host = self._static.load(shape, None)
        self._captured[shape].replay()
        replayed = self._graphs.download(self._captured[shape].ran.result)()
        ran = _run(program, on_host, self._static.on_device(shape))
        expected = self._graphs.download(ran.result)()
        is_wrong = not _agree(replayed.samples, expected.samples)
        # All ranks replay, or all capture anew: a graph holds their sums, too.
        if any_rank(self._collectives, is_wrong, self._device):
            logger.warning("replayed steps went wrong after a resume: all graphs are made anew")
            self._drop_graphs()

    def _drop_graphs(self) -> None:
        self._captured.clear()
        self._graphs.forget()


def _run(program: Program, host: StepInputs[HostArray], inputs: StepInputs[Tensor]) -> Ran:
    """What a graph holds: all rows that logits are wanted of, and the draws from the first."""
    hidden_LE, routing_TLK = program.forward(host, inputs)
    drawn = program.draw(host, inputs, hidden_LE[: inputs.layout.num_drawn_logits])
    return Ran(replace(drawn, routing_TLK=routing_TLK), hidden_LE)


def _without_padding(
    result: StepOutput[Tensor], layout: StepLayout[HostArray], shape: GraphShape
) -> StepOutput[Tensor]:
    """Return the part of a graph's result that the step asked for."""
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
