"""DynamicInferenceRequestRecord: the history of one request over its checkpoints.

InputProcessor creates records, and OutputProcessor owns unfinished ones.
`rollout.coordinator.protocol.packed` encodes them, `rollout.generated_text` adds texts, and
`rollout.apis.streaming`, `rollout.serve.health` and `rollout.serve.page.recent` merge them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.errors import EngineStateError, ProtocolError
from rollout.requests.codec import decode_value
from rollout.requests.columns import PROMPT_FIELDS, TOKEN_COLUMNS, Array, TokenColumn
from rollout.requests.dynamic_request import DynamicInferenceRequest, DynamicVLMInferenceRequest
from rollout.requests.event import DynamicInferenceEvent, DynamicInferenceEventType
from rollout.requests.request import Status
from rollout.requests.routing import first_known
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans

Segments = Sequence[DynamicInferenceRequest]
# Fields that are None in the segment after a checkpoint.
_CLEARED_BY_CHECKPOINT = (
    "prompt",
    "inference_parameters",
    "finish_reason",
    "stop_reason",
    "segments",
    "generated_length",
    "generated_text",
    "generated_segments",
    "generated_sequence_lengths",
    *PROMPT_FIELDS,
    "latency",
    "ttft",
    "routing_indices",
    "completed_at_version",
)


@dataclass(eq=False)
class DynamicInferenceRequestRecord:
    """All segments of one request, oldest first; only the last one grows. `latency` is in seconds.

    A checkpoint appends a segment, whose prompt is all tokens so far. `merge` joins the segments
    into the request that a user gets.

    The last segment holds the record's clocks: the versions from which staleness is counted. An
    engine sets them with `observe_version` before it returns a record. Outside of an engine,
    `increment_staleness` advances them.
    """

    requests: list[DynamicInferenceRequest] = field(default_factory=list)
    latency: float | None = None

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> DynamicInferenceRequestRecord:
        """Return a record whose only segment is `request`."""
        return cls(requests=[request])

    def __getitem__(self, idx: int) -> DynamicInferenceRequest:
        """Return the segment with index `idx`, from 0."""
        return self.requests[idx]

    @property
    def current(self) -> DynamicInferenceRequest:
        """The last segment."""
        return self.requests[-1]

    def values_from(self, column: TokenColumn, start: int = 0) -> Any:
        """Return the column's values of all segments, from generated token `start` on.

        A segment without values contributes the column's placeholder for each token, so that values
        stay aligned with tokens. Returns None if no segment has values, and an array if all parts
        are arrays.
        """
        held = [segment.column(column.field) for segment in self.requests]
        if all(own is None for own in held):
            return None
        parts: list[Any] = []
        for segment, own in zip(self.requests, held, strict=True):
            num_tokens = segment.num_generated_tokens
            if start < num_tokens:
                num_left, has_none = num_tokens - start, own is None or not len(own)
                parts.append([*column.placeholder] * num_left if has_none else own[start:])
            start = max(0, start - num_tokens)
        return _joined(parts)

    @property
    def request_id(self) -> int:
        """The id that all segments share."""
        return self.requests[0].request_id

    @property
    def policy_clock(self) -> int:
        """Version from which policy staleness is counted. It begins as the `weights_version`."""
        clock = self.current.policy_clock
        return self.current.weights_version if clock is None else clock

    @property
    def kv_clock(self) -> int:
        """Version from which KV staleness is counted. It begins as the `weights_version`."""
        clock = self.current.kv_clock
        return self.current.weights_version if clock is None else clock

    def observe_version(self, version: int) -> None:
        """Set both clocks to an engine's version. The staleness of a completed request does not
        change, because it is counted from `completed_at_version`."""
        self.current.policy_clock = version
        self.current.kv_clock = version

    def increment_staleness(self, policy_only: bool = False) -> None:
        """Age all tokens so far by one version, unless the request is completed. `policy_only`
        leaves the KV clock unchanged, for a request that has no KV."""
        request = self.current
        policy_clock, kv_clock = self.policy_clock, self.kv_clock
        if request.completed_at_version is not None:
            return
        request.policy_spans = request.stamped_policy_spans()
        request.policy_clock = policy_clock + 1
        if policy_only:
            request.kv_clock = kv_clock
            return
        request.kv_spans.append(request.num_tokens - len(request.kv_spans), kv_clock)
        request.kv_clock = kv_clock + 1

    def checkpoint(self, tokenizer: object = None) -> None:
        """Append a segment whose prompt is all tokens so far, which an engine prefills again.

        Policy spans continue, and KV spans start empty. num_tokens_to_generate and min_tokens
        shrink by the number of generated tokens. The new segment keeps the request's ADD_ENGINE
        event, or adds one if there is none. `tokenizer` is accepted for compatibility and ignored.
        Raises EngineStateError if no token is left to generate.
        """
        old = self.current
        params = _remaining_params(old)
        entry = old.event_add_engine or self.entry_event()
        known_tokens = _followed_by(old.prompt_tokens, [old.column("generated_tokens")])
        self._share_prompts(known_tokens)
        changes: dict[str, Any] = dict.fromkeys(_CLEARED_BY_CHECKPOINT)
        changes |= {c.field: _empty_like(old.column(c.field)) for c in TOKEN_COLUMNS}
        self.requests.append(
            dataclasses.replace(
                old,
                **changes,
                prompt_tokens=known_tokens,
                sampling_params=params,
                status=Status.WAITING_IN_QUEUE,
                finished_chunk_token_count=0,
                precomputed_block_hashes=[],
                events=[],
                event_add_engine=entry,
                policy_spans=old.stamped_policy_spans(),
                kv_spans=VersionSpans(),
            )
        )
        if entry is None:
            self.current.add_event_add_engine()

    def entry_event(self) -> DynamicInferenceEvent | None:
        """Return the request's first ADD_ENGINE event; None if there is none."""
        # A deserialized record has no `event_add_engine`, so `events` are searched.
        events = (event for segment in self.requests for event in segment.events)
        entries = (e for e in events if e.type is DynamicInferenceEventType.ADD_ENGINE)
        return next(entries, None)

    def _share_prompts(self, known_tokens: torch.Tensor) -> None:
        """Make the segments' prompts views of `known_tokens`, so that the tokens are stored
        once."""
        address = self.current.prompt_tokens.data_ptr()
        for segment in self.requests:
            # Each prompt that starts at this address is a prefix of the longer ones.
            if segment.prompt_tokens.data_ptr() == address:
                segment.prompt_tokens = known_tokens[: len(segment.prompt_tokens)]

    def copy(self) -> DynamicInferenceRequestRecord:
        """Return a complete copy as of now, with its own segments and prompts."""
        copied = DynamicInferenceRequestRecord(
            [segment.copy() for segment in self.requests], self.latency
        )
        copied._share_prompts(self.current.prompt_tokens.clone())
        for own, segment in zip(copied.requests, self.requests, strict=True):
            if own.prompt_tokens is segment.prompt_tokens:  # not a view of the last prompt
                own.prompt_tokens = segment.prompt_tokens.clone()
        return copied

    def merge(self, tokenizer: object = None) -> DynamicInferenceRequest:
        """Return the history as one request, as if it had never been checkpointed.

        Prompt scores come from `segment_of_prompt`, other prompt fields from the first segment,
        and the outcome from the last. Values per token and events are joined. Log-probs are float32
        tensors. A position's experts come from the first segment that recorded them. The record
        does not change. `tokenizer` is ignored, for compatibility. Raises EngineStateError without
        segments.
        """
        if not self.requests:
            raise EngineStateError("an empty record has nothing to merge; begin with from_request")
        first, last = self.requests[0], self.current
        num_chunk_tokens = min(last.finished_chunk_token_count, len(first.prompt_tokens))
        return dataclasses.replace(
            first,
            **_joined_fields(self),
            status=last.status,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            finished_chunk_token_count=num_chunk_tokens,
            precomputed_block_hashes=vars(first)["precomputed_block_hashes"],
            latency=self.latency,
            ttft=_time_to_first_token(self.requests),
            completed_at_version=last.completed_at_version,
            policy_clock=self.policy_clock,
            kv_clock=self.kv_clock,
            policy_spans=last.stamped_policy_spans(),
            kv_spans=last.kv_spans.copy(),
        )

    def serialize(self) -> dict[str, Any]:
        """Return the record as a dictionary for msgpack. Only the first segment's prompt is
        included, if each segment continues the previous one."""
        encoded = [request.serialize() for request in self.requests]
        self._drop_known_prompts(encoded)
        return {"requests": encoded, "latency": self.latency}

    def serialize_apart(self) -> list[tuple[dict[str, Any], dict[str, Array]]]:
        """Return each segment as a pair: plain values, and arrays per token. Only the first
        segment's prompt is included, if each segment continues the previous one."""
        encoded = [request.serialize_apart() for request in self.requests]
        self._drop_known_prompts([segment for segment, _ in encoded])
        return encoded

    def _drop_known_prompts(self, encoded: Sequence[dict[str, Any]]) -> None:
        if all(_continues(old, new) for old, new in pairwise(self.requests)):
            for segment in encoded[1:]:
                segment["prompt_tokens"] = None

    @classmethod
    def deserialize(cls, obj: Mapping[str, Any]) -> DynamicInferenceRequestRecord:
        """Return the record that `serialize` encoded. Raises ProtocolError unless `obj` is a
        mapping with the keys of a record. Malformed segments raise other errors, too."""
        if not isinstance(obj, Mapping):
            raise ProtocolError(
                f"not an encoded record but a {type(obj).__name__}; pass the dictionary that "
                "serialize returned"
            )
        if obj.keys() != {"requests", "latency"}:
            raise ProtocolError(f"not an encoded record: it has the keys {sorted(obj)}")
        encoded = [*obj["requests"]]
        if any(segment.get("prompt_tokens", ()) is None for segment in encoded[1:]):
            encoded = _with_prompts(encoded)
        return cls(
            requests=[_deserialize_segment(request) for request in encoded],
            latency=obj["latency"],
        )


