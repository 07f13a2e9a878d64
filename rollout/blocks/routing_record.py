"""RoutingRecord: the experts that computed each KV entry, kept on the host.

`rollout.engine.build` creates it if `record_routing` is set. Scheduler and RunningRequests write
it. OutputProcessor takes the rows of requests that end or are queued again.

Shape letters: T tokens of a step, P positions of a request, L layers with experts, K experts per
token, S cache slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.step.plan import IntArray

_MAX_IN_A_BYTE = 256


class RoutingRecord:
    """A row of expert ids [L, K] for every slot of the KV cache.

    Slot block * block_size + i belongs to token i of the block. Requests that share a block share
    its rows, and copying a block copies its rows. `launch` records only which blocks a step copies.
    `commit` applies each step's changes when its result is known. `keep` saves the rows of a
    request whose blocks are freed, and `take` returns the saved rows.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, top_k: int, num_experts: int
    ) -> None:
        """`top_k` is the number of experts per token. `num_experts` is the number of experts in a
        layer, not counting shared experts."""
        self.block_size = block_size
        dtype = np.uint8 if num_experts <= _MAX_IN_A_BYTE else np.int16
        self._rows_SLK = np.zeros(((num_blocks + 1) * block_size, num_layers, top_k), dtype)
        self._copies: deque[tuple[IntArray, IntArray]] = deque()  # of the steps in flight
        self._kept: dict[int, NDArray[np.int16]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of all slots. The host allocates a row's memory at the first write."""
        return self._rows_SLK.nbytes

    # ---- steps

    def launch(self, copy_sources: IntArray, copy_targets: IntArray) -> None:
        """Record the launch of a step that copies these blocks before it computes."""
        self._copies.append((copy_sources, copy_targets))

    def commit(self, slots_T: NDArray[np.integer], routing_TLK: NDArray[np.integer]) -> None:
        """Apply the changes of the oldest step in flight, which wrote to these slots."""
        sources, targets = self._copies.popleft()
        if len(sources):
            blocks = self._rows_SLK.reshape(-1, self.block_size, *self._rows_SLK.shape[1:])
            blocks[targets] = blocks[sources]
        self._rows_SLK[slots_T] = routing_TLK

    def abandon(self) -> None:
        """Discard the changes of the steps in flight, which have failed."""
        self._copies.clear()

    # ---- requests

    def read(self, blocks: Sequence[int], num_positions: int) -> NDArray[np.int16]:
        """Return the rows [P, L, K] of a request's first `num_positions` positions. The request
        holds `blocks`, and the KV of these positions is committed."""
        ids = np.array(blocks[: -(-num_positions // self.block_size)], dtype=np.int64)
        # A block that a step in flight fills by a copy has its rows in the source until the commit.
        for sources, targets in reversed(self._copies):
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                ids[ids == target] = source
        slots = (ids[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)
        rows: NDArray[np.int16] = self._rows_SLK[slots[:num_positions]].astype(np.int16)
        return rows

    def keep(self, request_id: int, blocks: Sequence[int], num_positions: int) -> None:
        """Save the rows of a request whose blocks are about to be freed."""
        self._kept[request_id] = self.read(blocks, num_positions)

    def take(self, request_id: int) -> NDArray[np.int16] | None:
        """Return the saved rows of a request and drop them here; None if no rows were saved."""
        return self._kept.pop(request_id, None)
