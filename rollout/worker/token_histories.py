"""TokenHistories: the tokens of rows with penalties, which depend on how often each token occurs.

The histories are on the device: only there is the last token of a decode row known. Shape letters
are those of LogitsInputs; P history positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.backends.step_tensors import HostArray, LogitsInputs


class TokenHistories:
    """Token ids by history and position, int32. Grows as rows with penalties need it."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(0, 0, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device."""
        return self._ids.nbytes

    def begin(self, host: LogitsInputs[HostArray], inputs: LogitsInputs[Tensor]) -> Tensor:
        """Write the known tokens of new histories. Returns the tokens of the Q samples' histories,
        int32 [Q, P].
        """
        if not len(host.histories_Q):
            return self._ids[:0]
        length = int(host.lengths_Q.max())
        self._make_room(int(host.histories_Q.max()) + 1, length + 1)
        self._ids[inputs.new_histories_N, inputs.new_positions_N] = inputs.new_ids_N
        return self._ids[inputs.histories_Q, :length]

    def append(self, inputs: LogitsInputs[Tensor], token_ids_S: Tensor) -> None:
        """Append to each of the Q samples' histories the token that it has drawn."""
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
    """Return the next power of two, so that a history that grows by tokens is rarely copied."""
    return 1 << (size - 1).bit_length()
