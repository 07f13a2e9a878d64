"""StepOutput: what one step sampled and scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from numpy.typing import NDArray
from typing_extensions import TypeVar

# The kind of array that holds the values: tensors on the device, NumPy arrays on the host.
Array = TypeVar("Array", default=NDArray[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput(Generic[Array]):
    """The results of S sample rows and P scored tokens, in the order of the plan. N is the largest
    top-n of the step.

    A row's log-probs are in the mode of its request. A row whose logits were not finite has
    `is_finite` False and a meaningless token. Arrays that no request of the step wants are None.
    Where experts are recorded, `routing` has those of the step's T tokens, in the order of the
    plan, in L layers of K each, and `slots` says where the KV of each token was written.
    """

    token_ids: Array  # [S] int64
    is_finite: Array  # [S] bool
    logprobs: Array | None = None  # [S] float32
    ranks: Array | None = None  # [S] int32
    top_ids: Array | None = None  # [S, N] int64
    top_logprobs: Array | None = None  # [S, N] float32
    score_logprobs: Array | None = None  # [P] float32
    score_ranks: Array | None = None  # [P] int32
    score_top_ids: Array | None = None  # [P, N] int64
    score_top_logprobs: Array | None = None  # [P, N] float32
    routing: Array | None = None  # [T, L, K] int16
    slots: NDArray[Any] | None = None  # [T] int64, on the host
