"""Rollout: one sample of a prompt, made in one turn or in several, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """The requests of one sample, a turn each, in order.

    Each turn's prompt is all tokens of the turn before, as they were sampled, and what a tool or a
    user added to them. So the tokens of the rollout are those of the last turn, and every generated
    one stands where it stood when it was sampled.
    """

    requests: Sequence[DynamicInferenceRequest]

    def __post_init__(self) -> None:
        """Raises ConfigError without a turn, and for a prompt that does not extend its turn."""
        if not self.requests:
            raise ConfigError("a rollout needs at least one request")
        for turn in range(1, len(self.requests)):
            earlier = _tokens_of(self.requests[turn - 1])
            prompt = self.requests[turn].prompt_tokens.tolist()
            if prompt[: len(earlier)] != earlier:
                raise ConfigError(_difference(turn, earlier, prompt))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first generated one."""
        return len(self.requests[0].prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return self.requests[-1].num_tokens

    @property
    def tokens_T(self) -> torch.Tensor:
        """All tokens, int64 [num_tokens]."""
        last = self.requests[-1]
        generated = torch.tensor(last.generated_tokens, dtype=torch.int64)
        return torch.cat([last.prompt_tokens, generated])

    @property
    def completion_ids(self) -> list[int]:
        """All tokens after the first prompt, tool output included."""
        return self.tokens_T[self.num_prompt_tokens :].tolist()

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
        return torch.cat([turn.policy_versions for turn in self.requests])

    def succeeded(self) -> bool:
        """Whether every turn succeeded."""
        return all(turn.succeeded() for turn in self.requests)


def as_rollout(source: Rollout | DynamicInferenceRequest) -> Rollout:
    """`source` as a Rollout; a request is a rollout of one turn."""
    return source if isinstance(source, Rollout) else Rollout([source])


def _tokens_of(request: DynamicInferenceRequest) -> list[int]:
    return [*request.prompt_tokens.tolist(), *request.generated_tokens]


def _difference(turn: int, earlier: Sequence[int], prompt: Sequence[int]) -> str:
    """The message for a prompt that does not extend the turn before: where they differ."""
    remedy = "append to the token ids of the turn before; never decode and encode them again"
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
