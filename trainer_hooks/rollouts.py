"""Rollout: one sample of a prompt, made in one turn or in several, as tokens, with its reward."""

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
    """The requests of one sample, a turn each, in order, and what its environment made of it.

    Each turn's prompt is all tokens of the turn before, as they were sampled, and what a tool or a
    user added to them; then the rollout is one token sequence, that of its last turn. A turn whose
    prompt does not extend the one before (chat templates drop earlier thinking) begins another
    token sequence. `sequence_starts`: the indices of the turns that begin one, 0 first.
    Every generated token stands where it stood when it was sampled, in the sequence of its turn.
    `reward`: the rollout's own; None leaves it to the reward function, a number is added to what
    that function gives, NaN marks a failed rollout. `reward_terms`: its named parts, for metrics.
    `state`: JSON-able, for people: it goes to completions.jsonl.
    `columns`: for the reward function, beside the columns of the prompt and before those of the
    same name.
    `failure`: the kind of fault that ended it, such as "step_timeout"; it is then a failed rollout
    whatever its turns are, and may have none. `is_truncated`: a limit ended it between two turns.
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
        """Raises ConfigError without a turn, for starts that are not turns in order, and for a
        prompt that does not extend its turn.
        """
        if not self.requests and self.failure is None:
            raise ConfigError("a rollout needs at least one request")
        starts = list(self.sequence_starts)
        is_sorted = all(low < high for low, high in pairwise(starts))
        if starts[:1] != [0] or not is_sorted or starts[-1] >= max(len(self.requests), 1):
            raise ConfigError(
                f"sequence_starts={starts} of {len(self.requests)} turns; indices of turns in "
                "order, 0 first, are wanted"
            )
        for turn in sorted(set(range(1, len(self.requests))) - set(starts)):
            earlier = _tokens_of(self.requests[turn - 1])
            prompt = self.requests[turn].prompt_tokens.tolist()
            if prompt[: len(earlier)] != earlier:
                raise ConfigError(_difference(turn, earlier, prompt))

    @property
    def sequences(self) -> list[Sequence[DynamicInferenceRequest]]:
        """The turns of each token sequence; one without turns for a rollout without turns."""
        ends = [*self.sequence_starts[1:], len(self.requests)]
        pairs = zip(self.sequence_starts, ends, strict=True)
        return [self.requests[start:end] for start, end in pairs]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first generated one."""
        return len(self.requests[0].prompt_tokens) if self.requests else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all token sequences."""
        return sum(turns[-1].num_tokens for turns in self.sequences if turns)

    @property
    def tokens_T(self) -> torch.Tensor:
        """All tokens of the last sequence, int64."""
        return sequence_tokens(self.sequences[-1])

    @property
    def completion_ids(self) -> list[int]:
        """All tokens after the first prompt, tool output included; those of a further token
        sequence follow from its first generated one on.
        """
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
        """Generated tokens of all turns, without tool output."""
        return sum(len(turn.generated_tokens) for turn in self.requests)

    @property
    def policy_versions(self) -> torch.Tensor:
        """The version that sampled each generated token, int32, in the order of generated_ids."""
        versions = [turn.policy_versions for turn in self.requests]
        return torch.cat(versions) if versions else torch.zeros(0, dtype=torch.int32)

    @property
    def finish_reason(self) -> str | None:
        """That of the last turn, or "length" if a limit ended the rollout after it; None without a
        turn.
        """
        if self.is_truncated:
            return "length"
        return self.requests[-1].finish_reason if self.requests else None

    def succeeded(self) -> bool:
        """Whether nothing failed, neither a turn nor its environment."""
        return self.failure is None and all(turn.succeeded() for turn in self.requests)


def sequence_tokens(turns: Sequence[DynamicInferenceRequest]) -> torch.Tensor:
    """All tokens of one token sequence, int64: those of its last turn."""
    if not turns:
        return torch.zeros(0, dtype=torch.int64)
    generated = torch.tensor(turns[-1].generated_tokens, dtype=torch.int64)
    return torch.cat([turns[-1].prompt_tokens, generated])


def as_rollout(source: Rollout | DynamicInferenceRequest) -> Rollout:
    """`source` as a Rollout; a request is a rollout of one turn."""
    return source if isinstance(source, Rollout) else Rollout([source])


def _tokens_of(request: DynamicInferenceRequest) -> list[int]:
    return [*request.prompt_tokens.tolist(), *request.generated_tokens]


def _difference(turn: int, earlier: Sequence[int], prompt: Sequence[int]) -> str:
    """The message for a prompt that does not extend the turn before: where they differ."""
    remedy = (
        "append to the token ids of the turn before and never decode and encode them again, or "
        "name the turn in sequence_starts"
    )
    for position, (wanted, given) in enumerate(zip(earlier, prompt, strict=False)):
        if wanted != given:
            return (
                f"turn {turn} was re-tokenised: its prompt has token {given} at position "
                f"{position}, where the turn before has {wanted}; {remedy}"
            )
    return (
        f"turn {turn} was cut or re-tokenised: its prompt ends at position {len(prompt)}, the turn "
        f"before has {len(earlier)} tokens; {remedy}"
    )
