"""How the values of several segments become those of one request.

A segment that was generated without values contributes placeholders, one per generated token, so
that values stay aligned with tokens. If no segment has values the result is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.requests.columns import COLUMNS
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.event import DynamicInferenceEventType

Segments = Sequence[DynamicInferenceRequest]


def concatenated_fields(segments: Segments) -> dict[str, Any]:
    """Return the fields of a merged request that are its segments' fields, one after the other."""
    log_probs = values_from(segments, "generated_log_probs", float("nan"))
    return {
        "generated_tokens": _joined([s.column("generated_tokens") for s in segments]),
        "generated_length": sum(s.num_generated_tokens for s in segments),
        "generated_text": _text(segments),
        "generated_log_probs": log_probs_tensor(log_probs),
        "generated_top_n_logprobs": values_from(segments, "generated_top_n_logprobs", None),
        "tpot": values_from(segments, "tpot", float("nan")),
        "routing_indices": _routing(segments),
        "events": [event for segment in segments for event in segment.events],
        "context_kv_version_min": _joined([s.column("context_kv_version_min") for s in segments]),
        "context_kv_version_mean": _joined([s.column("context_kv_version_mean") for s in segments]),
    }


def values_from(segments: Segments, name: str, placeholder: object, *, start: int = 0) -> Any:
    """Return the values `name` of all segments, from generated token `start` on.

    `placeholder` stands where a segment has no values. Returns None if no segment has any, an array
    if all are arrays.
    """
    columns = [getattr(s, name) if name not in COLUMNS else s.column(name) for s in segments]
    if all(own is None for own in columns):
        return None
    parts: list[Any] = []
    for segment, own in zip(segments, columns, strict=True):
        num_tokens = segment.num_generated_tokens
        if start < num_tokens:
            has_none = own is None or not len(own)
            parts.append([placeholder] * (num_tokens - start) if has_none else own[start:])
        start = max(0, start - num_tokens)
    return _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    """Return the values of lists, arrays and tensors: an array if all are, else a list."""
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return [v for p in parts for v in (p if isinstance(p, list) else p.tolist())]


def segment_of_prompt(segments: Segments) -> DynamicInferenceRequest:
    """Return the segment that answers for the original prompt: the last one that has no other.

    It is the first segment, unless that was evicted before its first token and started over.
    """
    num_prompt_tokens = len(segments[0].prompt_tokens)
    return [s for s in segments if len(s.prompt_tokens) == num_prompt_tokens][-1]


def log_probs_tensor(
    log_probs: torch.Tensor | npt.NDArray[Any] | list[float] | None,
) -> torch.Tensor | None:
    """Return log-probs as a float32 tensor [num_tokens] on the CPU, None if there are none."""
    if log_probs is None:
        return None
    if isinstance(log_probs, np.ndarray):
        return torch.tensor(log_probs, dtype=torch.float32)  # a copy, which may be written
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
            known[0].new_full((segment.num_generated_tokens, *shape), -1)
            if segment.routing_indices is None
            else segment.routing_indices
            for segment in segments
        ]
    )


def _text(segments: Segments) -> str | None:
    """Return the generated text, or None if a segment with tokens, or the only one, has none."""
    written = [segment for segment in segments if segment.num_generated_tokens] or segments[-1:]
    texts = [segment.generated_text for segment in written]
    if any(text is None for text in texts):
        return None
    return "".join(text for text in texts if text is not None)
