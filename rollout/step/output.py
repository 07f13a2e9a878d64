"""StepOutput: the tokens that one step sampled and scored.

`rollout.worker.model_runner` and `rollout.backends` create it, and
`rollout.backends.executors.transfer` copies it to the host. Executors and StepPipeline pass it on
to Scheduler and OutputProcessor, which read it. It is immutable.

Shape letters: S sample rows, P scored tokens, N the largest top-n of the step, T tokens, L layers
with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic

from numpy.typing import NDArray
from typing_extensions import TypeVar

# Type of the arrays: tensors on the device, NumPy arrays on the host.
Array = TypeVar("Array", default=NDArray[Any])
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult(Generic[Array]):
    """S sampled tokens. Log-probs follow the `logprobs_mode` of each row's request. A row whose
    logits were not finite has `is_finite_S` False and a meaningless token. An array is None if no
    request of the step asked for its values."""

    token_ids_S: Array  # int64
    is_finite_S: Array  # bool
    logprobs_S: Array | None = None  # float32
    ranks_S: Array | None = None  # int32
    top_ids_SN: Array | None = None  # int64
    top_logprobs_SN: Array | None = None  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult(Generic[Array]):
    """Scores of P prompt tokens, computed from the raw logits. An array is None if no request of
    the step asked for its values."""

    logprobs_P: Array  # float32
    ranks_P: Array | None = None  # int32
    top_ids_PN: Array | None = None  # int64
    top_logprobs_PN: Array | None = None  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput(Generic[Array]):
    """Results of one step. Samples, scores and tokens are in the order of the step's StepPlan.

    routing_TLK: the experts of each token; None unless experts are recorded.
    slots_T: the KV cache slot of each token; None unless experts are recorded.
    """

    samples: SampleResult[Array]
    scores: ScoreResult[Array] | None = None  # None if the step scored no token
    routing_TLK: Array | None = None  # int16
    slots_T: NDArray[Any] | None = None  # int64, on the host


def map_arrays(output: StepOutput[Array], convert: Callable[[Array], Other]) -> StepOutput[Other]:
    """Return a copy in which `convert(array)` replaces each array except `slots_T`."""
    routing_TLK = output.routing_TLK
    return StepOutput(
        samples=SampleResult(**_converted(output.samples, convert)),
        scores=None if output.scores is None else ScoreResult(**_converted(output.scores, convert)),
        routing_TLK=None if routing_TLK is None else convert(routing_TLK),
        slots_T=output.slots_T,
    )


def _converted(
    result: SampleResult[Array] | ScoreResult[Array], convert: Callable[[Array], Other]
) -> dict[str, Any]:
    return {
        field.name: convert(array)
        for field in fields(result)
        if (array := getattr(result, field.name)) is not None
    }
