"""StepOutput: what one forward pass sampled, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """S sample rows and P scored tokens in the order of the plan; N is the largest top-n asked for.

    `logprobs` are in each row's own mode. A row whose logits were not finite has `is_finite` False
    and a meaningless token. Arrays nobody asked for are None.
    """

    token_ids: NDArray[np.int64]  # [S]
    is_finite: NDArray[np.bool_]  # [S]
    logprobs: NDArray[np.float32] | None = None  # [S]
    top_ids: NDArray[np.int64] | None = None  # [S, N]
    top_logprobs: NDArray[np.float32] | None = None  # [S, N]
    score_logprobs: NDArray[np.float32] | None = None  # [P]
    score_top_ids: NDArray[np.int64] | None = None  # [P, N]
    score_top_logprobs: NDArray[np.float32] | None = None  # [P, N]
