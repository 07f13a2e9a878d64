"""submission_of: checks a prompt and its sampling params, and makes the message to send.

Used by `rollout.coordinator.client.inference_client`, which passes each Submission to
`rollout.coordinator.client.pending_requests`. It keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.coordinator.protocol.messages import Sample, SubmitRequest
from rollout.coordinator.protocol.packed import pack_params
from rollout.errors import InvalidRequestError
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from rollout.text import Prompt, Tokenizer, encode_prompt


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked group of samples of one prompt.

    text: the prompt if it was given as text, else None.
    error: error with which all samples fail because the tokenizer failed, else None."""

    message: SubmitRequest
    text: str | None
    error: InvalidRequestError | None


def submission_of(
    prompt: Prompt,
    sampling_params: Sequence[SamplingParams],
    *,
    tokenizer: Tokenizer | None,
    request_ids: Sequence[int],
    seeds: Sequence[int | None] | None,
    client_seed: int,
    priority: int,
    deadline_s: float | None,
    streaming: bool,
) -> Submission:
    """Return the submission of samples of one prompt. A sample's seed is its entry in `seeds`, else
    its params' seed, else a mix of `client_seed` and its request id. Raises InvalidRequestError for
    a wrong argument. A failure of the tokenizer is returned in the submission's `error`."""
    given = _checked_seeds(seeds, sampling_params)
    _check_int("priority", priority, -(2**63), 2**63 - 1)
    if deadline_s is not None and not 0.0 <= deadline_s <= 1e9:
        raise InvalidRequestError(f"deadline_s={deadline_s!r} must be in [0, 1e9], or None")
    if type(streaming) is not bool:
        raise InvalidRequestError(f"streaming={streaming!r} must be True or False")
    error = None
    if isinstance(prompt, str):
        tokens_N, error = _encoded(tokenizer, prompt, sampling_params)
        if sampling_params[0].add_BOS:  # the tokens include it now
            sampling_params = [replace(params, add_BOS=False) for params in sampling_params]
    else:
        tokens_N = _checked_ids(prompt)
    if streaming:
        sampling_params = [replace(params, streaming=True) for params in sampling_params]
    # Most samples share their params, which are packed once.
    packed = {key: pack_params(p) for key, p in {id(p): p for p in sampling_params}.items()}
    samples = tuple(
        Sample(
            request_id=request_id,
            sampling_params=packed[id(params)],
            seed=_seed_of(seed, params, client_seed, request_id),
        )
        for request_id, params, seed in zip(request_ids, sampling_params, given, strict=True)
    )
    message = SubmitRequest(
        samples=samples,
        prompt_tokens=tokens_N,
        priority=priority,
        deadline_s=None if deadline_s is None else float(deadline_s),
        streaming=streaming,
    )
    return Submission(message, prompt if isinstance(prompt, str) else None, error)


def _checked_seeds(
    seeds: Sequence[int | None] | None, sampling_params: Sequence[SamplingParams]
) -> Sequence[int | None]:
    if not sampling_params:
        raise InvalidRequestError("a group needs at least one SamplingParams")
    given = [None] * len(sampling_params) if seeds is None else seeds
    if len(given) != len(sampling_params):
        raise InvalidRequestError(
            f"{len(given)} seeds for {len(sampling_params)} samples; give one for each, or None"
        )
    for params in sampling_params:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"expected SamplingParams, got {type(params).__name__}")
    for seed in given:
        _check_int("seed", seed, -(2**63), 2**64 - 1, optional=True)
    return given


def _seed_of(seed: int | None, params: SamplingParams, client_seed: int, request_id: int) -> int:
    if seed is not None:
        return seed
    return mix_seed(client_seed, request_id) if params.seed is None else params.seed


def _encoded(
    tokenizer: Tokenizer | None, text: str, sampling_params: Sequence[SamplingParams]
) -> tuple[npt.NDArray[np.int32], InvalidRequestError | None]:
    """Return the token ids of a text and None, or no ids and an error if the tokenizer failed.
    Raises InvalidRequestError for an empty text, a missing tokenizer, a wrong `add_BOS` and invalid
    ids."""
    if not text:
        raise InvalidRequestError("the prompt is empty; give it at least one token")
    if tokenizer is None:
        raise InvalidRequestError(
            "a text prompt needs a tokenizer: pass tokenizer=DIR to AsyncLLM.connect or "
            "InferenceClient, or give token ids"
        )
    add_bos = {params.add_BOS for params in sampling_params}
    if len(add_bos) > 1:
        raise InvalidRequestError("add_BOS must be the same for all samples of one prompt")
    if True in add_bos and tokenizer.bos_id is None:
        raise InvalidRequestError("add_BOS=True, but the tokenizer has no BOS token")
    try:
        tokens = encode_prompt(tokenizer, text, add_bos=True in add_bos)
    except Exception as fault:  # the tokenizer is the user's: it may raise anything
        reason = f"the tokenizer cannot encode the prompt {text[:40]!r}: {fault!r}"
        return np.empty(0, np.int32), InvalidRequestError(reason)
    return _checked_ids(tokens), None


def _checked_ids(prompt: Sequence[int | None]) -> npt.NDArray[np.int32]:
    """Return token ids as int32 [n]. The upper bound of the vocabulary is not checked. Raises
    InvalidRequestError unless `prompt` is a flat, non-empty list of integers in [0, 2**31)."""
    if not isinstance(prompt, Sized) or getattr(prompt, "ndim", 1) == 0:
        raise InvalidRequestError(f"the prompt must be text or token ids, not {prompt!r}")
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty; give it at least one token")
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
