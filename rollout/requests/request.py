"""InferenceRequest: a prompt, its sampling parameters, and the result.

DynamicInferenceRequest, which engines return, is derived from InferenceRequest.
`rollout.requests.record`, `rollout.engine.output_processor`, `rollout.apis.streaming` and
`rollout.testing` use Status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

import torch

from rollout.requests.codec import (
    SAMPLING_PARAMS,
    TOP_N,
    FieldCodec,
    TopN,
    decode_fields,
    encode_fields,
)
from rollout.requests.columns import TOP_N_FIELDS
from rollout.sampling_params import SamplingParams

Request = TypeVar("Request", bound="InferenceRequest")


class Status(Enum):
    """Status of a request. It is serialized by name, not by number."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


# eq=False here and below: tensors have no single truth value, so requests compare by identity.
@dataclass(kw_only=True, eq=False)
class InferenceRequest:
    """One inference request.

    arrival_time: seconds since the epoch.
    tpot: seconds from the previous token to each generated token; for the first token, from the
        request's entry.
    inference_parameters: former name of `sampling_params`, used if `sampling_params` is None.
    *_log_probs: float32, one per token; prompt positions start at the second token.
    *_ranks: 1 + the number of tokens with a larger logit, one per log-prob; 0 if unknown.
    *_top_n_logprobs: one dictionary {token id: log-prob} per token; None where values are missing.
    """

    request_id: int
    prompt: str | None = None
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None
    prompt_tokens: torch.Tensor | list[int] | None = None
    arrival_time: float | None = None
    status: Status | None = None
    encoder_prompt: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: list[int] | None = None
    generated_tokens: torch.Tensor | list[int] | None = None
    prompt_log_probs: torch.Tensor | list[float] | None = None
    generated_log_probs: torch.Tensor | list[float] | None = None
    prompt_ranks: list[int] | None = None
    generated_ranks: list[int] | None = None
    prompt_top_n_logprobs: TopN | None = None
    generated_top_n_logprobs: TopN | None = None
    generated_length: int | None = None
    tpot: list[float] | None = None

    _codecs: ClassVar[Mapping[str, FieldCodec]] = {
        "sampling_params": SAMPLING_PARAMS,
        "inference_parameters": SAMPLING_PARAMS,
        "status": FieldCodec(lambda status: status.name, lambda name: Status[name]),
        **dict.fromkeys(TOP_N_FIELDS, TOP_N),
    }

    def __post_init__(self) -> None:
        if self.sampling_params is None:
            self.sampling_params = self.inference_parameters

    def serialize(self) -> dict[str, Any]:
        """Return all fields as a dictionary for msgpack. Tensors become dtype, shape and bytes."""
        return encode_fields(self, self._codecs)

    @classmethod
    def deserialize(cls: type[Request], obj: Mapping[str, Any]) -> Request:
        """Return the request that `serialize` encoded. Raises ProtocolError for unknown, missing or
        unreadable fields. A readable field with an illegal value raises its own error, such as
        InvalidRequestError."""
        return decode_fields(cls, obj, cls._codecs)


@dataclass(kw_only=True, eq=False)
class VLMInferenceRequest(InferenceRequest):
    """A request with images. `imgs` and `num_tiles` hold the images and their tile counts, in the
    vision model's format."""

    num_img_embeddings_per_tile: int
    imgs: torch.Tensor
    num_tiles: torch.Tensor
    decoder_seq_length: int
