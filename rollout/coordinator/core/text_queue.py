"""TextQueue: texts that wait for the tokenizer, for as long as somebody wants them."""

from __future__ import annotations

from itertools import islice

from rollout.coordinator.core.text_jobs import TextJob

# Texts in work at a time: enough to be done without a pause, few to be done for nobody.
_MAX_TAKEN = 64


class TextQueue:
    """Jobs by the group that waits for its prompt, or the request that waits for its text."""

    def __init__(self) -> None:
        self._waiting: dict[int, TextJob] = {}
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
        room = _MAX_TAKEN - self._num_taken
        jobs = [self._waiting.pop(number) for number in list(islice(self._waiting, room))]
        self._num_taken += len(jobs)
        return jobs

    def done(self) -> None:
        self._num_taken -= 1