def _remaining_params(request: DynamicInferenceRequest) -> SamplingParams | None:
    """Return the params of the next segment, reduced by the tokens that were generated. Raises
    EngineStateError if no token is left to generate."""
    params = request.sampling_params
    if params is None:
        return None
    min_left = max(0, params.min_tokens - request.num_generated_tokens)
    if params.num_tokens_to_generate is None:
        return dataclasses.replace(params, min_tokens=min_left)
    num_left = params.num_tokens_to_generate - request.num_generated_tokens
    if num_left < 1:
        raise EngineStateError(
            f"request {request.request_id} has generated all of its "
            f"{params.num_tokens_to_generate} tokens; only an unfinished one can be checkpointed"
        )
    return dataclasses.replace(params, num_tokens_to_generate=num_left, min_tokens=min_left)


def _empty_like(values: object) -> list[Any] | None:
    """Return an empty list, or None if `values` is None because they were not requested."""
    return None if values is None else []


def _followed_by(prompt_tokens: torch.Tensor, generated: Iterable[Sequence[int]]) -> torch.Tensor:
    """Return a new tensor of the prompt followed by the tokens of all lists in `generated`."""
    parts = [torch.from_numpy(np.array(tokens, dtype=np.int64)) for tokens in generated]
    return torch.cat([prompt_tokens, *parts])


