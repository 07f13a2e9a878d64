"""LogitsBuilder and TokenHistories: data for biases, allowed ids and penalties on logits.

LogitsBuilder makes host arrays, and is used by `rollout.worker.batch_builder`. TokenHistories keeps
the tokens that penalties count on the device, and is used by `rollout.worker.model_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.backends.forward_batch import MODE_CODES
from rollout.backends.step_tensors import HostArray, LogitsInputs
from rollout.sampling_params import SamplingParams
from rollout.step.plan import EMPTY, NewRow, StepPlan

_NO_INTS: HostArray = np.empty(0, dtype=np.int64)
_NO_HISTORY = -1
_NO_FLOATS: HostArray = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """How a row's request changes its logits. `allowed_ids` is None if all ids are allowed."""

    params: SamplingParams
    num_prompt: int
    bias_ids: HostArray
    biases: HostArray
    end_ids: HostArray
    allowed_ids: HostArray | None

    @classmethod
    def of(cls, new: NewRow) -> _Row:
        params = new.sampling_params
        bias = params.logit_bias or ()
        ids, biases = zip(*bias, strict=True) if bias else ((), ())
        allowed = params.allowed_token_ids
        return cls(
            params=params,
            num_prompt=new.num_prompt,
            bias_ids=np.array(ids, dtype=np.int64),
            biases=np.array(biases, dtype=np.float32),
            end_ids=np.array(new.end_ids, dtype=np.int64),
            allowed_ids=None if allowed is None else np.array(allowed, dtype=np.int64),
        )


def _changes_logits(new: NewRow) -> bool:
    """Return whether the request can change the model's logits at any of its tokens."""
    params = new.sampling_params
    forbids_end = bool(params.min_tokens and new.end_ids)
    is_biased = bool(params.logit_bias) or params.allowed_token_ids is not None
    return params.has_penalties or forbids_end or is_biased


@dataclass(slots=True)
class _Lists:
    """Lists from which LogitsInputs are made, filled sample by sample.

    `limited`: indices of the samples with allowed ids.
    `penalized`: indices of the samples with penalties."""

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
        """Add the changes of sample `index`, which draws the token at `position` of `row`."""
        params = row.params
        if len(row.bias_ids):
            self._add_biases(index, row.bias_ids, row.biases)
        if position - row.num_prompt < params.min_tokens:
            forbidden = np.full(len(row.end_ids), -np.inf, dtype=np.float32)
            self._add_biases(index, row.end_ids, forbidden)
        if row.allowed_ids is not None:
            self.allowed_at.append(np.full(len(row.allowed_ids), len(self.limited)))
            self.allowed_ids.append(row.allowed_ids)
            self.limited.append(index)
        if params.has_penalties:
            self.penalized.append(index)
            self.penalties.append(
                (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            )
            self.num_prompt.append(row.num_prompt)

    def _add_biases(self, index: int, ids: HostArray, biases: HostArray) -> None:
        self.bias_at.append(np.full(len(ids), index))
        self.bias_ids.append(ids)
        self.biases.append(biases)


class LogitsBuilder:
    """Records how each row's request changes the model's logits before a token is drawn. Changes
    come from biases, allowed ids, penalties, and `min_tokens`, which forbids end tokens. Rows
    without changes cost nothing."""

    def __init__(self, num_rows: int) -> None:
        self.rows: dict[int, _Row] = {}  # only the rows that change their logits
        self._changes_logits = np.zeros(num_rows, dtype=np.bool_)
        self._histories = np.full(num_rows, _NO_HISTORY)
        self._free_histories: list[int] = []
        self._num_histories = 0

    def set_row(self, new: NewRow) -> None:
        """Record the changes of a request that has taken a row."""
        self.rows.pop(new.row, None)
        self._changes_logits[new.row] = _changes_logits(new)
        if self._changes_logits[new.row]:
            self.rows[new.row] = _Row.of(new)
        self._set_history(new.row, new.sampling_params.has_penalties)

    def _set_history(self, row: int, has_penalties: bool) -> None:
        """Assign the row a history index, or free its index."""
        # Histories are not indexed by row, so that rows without penalties take no memory.
        if has_penalties == (self._histories[row] != _NO_HISTORY):
            return
        if not has_penalties:
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
        """Return the arrays that change the logits of the step, or None if no sample needs a
        change. `mode_S` and `temperature_S`, the log-prob mode and temperature of each sample,
        decide which log-probs the sample reports."""
        samples_K = np.flatnonzero(self._changes_logits[plan.sample_rows])
        if not len(samples_K):
            return None
        rows_K, positions_K = plan.sample_rows[samples_K], plan.sample_positions[samples_K]
        lists = _Lists()
        drawn = zip(rows_K.tolist(), positions_K.tolist(), strict=True)
        for index, (row, position) in enumerate(drawn):
            lists.add(index, self.rows[row], position)
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
        """Return the tokens of new rows with penalties, as fields of LogitsInputs."""
        known = [(new.row, new.token_ids) for new in plan.new_rows if len(new.token_ids)]
        rows_H, lens_H = [row for row, _ in known], [len(token_ids) for _, token_ids in known]
        return {
            "new_histories_N": np.repeat(self._histories[rows_H], lens_H),
            "new_positions_N": _joined([np.arange(length) for length in lens_H]),
            "new_ids_N": np.concatenate([EMPTY, *(np.array(ids, np.int32) for _, ids in known)]),
        }


def _reported(mode_K: NDArray[np.int8], temperature_K: NDArray[np.float32]) -> dict[str, HostArray]:
    """Return which samples report log-probs of the unchanged logits and which of the changed
    logits. The result has fields of LogitsInputs, with the inverse temperatures of the unchanged
    logits. Greedy samples report unchanged logits without a temperature."""
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


class TokenHistories:
    """Token ids of rows with penalties, int32 [history, position], on the device. The tensor grows
    on demand. Shape letters as in LogitsInputs, and P history positions."""

    def __init__(self, device: torch.device) -> None:
        # On the device, because the host launches a step before it knows the last token of a row.
        self._ids = torch.zeros(0, 0, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Device bytes of the histories."""
        return self._ids.nbytes

    def begin(self, host: LogitsInputs[HostArray], inputs: LogitsInputs[Tensor]) -> Tensor:
        """Write the tokens of new histories. Returns the histories of the Q samples with penalties.
        The result is int32 [Q, P], and has no rows if Q is 0."""
        if not len(host.histories_Q):
            return self._ids[:0]
        length = int(host.lengths_Q.max())
        self._make_room(int(host.histories_Q.max()) + 1, length + 1)
        self._ids[inputs.new_histories_N, inputs.new_positions_N] = inputs.new_ids_N
        return self._ids[inputs.histories_Q, :length]

    def append(self, inputs: LogitsInputs[Tensor], token_ids_S: Tensor) -> None:
        """Append each of the Q samples' drawn token to its history."""
        drawn_Q = token_ids_S[inputs.samples_K[inputs.penalized_Q]]
        self._ids[inputs.histories_Q, inputs.lengths_Q] = drawn_Q.int()

    def _make_room(self, count: int, length: int) -> None:
        old_count, old_length = self._ids.shape
        if count <= old_count and length <= old_length:
            return
        larger = self._ids.new_zeros(max(old_count, count), max(old_length, _rounded(length)))
        larger[:old_count, :old_length] = self._ids
        self._ids = larger


def _rounded(size: int) -> int:
    """Return the least power of two of at least `size`, so that a growing history is rarely
    copied."""
    return 1 << (size - 1).bit_length()
