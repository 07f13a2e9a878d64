"""Rollout: one sample of a prompt, with the tokens of its turns and its reward.

Used by users' rollout functions, `trainer_hooks.environments`, `trainer_hooks.producer`,
`trainer_hooks.rewards.scoring`, `trainer_hooks.collate`, `trainer_hooks.evaluation` and
`trainer_hooks.doctor`. A Rollout never changes after construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """The requests of one sample, one per turn in order, and the results of its environment.

    A turn usually continues the previous turn: its prompt is all tokens of the previous turn, as
    sampled, plus the text that a tool or user added. Such turns form one token sequence. A turn
    whose prompt does not begin with the previous turn's tokens starts another token sequence. For
    example, some chat templates drop earlier thinking.
    `sequence_starts`: indices of the turns that start a token sequence. The first is 0.
    `reward`: the rollout's own reward. None leaves the reward to the reward function. A number is
    added to that function's result. NaN marks a failed rollout.
    `reward_terms`: named parts of the reward, for metrics.
    `state`: JSON-able notes for people, written to completions.jsonl.
    `columns`: columns for the reward function. They override prompt columns of the same name.
    `failure`: kind of fault that ended the rollout, such as "step_timeout". The rollout then counts
    as failed and may have no turns.
    `is_truncated`: True if a limit ended the rollout between two turns.
    Raises ConfigError for a rollout with neither requests nor a failure, for `sequence_starts` that
    are not ascending turn indices, and for a prompt that does not extend the previous turn.
    """

    requests: Sequence[DynamicInferenceRequest]
    _: KW_ONLY
    sequence_starts: Sequence[int] = (0,)
    reward: float | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    is_truncated: bool = False

    def __post_init__(self) -> None:
        if not self.requests and self.failure is None:
            raise ConfigError("a rollout needs at least one request")
        starts = list(self.sequence_starts)
        is_sorted = all(low < high for low, high in pairwise(starts))
        if starts[:1] != [0] or not is_sorted or starts[-1] >= max(len(self.requests), 1):
            raise ConfigError(
                f"sequence_starts={starts} of {len(self.requests)} turns must be indices of turns "
                "in order, 0 first"
            )
        for turn in sorted(set(range(1, len(self.requests))) - set(starts)):
            earlier = _tokens_of(self.requests[turn - 1])
            prompt = self.requests[turn].prompt_tokens.tolist()
            if prompt[: len(earlier)] != earlier:
                raise ConfigError(_difference(turn, earlier, prompt))

    @property
    def sequences(self) -> list[Sequence[DynamicInferenceRequest]]:
        """The turns of each token sequence. A rollout without turns has one empty sequence."""
        ends = [*self.sequence_starts[1:], len(self.requests)]
        pairs = zip(self.sequence_starts, ends, strict=True)
        return [self.requests[start:end] for start, end in pairs]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first generated token."""
        return len(self.requests[0].prompt_tokens) if self.requests else 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all token sequences."""
        return sum(turns[-1].num_tokens for turns in self.sequences if turns)

    @property
    def tokens_T(self) -> torch.Tensor:
        """All tokens of the last token sequence, int64."""
        return sequence_tokens(self.sequences[-1])

    @property
    def completion_ids(self) -> list[int]:
        """All tokens after the prompt of each token sequence's first turn, with tool output."""
        ids = []
        for turns in self.sequences:
            start = len(turns[0].prompt_tokens) if turns else 0
            ids += sequence_tokens(turns)[start:].tolist()
        return ids

    @property
    def generated_ids(self) -> list[int]:
        """The generated tokens of all turns."""
        return [token for turn in self.requests for token in turn.generated_tokens]

    @property
    def num_generated_tokens(self) -> int:
        """Number of generated tokens of all turns, without tool output."""
        return sum(len(turn.generated_tokens) for turn in self.requests)

    @property
    def policy_versions(self) -> torch.Tensor:
        """The version that sampled each generated token, int32, in the order of `generated_ids`."""
        versions = [turn.policy_versions for turn in self.requests]
        return torch.cat(versions) if versions else torch.zeros(0, dtype=torch.int32)

    @property
    def finish_reason(self) -> str | None:
        """The last turn's finish reason, or "length" if `is_truncated`. None without a turn."""
        if self.is_truncated:
            return "length"
        return self.requests[-1].finish_reason if self.requests else None

    @property
    def error(self) -> str | None:
        """The `failure`, or the error of the first failed request, or None without a failure."""
        if self.failure is not None:
            return self.failure
        failed = (request for request in self.requests if request.failed())
        return next((repr(request.last_error) for request in failed), None)

    def succeeded(self) -> bool:
        """Return True if neither a turn nor the environment failed."""
        return self.failure is None and all(turn.succeeded() for turn in self.requests)


def sequence_tokens(turns: Sequence[DynamicInferenceRequest]) -> torch.Tensor:
    """Return the prompt and the generated tokens of a sequence's last turn, int64."""
    if not turns:
        return torch.zeros(0, dtype=torch.int64)
    generated = torch.tensor(turns[-1].generated_tokens, dtype=torch.int64)
    return torch.cat([turns[-1].prompt_tokens, generated])


def as_rollout(source: Rollout | DynamicInferenceRequest) -> Rollout:
    """Return `source`, or a Rollout of one turn if `source` is a request."""
    return source if isinstance(source, Rollout) else Rollout([source])


def _tokens_of(request: DynamicInferenceRequest) -> list[int]:
    return [*request.prompt_tokens.tolist(), *request.generated_tokens]


def _difference(turn: int, earlier: Sequence[int], prompt: Sequence[int]) -> str:
    remedy = (
        "append to the token ids of the previous turn, without decoding and encoding them again, "
        "or list the turn in sequence_starts"
    )
    for position, (wanted, given) in enumerate(zip(earlier, prompt, strict=False)):
        if wanted != given:
            return (
                f"turn {turn} was re-tokenised: its prompt has token {given} at position "
                f"{position}, where the previous turn has {wanted}; {remedy}"
            )
    return (
        f"turn {turn} was cut or re-tokenised: its prompt ends at position {len(prompt)}, the "
        f"previous turn has {len(earlier)} tokens; {remedy}"
    )