def _continues(old: DynamicInferenceRequest, new: DynamicInferenceRequest) -> bool:
    """Return whether the new segment's prompt is all tokens of the old segment."""
    num_prompt, num_known = len(old.prompt_tokens), old.num_tokens
    return (
        len(new.prompt_tokens) == num_known
        and np.array_equal(new.prompt_tokens[num_prompt:].numpy(), old.column("generated_tokens"))
        and (
            new.prompt_tokens.data_ptr() == old.prompt_tokens.data_ptr()
            or torch.equal(new.prompt_tokens[:num_prompt], old.prompt_tokens)
        )
    )


def _with_prompts(encoded: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the encoded segments, each with its prompt: all tokens of the segment before. Raises
    ProtocolError if a token field does not hold tokens."""
    try:
        generated = [segment["generated_tokens"] for segment in encoded]
        prompt_tokens = torch.as_tensor(decode_value(encoded[0]["prompt_tokens"]))
        known_tokens = _followed_by(prompt_tokens, generated)
        ends = accumulate((len(tokens) for tokens in generated), initial=len(prompt_tokens))
    except (TypeError, ValueError, OverflowError, RuntimeError) as fault:
        raise ProtocolError(f"a token field of a segment has no tokens: {fault!r:.200}") from fault
    return [
        {**segment, "prompt_tokens": known_tokens[:end]}
        for segment, end in zip(encoded, ends, strict=False)
    ]


def _deserialize_segment(obj: Mapping[str, Any]) -> DynamicInferenceRequest:
    request_type = DynamicVLMInferenceRequest if "imgs" in obj else DynamicInferenceRequest
    return request_type.deserialize(obj)


# ---- merging the values of several segments


def _joined_fields(record: DynamicInferenceRequestRecord) -> dict[str, Any]:
    """Return the fields of a merged request that depend on more than one segment."""
    segments = record.requests
    prefilled = segment_of_prompt(segments)
    joined: dict[str, Any] = {name: prefilled.column(name) for name in PROMPT_FIELDS}
    joined |= {column.field: record.values_from(column) for column in TOKEN_COLUMNS}
    for name in ("prompt_log_probs", "generated_log_probs"):
        joined[name] = _log_probs_tensor(joined[name])
    return {
        **joined,
        "generated_length": sum(s.num_generated_tokens for s in segments),
        "generated_text": _text(segments),
        "routing_indices": first_known(
            [s.routing_indices for s in segments], max(0, segments[-1].num_tokens - 1)
        ),
        "events": [event for segment in segments for event in segment.events],
    }


def _joined(parts: Sequence[Any]) -> Any:
    """Return the values of all parts in sequence: an array if all parts are arrays, else a list."""
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return [v for p in parts for v in (p if isinstance(p, list) else p.tolist())]


def segment_of_prompt(segments: Segments) -> DynamicInferenceRequest:
    """Return the segment that has the prompt's log-probs, ranks and top-n. It is the last segment
    with the original prompt. A request that was evicted before its first token has several such
    segments."""
    num_prompt_tokens = len(segments[0].prompt_tokens)
    return [s for s in segments if len(s.prompt_tokens) == num_prompt_tokens][-1]


def _log_probs_tensor(
    log_probs: torch.Tensor | npt.NDArray[Any] | list[float] | None,
) -> torch.Tensor | None:
    """Return log-probs as a float32 tensor [num_tokens] on the CPU; None stays None."""
    if log_probs is None:
        return None
    if isinstance(log_probs, np.ndarray):
        return torch.tensor(log_probs, dtype=torch.float32)  # a copy, which may be written
    return torch.as_tensor(log_probs, dtype=torch.float32, device="cpu")


def _time_to_first_token(segments: Segments) -> float | None:
    """Return the first `ttft` that is set; None if there is no value. Without `ttft`, return the
    seconds from ADD_ENGINE to the first GENERATED_TOKEN event. These events are optional."""
    for segment in segments:
        if segment.ttft is not None:
            return segment.ttft
        added = segment.event_add_engine
        for event in segment.events:
            if event.type is DynamicInferenceEventType.GENERATED_TOKEN and added is not None:
                return event.timestamp - added.timestamp
    return None


def _text(segments: Segments) -> str | None:
    """Return the joined texts of the segments with generated tokens; None if any of them has no
    text. If no segment has generated tokens, the last segment's text is returned."""
    written = [segment for segment in segments if segment.num_generated_tokens] or segments[-1:]
    texts = [segment.generated_text for segment in written]
    if any(text is None for text in texts):
        return None
    return "".join(text for text in texts if text is not None)
