"""RunningRequest: a request's document while tokens are appended to it, in typed arrays."""

from __future__ import annotations

from array import array
from typing import Any

from rollout.requests.codec import TopN
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.version_spans import VersionSpans


class RunningRequest:
    """The record of a request in the engine, and direct references to what grows in it.

    The current segment's values are arrays, not lists: a token takes 4 bytes, not 40. What leaves
    the engine is made complete, with lists. `entry_time` and `last_token_time` are on the monotonic
    clock; the latter is None before the first token of all. `num_prompt` tokens are the prompt of
    the current segment, the last `num_before` of which were generated in earlier ones.
    """

    __slots__ = (
        "entry_time",
        "entry_version",
        "last_token_time",
        "log_probs",
        "num_before",
        "num_entered",
        "num_prompt",
        "policy_spans",
        "record",
        "segment",
        "token_ids",
        "top_n",
        "tpot",
    )

    num_before: int
    num_prompt: int
    policy_spans: VersionSpans
    segment: DynamicInferenceRequest
    token_ids: array[int]
    log_probs: array[float] | None
    top_n: TopN | None
    tpot: array[float] | None

    def __init__(
        self, record: DynamicInferenceRequestRecord, entry_time: float, num_entered: int | None
    ) -> None:
        """`num_entered`: the tokens with which it came from another engine that has not left its
        prompt's scores."""
        self.record, self.entry_time, self.num_entered = record, entry_time, num_entered
        self.last_token_time: float | None = None
        self.entry_version = record[0].weights_version
        self.begin_segment()

    def begin_segment(self) -> None:
        """Put arrays into the current segment, which has generated nothing yet."""
        segment: Any = self.record.current  # its fields are lists for everybody else
        self.segment, self.num_prompt = segment, len(segment.prompt_tokens)
        self.num_before = self.num_prompt - len(self.record[0].prompt_tokens)
        self.policy_spans = segment.policy_spans
        self.token_ids = segment.generated_tokens = array("i")
        self.log_probs = segment.generated_log_probs = _empty("f", segment.generated_log_probs)
        self.tpot = segment.tpot = _empty("d", segment.tpot)
        self.top_n = segment.generated_top_n_logprobs

    def checkpoint(self) -> None:
        """Go on in a new segment, whose prompt is all tokens so far."""
        self.record.checkpoint()
        self.begin_segment()


def _empty(typecode: str, values: object) -> array[float] | None:
    """An array if values are kept, None if they were not asked for."""
    return None if values is None else array(typecode)
