"""TextQueue: texts that wait for the tokenizer, for as long as somebody wants them."""

from __future__ import annotations

from collections import OrderedDict

from rollout.coordinator.core.text_jobs import TextJob

# Texts in work at a time: enough to be done without a pause, few to be done for nobody.
_MAX_TAKEN = 64


class TextQueue:
    """Jobs by the group that waits for its prompt, or the request that waits for its text."""

    def __init__(self) -> None:
        # Not a dict: to find its first key it passes over all that were deleted before.
        self._waiting: OrderedDict[int, TextJob] = OrderedDict()
        self._num_taken = 0  # and not done

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, job: TextJob) -> None:
        self._waiting[number] = job

    def drop(self, number: int) -> None:
        """Nobody wants it any more. One that is taken already is done all the same."""
        self._waiting.pop(number, None)

    def take(self) -> list[TextJob]:
        """In order, as many as may be in work; `done` makes room for more."""
        room = min(_MAX_TAKEN - self._num_taken, len(self._waiting))
        jobs = [self._waiting.popitem(last=False)[1] for _ in range(room)]
        self._num_taken += len(jobs)
        return jobs

    def done(self) -> None:
        self._num_taken -= 1
