"""How the values of several segments become those of one request.

A segment that was generated without values contributes placeholders, one per generated token, so
that values stay aligned with tokens. If no segment has values the result is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.event import DynamicInferenceEventType

Segments = Sequence[DynamicInferenceRequest]


def concatenated_fields(segments: Segments) -> dict[str, Any]:
    """Return the fields of a merged request that are its segments' fields, one after the other."""
    log_probs = values_from(segments, "generated_log_probs", float("nan"))
    tokens = [token for segment in segments for token in segment.generated_tokens]
    return {
        "generated_tokens": tokens,
        "generated_length": len(tokens),
        "generated_text": _text(segments),
        "generated_log_probs": log_probs_tensor(log_probs),
        "generated_top_n_logprobs": values_from(segments, "generated_top_n_logprobs", None),
        "tpot": values_from(segments, "tpot", float("nan")),
        "routing_indices": _routing(segments),
        "events": [event for segment in segments for event in segment.events],
        "context_kv_version_min": [v for s in segments for v in s.context_kv_version_min],
        "context_kv_version_mean": [v for s in segments for v in s.context_kv_version_mean],
    }


def values_from(
    segments: Segments, name: str, placeholder: object, *, start: int = 0
) -> list[Any] | None:
    """Return list or tensor `name` of all segments, from generated token `start` on.

    `placeholder` stands where a segment has no values. Returns None if no segment has any.
    """
    if all(getattr(segment, name) is None for segment in segments):
        return None
    values: list[Any] = []
    for segment in segments:
        num_tokens, own = len(segment.generated_tokens), getattr(segment, name)
        if start < num_tokens:
            if own is None or not len(own):
                values += [placeholder] * (num_tokens - start)
            else:
                own = own[start:]
                values += own.tolist() if isinstance(own, torch.Tensor) else own
        start = max(0, start - num_tokens)
    return values


def segment_of_prompt(segments: Segments) -> DynamicInferenceRequest:
    """Return the segment that answers for the original prompt: the last one that has no other.

    It is the first segment, unless that was evicted before its first token and started over.
    """
    num_prompt_tokens = len(segments[0].prompt_tokens)
    return [s for s in segments if len(s.prompt_tokens) == num_prompt_tokens][-1]


def log_probs_tensor(log_probs: torch.Tensor | list[float] | None) -> torch.Tensor | None:
    """Return log-probs as a float32 tensor [num_tokens] on the CPU, None if there are none."""
    if log_probs is None:
        return None
    return torch.as_tensor(log_probs, dtype=torch.float32, device="cpu")


def time_to_first_token(segments: Segments) -> float | None:
    """Return seconds from ADD_ENGINE to the first token of any segment, None without either.

    A segment that logged no GENERATED_TOKEN events has its `ttft` set by whoever generated it.
    """
    for segment in segments:
        if segment.ttft is not None:
            return segment.ttft
        added = segment.event_add_engine
        for event in segment.events:
            if event.type is DynamicInferenceEventType.GENERATED_TOKEN and added is not None:
                return event.timestamp - added.timestamp
    return None


def _routing(segments: Segments) -> torch.Tensor | None:
    """Return the routing indices along tokens; -1, which is no expert, where there are none."""
    known = [s.routing_indices for s in segments if s.routing_indices is not None]
    if not known:
        return None
    shape = known[0].shape[1:]
    return torch.cat(
        [
            known[0].new_full((len(segment.generated_tokens), *shape), -1)
            if segment.routing_indices is None
            else segment.routing_indices
            for segment in segments
        ]
    )


def _text(segments: Segments) -> str | None:
    """Return the generated text, or None if a segment with tokens, or the only one, has none."""
    written = [segment for segment in segments if segment.generated_tokens] or segments[-1:]
    texts = [segment.generated_text for segment in written]
    if any(text is None for text in texts):
        return None
    return "".join(text for text in texts if text is not None)
