"""What a user gives as a request, checked and brought to the form of a SubmitRequest."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.coordinator.protocol.messages import (
    Sample,
    SubmitRequest,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
)
from rollout.errors import InvalidRequestError
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed

# Text, or token ids: a list, an array or a tensor.
Prompt = str | Sequence[int]


def submission_of(
    prompt: Prompt,
    sampling_params: Sequence[SamplingParams],
    *,
    request_ids: Sequence[int],
    seeds: Sequence[int | None] | None,
    client_seed: int,
    priority: int,
    deadline_s: float | None,
    streaming: bool,
) -> SubmitRequest:
    """Return the submission of samples of one prompt. Raises InvalidRequestError.

    A sample's seed is the one given, else that of its params, else mix(client seed, request id).
    """
    if not sampling_params:
        raise InvalidRequestError("a group needs at least one SamplingParams")
    given = [None] * len(sampling_params) if seeds is None else seeds
    if len(given) != len(sampling_params):
        raise InvalidRequestError(
            f"{len(given)} seeds for {len(sampling_params)} samples; give one for each, or none"
        )
    for params in sampling_params:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"expected SamplingParams, got {type(params).__name__}")
    for seed in given:
        _check_int("seed", seed, -(2**63), 2**64 - 1, optional=True)
    _check_int("priority", priority, -(2**63), 2**63 - 1)
    if deadline_s is not None and not 0.0 <= deadline_s <= 1e9:
        raise InvalidRequestError(f"deadline_s={deadline_s!r} must be in [0, 1e9], or None")
    samples = tuple(
        Sample(
            request_id=request_id,
            sampling_params=pack_params(params),
            seed=_seed_of(seed, params, client_seed, request_id),
        )
        for request_id, params, seed in zip(request_ids, sampling_params, given, strict=True)
    )
    checked = _checked_prompt(prompt)
    return SubmitRequest(
        samples=samples,
        prompt=checked if isinstance(checked, str) else None,
        prompt_tokens=None if isinstance(checked, str) else checked,
        priority=priority,
        deadline_s=None if deadline_s is None else float(deadline_s),
        streaming=streaming,
    )


def _seed_of(seed: int | None, params: SamplingParams, client_seed: int, request_id: int) -> int:
    if seed is not None:
        return seed
    return mix_seed(client_seed, request_id) if params.seed is None else params.seed


def _checked_prompt(prompt: Prompt) -> str | npt.NDArray[np.int32]:
    """Text as it is, ids as int32 [n]. The vocabulary is known to the engines only."""
    if not isinstance(prompt, Sized) or getattr(prompt, "ndim", 1) == 0:
        raise InvalidRequestError(f"the prompt must be text or token ids, not {prompt!r}")
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty; give it at least one token")
    if isinstance(prompt, str):
        return prompt
    try:
        ids_N = np.asarray(prompt)
    except (TypeError, ValueError) as fault:
        raise InvalidRequestError(f"the prompt must be text or token ids: {fault}") from fault
    if ids_N.ndim != 1 or ids_N.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"the prompt must be text or a flat list of token ids, got {ids_N.dtype} values in the "
            f"shape {list(ids_N.shape)}"
        )
    low, high = int(ids_N.min()), int(ids_N.max())
    if low < 0 or high >= 2**31:
        raise InvalidRequestError(f"token id {low if low < 0 else high} is not in [0, 2**31)")
    return ids_N.astype(np.int32)


def _check_int(name: str, value: Any, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(f"{name}={value!r} must be an integer in [{low}, {high}]")
