"""StepPlan: which tokens run in one forward pass, as arrays of integers and nothing else.

A *row* is a slot that a request keeps for as long as it runs; row 0 is scratch. A *compute row* is
a row that has tokens in this step, a *sample row* one that draws a token from some computed token's
logits. They differ: all children of a fork are sampled from one compute row. Only changes of a
row's lasting state (its block table, its sampling parameters) are sent.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

EMPTY: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessing:
    """What a row does to its logits before a draw; `SamplingParams` says what it all means.

    The first `num_prompt` tokens of the row are its prompt, those behind its output.
    `late_token_ids` are not drawn within the first `min_tokens` of that. `allowed_token_ids`: None
    allows all.
    """

    num_prompt: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    late_token_ids: tuple[int, ...] = ()

    @property
    def has_penalty(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    @property
    def is_void(self) -> bool:
        """It leaves all logits as they are."""
        is_late = bool(self.min_tokens and self.late_token_ids)
        is_biased = bool(self.logit_bias) or self.allowed_token_ids is not None
        return not (self.has_penalty or is_late or is_biased)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How a row draws its tokens; sent once, when a request takes the row.

    `temperature` 0 is greedy. `logprobs_mode` is None when the row wants no log-probs, `processing`
    when its logits are drawn from as they are.
    """

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs_mode: str | None
    top_n: int
    processing: LogitsProcessing | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # compare digests
class StepPlan:
    """One forward pass. R compute rows, S sample rows, C table changes, K block copies, P scored
    tokens.

    The step's tokens are the compute rows' tokens, concatenated in order: decode rows first, one
    token each. A decode row names no token: its last sampled one is already on the device.
    """

    step_id: int
    weights_version: int

    num_decode_rows: int = 0
    rows: IntArray = field(default_factory=lambda: EMPTY)  # [R]
    query_lens: IntArray = field(default_factory=lambda: EMPTY)  # [R] tokens computed in this step
    context_lens: IntArray = field(default_factory=lambda: EMPTY)  # [R] KV length after this step
    prefill_token_ids: IntArray = field(
        default_factory=lambda: EMPTY
    )  # ids of the other rows' tokens

    new_rows: tuple[tuple[int, RowSampling], ...] = ()
    counted_rows: IntArray = field(default_factory=lambda: EMPTY)  # [H] new rows with penalties
    counted_lens: IntArray = field(default_factory=lambda: EMPTY)  # [H] tokens that each has
    counted_token_ids: IntArray = field(
        default_factory=lambda: EMPTY
    )  # their ids, one row after the other
    table_rows: IntArray = field(default_factory=lambda: EMPTY)  # [C]
    table_indices: IntArray = field(default_factory=lambda: EMPTY)  # [C]
    table_blocks: IntArray = field(default_factory=lambda: EMPTY)  # [C]
    copy_sources: IntArray = field(
        default_factory=lambda: EMPTY
    )  # [K] copied before the forward pass
    copy_targets: IntArray = field(default_factory=lambda: EMPTY)  # [K]

    sample_sources: IntArray = field(
        default_factory=lambda: EMPTY
    )  # [S] token whose logits are used
    sample_rows: IntArray = field(default_factory=lambda: EMPTY)  # [S] row that gets the token
    sample_positions: IntArray = field(default_factory=lambda: EMPTY)  # [S] its absolute position

    score_sources: IntArray = field(
        default_factory=lambda: EMPTY
    )  # [P] token whose logits score ...
    score_targets: IntArray = field(default_factory=lambda: EMPTY)  # [P] ... this prompt token id
    score_top_n: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + len(self.prefill_token_ids)

    def digest(self) -> str:
        """Hex digest of the whole plan: equal on all ranks that schedule in lockstep."""
        hasher = hashlib.blake2b(digest_size=16)
        for f in fields(self):
            value = getattr(self, f.name)
            hasher.update(f.name.encode())
            hasher.update(
                value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            )
        return hasher.hexdigest()
