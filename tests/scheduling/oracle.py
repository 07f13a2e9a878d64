"""The naive model of a scheduler: each request runs alone and is never preempted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rollout.scheduling.stopping import StopRule
from tests.fakes import next_token, token_score


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Settings of the prefix cache."""

    lru: bool = True
    reuse_across_versions: bool = False
    max_age: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How small the engine is. `depth`: how many plans may be in flight. `conservativeness` 0:
    requests are admitted without a thought of what others will need.

    `prefixes` None: no block is shared but in a group.
    """

    num_blocks: int = 8
    block_size: int = 4
    num_rows: int = 4
    max_tokens: int = 16
    max_paused_blocks: int = 0
    conservativeness: float = 0.0
    chunked: bool = True
    depth: int = 1
    poison: frozenset[int] = frozenset()
    prefixes: Prefixes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a prompt."""

    num_new: int = 4
    seed: int = 0
    wants_scores: bool = False
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, kw_only=True)
class Known:
    """State of a request in the model. `is_begun`: another engine began it."""

    order: tuple[int, int]
    prompt: list[int]
    sample: Sample
    rule: StopRule
    phase: str = "waiting"
    generated: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    is_begun: bool = False


def run_alone(
    prompt: list[int], sample: Sample, rule: StopRule, poison: frozenset[int] = frozenset()
) -> tuple[list[int], str]:
    """Return generated tokens and finish reason of a request that runs alone."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, sample.seed, len(tokens)))
        generated = tokens[len(prompt) :]
        if tokens[-1] in poison:
            return generated, "error"
        words = [ids for _, ids in rule.stop_words if generated[-len(ids) :] == list(ids)]
        if words or tokens[-1] in rule.end_ids:
            return generated, "stop"
        if len(tokens) == rule.max_length:
            return generated, "length"


def scores_alone(prompt: list[int]) -> list[float]:
    scores = [token_score(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
    return np.array(scores, dtype=np.float32).tolist()


def in_phase(known: Mapping[int, Known], phase: str) -> list[int]:
    return [request_id for request_id, each in known.items() if each.phase == phase]


def prompt(length: int) -> list[int]:
    return list(range(1, length + 1))


def limit(max_length: int) -> StopRule:
    return StopRule(end_ids=(), stop_words=(), max_length=max_length)
