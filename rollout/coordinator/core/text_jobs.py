"""Work that needs the tokenizer, as data: it is done beside the router's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.coordinator.protocol.messages import (
    WireError,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
    unpack_params,
)
from rollout.coordinator.protocol.wire import DEFAULT_MAX_FRAME_BYTES, unpack
from rollout.errors import DetokenizeError, InvalidRequestError, ProtocolError, RolloutError
from rollout.generated_text import shown_text
from rollout.text import Tokenizer

# A record lists a few items per token: ids, times, versions, events.
_MAX_RECORD_ITEMS = 2**24


@dataclass(frozen=True, slots=True)
class Tokenize:
    """The prompt of a group. `sampling_params`: packed, by server id."""

    group_id: int
    text: str
    sampling_params: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """prompt_tokens: int32 [n]. Where the prompt's first token was asked for it is in there now,
    and no longer asked for in `sampling_params`. With an `error`, both are empty."""

    group_id: int
    prompt_tokens: npt.NDArray[np.int32]
    sampling_params: Mapping[int, bytes]
    error: WireError | None = None


@dataclass(frozen=True, slots=True)
class Detokenize:
    """The reply of a request. `record`: packed."""

    server_id: int
    record: bytes


@dataclass(frozen=True, slots=True)
class Detokenized:
    """text: None if the record could not be read, or with the `error` of the tokenizer."""

    server_id: int
    text: str | None
    error: WireError | None = None


TextJob = Tokenize | Detokenize
TextResult = Tokenized | Detokenized


def run_text_job(job: TextJob, tokenizer: Tokenizer) -> TextResult:
    """Do one job. What is wrong with a prompt comes back in the result."""
    if isinstance(job, Detokenize):
        return _detokenize(job, tokenizer)
    try:
        return _tokenize(job, tokenizer)
    except RolloutError as error:
        none = np.empty(0, dtype=np.int32)
        return Tokenized(job.group_id, none, {}, WireError.of(error))


def _tokenize(job: Tokenize, tokenizer: Tokenizer) -> Tokenized:
    params_of = {key: unpack_params(packed) for key, packed in job.sampling_params.items()}
    tokens = tokenizer.encode(job.text)
    if len({params.add_BOS for params in params_of.values()}) > 1:
        raise InvalidRequestError("add_BOS must be the same for all samples of one prompt")
    packed_of = job.sampling_params
    if any(params.add_BOS for params in params_of.values()):
        if tokenizer.bos_id is None:
            raise InvalidRequestError("add_BOS=True, but the tokenizer has no BOS token")
        tokens = [tokenizer.bos_id, *tokens]
        packed_of = {
            key: pack_params(replace(params, add_BOS=False)) for key, params in params_of.items()
        }
    return Tokenized(job.group_id, np.array(tokens, dtype=np.int32), packed_of)


def _detokenize(job: Detokenize, tokenizer: Tokenizer) -> Detokenized:
    """The text of a packed record, without its stop unless that is asked for.

    Read from the plain values: building the record would hold the interpreter for longer than the
    router's loop may wait.
    """
    try:
        record = unpack(job.record, DEFAULT_MAX_FRAME_BYTES)
        return Detokenized(job.server_id, _text_of(record, tokenizer))
    except DetokenizeError as error:
        return Detokenized(job.server_id, None, WireError.of(error))
    except (ProtocolError, LookupError, TypeError, ValueError, OverflowError):
        # The engine's record is the client's to read; text only comes on top.
        return Detokenized(job.server_id, None)


def _text_of(record: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    segments: Sequence[Mapping[str, Any]] = record["requests"]
    last = segments[-1]
    return shown_text(
        tokenizer,
        [token for segment in segments for token in segment["generated_tokens"]],
        finish_reason=last["finish_reason"],
        stop_word_ids=last["stop_word_ids"],
        sampling_params=last["sampling_params"] or {},
    )
