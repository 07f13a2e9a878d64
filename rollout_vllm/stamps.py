"""StampingScheduler: vLLM's scheduler, which also records the version that wrote each KV entry.

vLLM makes it, by the option `scheduler_cls`. `rollout_vllm.scheduler` reads and sets its state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from rollout.version_spans import VersionSpans

_NULL_BLOCK = 0  # stands in block tables for blocks that a sliding window has left behind
_UNKNOWN = np.iinfo(np.int32).max


class StampingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler. It stamps each KV entry that a step will write with the version of the
    weights.

    Stamps belong to blocks. So a request that finds a cached prefix gets the versions of those who
    wrote it. In a model with several kinds of KV cache, an entry has a stamp in a block of each
    kind, and its version is the oldest. A recurrent state depends on all tokens before it, and its
    stamp is the oldest version among them.

    version: the version that the next steps write. isolates: no prefix is found whose tokens have
    attended to KV of an older version. spans: the versions of each running request's KV, by vLLM's
    request id. num_cached: tokens of a request that were found in the cache.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        self._block_sizes = [int(spec.block_size) for spec in specs]
        self._are_states = [isinstance(spec, MambaSpec) for spec in specs]
        # Blocks of all kinds come from one pool, so a block's number tells it from all others.
        sizes = zip(self._block_sizes, self._are_states, strict=True)
        width = max((size for size, is_state in sizes if not is_state), default=1)
        shape = (self.kv_cache_config.num_blocks, width)
        self._stamps = np.full(shape, _UNKNOWN, np.int32)
        self.version, self.isolates = 0, True
        self.spans: dict[str, VersionSpans] = {}
        self.num_cached: dict[str, int] = {}
        self._scheduled: list[tuple[str, int, int]] = []
        self._preempted: list[str] = []
        coordinator = self.kv_cache_manager.coordinator
        self._index_blocks = coordinator.cache_blocks
        coordinator.cache_blocks = self._index_unless_mixed

    def _index_unless_mixed(self, request: Request, num_tokens: int) -> None:
        """Index a request's full blocks, in place of vLLM's coordinator. With `isolates`, a request
        with KV of an older version gets none: no request may find what attended to that KV."""
        spans = self.spans.get(request.request_id)
        if self.isolates and spans is not None and len(spans) and spans.min() < self.version:
            return
        self._index_blocks(request, num_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does, and stamp the KV entries that it will write."""
        output = super().schedule(*args, **kwargs)
        for copy in output.kv_cache_block_copies or ():
            self._stamps[copy.dst_block_id] = self._stamps[copy.src_block_id]
        for request_id, count in output.num_scheduled_tokens.items():
            end = self.requests[request_id].num_computed_tokens
            self._stamp(request_id, end - count, end)
            self._scheduled.append((request_id, end - count, end))
        return output

    def update_from_output(self, plan: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Take a step's result as vLLM does, and drop the versions of rejected draft tokens."""
        outputs = super().update_from_output(plan, *args, **kwargs)
        for request_id in plan.scheduled_spec_decode_tokens:
            request, spans = self.requests.get(request_id), self.spans.get(request_id)
            if request is not None and spans is not None:
                spans.truncate(min(len(spans), request.num_computed_tokens))
        return outputs

    def take_scheduled(self) -> list[tuple[str, int, int]]:
        """Return (id, first position, end) of each request in the steps that were scheduled since
        the last call."""
        scheduled, self._scheduled = self._scheduled, []
        return scheduled

    def _stamp(self, request_id: str, start: int, end: int) -> None:
        tables = self.kv_cache_manager.get_block_ids(request_id)
        spans = self.spans.get(request_id)
        if spans is None:
            spans = self.spans[request_id] = _spans_of(self._found(tables, start))
            self.num_cached[request_id] = start
        elif len(spans) > start:
            spans.truncate(start)  # these positions are computed again
        spans.append(end - start, self.version)
        for table, size, is_state in zip(tables, self._block_sizes, self._are_states, strict=True):
            if is_state:
                self._stamps[[block for block in table if block != _NULL_BLOCK]] = spans.min()
            elif end - start == 1:
                self._stamp_blocks(table[start // size], start % size, start % size + 1)
            else:
                for index in range(start // size, -(-end // size)):
                    first = index * size
                    low, high = max(start - first, 0), min(end - first, size)
                    self._stamp_blocks(table[index], low, high)

    def _stamp_blocks(self, block: int, low: int, high: int) -> None:
        """Stamp entries [low, high) of a block. Its first entry drops the stamps of the block's
        former content."""
        if low == 0:
            self._stamps[block] = _UNKNOWN
        self._stamps[block, low:high] = self.version

    def _found(self, tables: Sequence[list[int]], count: int) -> NDArray[np.int32]:
        """Return the versions of the first `count` entries, which were found in the cache."""
        versions = np.full(count, _UNKNOWN, np.int32)
        if not count:
            return versions
        positions = np.arange(count)
        for table, size, is_state in zip(tables, self._block_sizes, self._are_states, strict=True):
            if is_state:
                at = table[min((count - 1) // size, len(table) - 1)]
                if at != _NULL_BLOCK:
                    np.minimum(versions, self._stamps[at, 0], out=versions)
            else:
                blocks = np.array(table)[positions // size]
                stamps = self._stamps[blocks, positions % size]
                is_known = blocks != _NULL_BLOCK
                versions[is_known] = np.minimum(versions[is_known], stamps[is_known])
        known = versions[versions != _UNKNOWN]
        # Entries outside of every sliding window are attended to by no token.
        versions[versions == _UNKNOWN] = known.min() if len(known) else self.version
        return versions

    # ---- requests that lose their KV

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self.spans.pop(request.request_id, None) is not None:
            self._preempted.append(request.request_id)

    def take_preempted(self) -> list[str]:
        """Return the ids of requests that lost their KV since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def preempt_older_than(self, version: int) -> None:
        """Preempt requests that have KV written before `version`. Cached blocks with such KV are
        never found again."""
        old = [r for r in self.running if self.spans[r.request_id].min() < version]
        for request in old:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        self.hide_older_than(version)

    def hide_older_than(self, version: int) -> None:
        """Let no request find cached blocks that hold an entry written before `version`."""
        old = np.flatnonzero(self._stamps.min(1) < version)
        self.kv_cache_manager.evict_blocks({*old.tolist()} - {_NULL_BLOCK})

    def drop(self, request_id: str) -> None:
        """Drop the versions of a request that has ended."""
        self.spans.pop(request_id, None)
        self.num_cached.pop(request_id, None)


class AsyncStampingScheduler(StampingScheduler, AsyncScheduler):  # type: ignore[misc]
    """A StampingScheduler that schedules a step while another one runs."""


def _spans_of(versions: NDArray[np.int32]) -> VersionSpans:
    """Return the runs of equal versions."""
    if not len(versions):
        return VersionSpans()
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return VersionSpans((b - a, int(versions[a])) for a, b in pairwise(cuts))
