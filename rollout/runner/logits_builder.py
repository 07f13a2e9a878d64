"""LogitsBuilder: what the samples of a step do to their logits, from what their rows asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.backends.forward_batch import MODE_CODES
from rollout.backends.step_tensors import HostArray, LogitsInputs
from rollout.step.plan import LogitsProcessing, StepPlan

_NO_INTS: HostArray = np.empty(0, dtype=np.int64)
_NO_HISTORY = -1
_NO_FLOATS: HostArray = np.empty(0, dtype=np.float32)


@dataclass(slots=True, kw_only=True)
class _Row:
    """A LogitsProcessing as arrays."""

    processing: LogitsProcessing
    bias_ids: HostArray
    biases: HostArray
    late_ids: HostArray
    allowed_ids: HostArray | None

    @classmethod
    def of(cls, processing: LogitsProcessing) -> _Row:
        ids, biases = (
            zip(*processing.logit_bias, strict=True) if processing.logit_bias else ((), ())
        )
        allowed = processing.allowed_token_ids
        return cls(
            processing=processing,
            bias_ids=np.array(ids, dtype=np.int64),
            biases=np.array(biases, dtype=np.float32),
            late_ids=np.array(processing.late_token_ids, dtype=np.int64),
            allowed_ids=None if allowed is None else np.array(allowed, dtype=np.int64),
        )


@dataclass(slots=True)
class _Lists:
    """Entries of LogitsInputs as they are gathered, sample by sample."""

    bias_at: list[HostArray] = field(default_factory=list)
    bias_ids: list[HostArray] = field(default_factory=list)
    biases: list[HostArray] = field(default_factory=list)
    limited: list[int] = field(default_factory=list)
    allowed_at: list[HostArray] = field(default_factory=list)
    allowed_ids: list[HostArray] = field(default_factory=list)
    penalized: list[int] = field(default_factory=list)
    penalties: list[tuple[float, float, float]] = field(default_factory=list)
    num_prompt: list[int] = field(default_factory=list)

    def add(self, index: int, row: _Row, position: int) -> None:
        """Sample `index` of the K, which draws the token at `position`."""
        processing = row.processing
        if len(row.bias_ids):
            self._add_biases(index, row.bias_ids, row.biases)
        if position - processing.num_prompt < processing.min_tokens:
            forbidden = np.full(len(row.late_ids), -np.inf, dtype=np.float32)
            self._add_biases(index, row.late_ids, forbidden)
        if row.allowed_ids is not None:
            self.allowed_at.append(np.full(len(row.allowed_ids), len(self.limited)))
            self.allowed_ids.append(row.allowed_ids)
            self.limited.append(index)
        if processing.has_penalty:
            self.penalized.append(index)
            self.penalties.append(
                (
                    processing.repetition_penalty,
                    processing.presence_penalty,
                    processing.frequency_penalty,
                )
            )
            self.num_prompt.append(processing.num_prompt)

    def _add_biases(self, index: int, ids: HostArray, biases: HostArray) -> None:
        self.bias_at.append(np.full(len(ids), index))
        self.bias_ids.append(ids)
        self.biases.append(biases)


class LogitsBuilder:
    """The only writer of what each row does to its logits."""

    def __init__(self, num_rows: int) -> None:
        self._rows: dict[int, _Row] = {}
        self._is_processed = np.zeros(num_rows, dtype=np.bool_)
        self._histories = np.full(num_rows, _NO_HISTORY)
        self._free_histories: list[int] = []
        self._num_histories = 0

    def set_row(self, row: int, processing: LogitsProcessing | None) -> None:
        """A request has taken the row."""
        if processing is not None:
            self._rows[row] = _Row.of(processing)
            self._is_processed[row] = True
        elif row in self._rows:
            del self._rows[row]
            self._is_processed[row] = False
        self._set_history(row, processing is not None and processing.has_penalty)

    def _set_history(self, row: int, has_penalty: bool) -> None:
        """Histories are numbered by themselves: rows without penalties take no memory for one."""
        if has_penalty == (self._histories[row] != _NO_HISTORY):
            return
        if not has_penalty:
            self._free_histories.append(int(self._histories[row]))
            self._histories[row] = _NO_HISTORY
        elif self._free_histories:
            self._histories[row] = self._free_histories.pop()
        else:
            self._histories[row] = self._num_histories
            self._num_histories += 1

    def build(
        self, plan: StepPlan, mode_S: NDArray[np.int8], temperature_S: NDArray[np.float32]
    ) -> LogitsInputs[HostArray] | None:
        """None if no sample of the step does anything to its logits."""
        if not self._rows:
            return None
        samples_K = np.flatnonzero(self._is_processed[plan.sample_rows])
        if not len(samples_K):
            return None
        rows_K, positions_K = plan.sample_rows[samples_K], plan.sample_positions[samples_K]
        lists = _Lists()
        drawn = zip(rows_K.tolist(), positions_K.tolist(), strict=True)
        for index, (row, position) in enumerate(drawn):
            lists.add(index, self._rows[row], position)
        penalized_Q = np.array(lists.penalized, dtype=np.int64)
        return LogitsInputs(
            samples_K=samples_K,
            bias_at_B=_joined(lists.bias_at),
            bias_ids_B=_joined(lists.bias_ids),
            biases_B=np.concatenate([_NO_FLOATS, *lists.biases]),
            limited_A=np.array(lists.limited, dtype=np.int64),
            allowed_at_C=_joined(lists.allowed_at),
            allowed_ids_C=_joined(lists.allowed_ids),
            penalized_Q=penalized_Q,
            penalties_Q3=np.array(lists.penalties, dtype=np.float32).reshape(-1, 3),
            histories_Q=self._histories[rows_K[penalized_Q]],
            lengths_Q=positions_K[penalized_Q].astype(np.int64),
            num_prompt_Q=np.array(lists.num_prompt, dtype=np.int64),
            **self._new_histories(plan),
            **_reported(mode_S[samples_K], temperature_S[samples_K]),
        )

    def _new_histories(self, plan: StepPlan) -> dict[str, HostArray]:
        starts_H = np.cumsum(plan.counted_lens) - plan.counted_lens
        num_tokens = len(plan.counted_token_ids)
        return {
            "new_histories_N": np.repeat(self._histories[plan.counted_rows], plan.counted_lens),
            "new_positions_N": np.arange(num_tokens) - np.repeat(starts_H, plan.counted_lens),
            "new_ids_N": plan.counted_token_ids,
        }


def _reported(mode_K: NDArray[np.int8], temperature_K: NDArray[np.float32]) -> dict[str, HostArray]:
    """Which samples report log-probs from before the processing: a greedy one's are always raw."""
    is_processed_K = (mode_K == MODE_CODES["processed"]) & (temperature_K > 0)
    is_scaled_K = (mode_K == MODE_CODES["temperature"]) & (temperature_K > 0)
    inverse_K = np.ones(len(mode_K), dtype=np.float32)
    np.divide(1.0, temperature_K, out=inverse_K, where=is_scaled_K)
    return {
        "unprocessed_U": np.flatnonzero(~is_processed_K),
        "inverse_temperature_U": inverse_K[~is_processed_K],
        "processed_R": np.flatnonzero(is_processed_K),
    }


def _joined(parts: Sequence[HostArray]) -> HostArray:
    return np.concatenate([_NO_INTS, *parts])
