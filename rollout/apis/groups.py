"""RolloutGroup; Groups: the submitted groups, finished or not; OneThread: who may wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rollout.errors import EngineStateError
from rollout.requests.dynamic_request import DynamicInferenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All samples of one submitted prompt, in sample order; failed ones are among them."""

    group_id: int
    requests: list[DynamicInferenceRequest]


class Groups:
    """The groups of one LLM. A group's id is that of its first request."""

    def __init__(self) -> None:
        # Group id -> samples by request id, in order; None for those that still run.
        self._open: dict[int, dict[int, DynamicInferenceRequest | None]] = {}
        self._group_of: dict[int, int] = {}
        self._finished: dict[int, RolloutGroup] = {}  # in order of completion

    @property
    def num_submitted(self) -> int:
        """Groups not yet handed out."""
        return len(self._open) + len(self._finished)

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def open(self, request_ids: Sequence[int]) -> int:
        group_id = request_ids[0]
        self._open[group_id] = dict.fromkeys(request_ids)
        self._group_of.update(dict.fromkeys(request_ids, group_id))
        return group_id

    def add_finished(self, request: DynamicInferenceRequest) -> None:
        """Add a finished sample. Requests that were added to the engine directly are ignored."""
        group_id = self._group_of.pop(request.request_id, None)
        if group_id is None:
            return
        samples = self._open[group_id]
        samples[request.request_id] = request
        requests = [sample for sample in samples.values() if sample is not None]
        if len(requests) == len(samples):
            self._finished[group_id] = RolloutGroup(group_id=group_id, requests=requests)
            del self._open[group_id]

    def are_finished(self, group_ids: Sequence[int]) -> bool:
        return all(group_id in self._finished for group_id in group_ids)

    def unfinished_requests(self, group_id: int) -> list[int]:
        """Samples still running. Raises EngineStateError for a group that was handed out, or never
        was.
        """
        if group_id in self._finished:
            return []
        if group_id not in self._open:
            raise EngineStateError(f"group {group_id} is unknown, or was handed out already")
        return [i for i, sample in self._open[group_id].items() if sample is None]

    def forget(self, group_id: int) -> list[int]:
        """Remove a group. Returns the ids of its samples that still run."""
        if self._finished.pop(group_id, None) is not None or group_id not in self._open:
            return []
        left = self.unfinished_requests(group_id)
        for request_id in left:
            del self._group_of[request_id]
        del self._open[group_id]
        return left

    def take(self, group_id: int) -> RolloutGroup:
        return self._finished.pop(group_id)

    def take_finished(self, count: int) -> list[RolloutGroup]:
        """Up to `count` finished groups, oldest completion first."""
        return [self.take(group_id) for group_id in list(self._finished)[:count]]


class OneThread:
    """Is held by the thread that generates, as often as it likes; any other is refused.

    One thread's steps would end the requests of another, which waits for them in the engine.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def calling(self, verb: str) -> Iterator[None]:
        """Raise EngineStateError if another thread is inside."""
        if not self._lock.acquire(blocking=False):
            raise EngineStateError(
                f"cannot {verb} while another thread is in generate, submit or collect of this "
                "LLM: one thread generates; AsyncLLM takes requests of many tasks at once"
            )
        try:
            yield
        finally:
            self._lock.release()
