"""TextWorker: the thread that tokenizes and detokenizes, so that the router's loop never waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque

import numpy as np

from rollout.coordinator.core.text_jobs import (
    Detokenized,
    TextJob,
    TextResult,
    Tokenize,
    Tokenized,
    run_text_job,
)
from rollout.coordinator.protocol.messages import WireError
from rollout.coordinator.waker import Waker
from rollout.text import Tokenizer

logger = logging.getLogger(__name__)


class TextWorker:
    """Does jobs in order, and wakes who waits for a result."""

    def __init__(self, tokenizer: Tokenizer, waker: Waker) -> None:
        self._tokenizer, self._waker = tokenizer, waker
        self._jobs: queue.SimpleQueue[TextJob | None] = queue.SimpleQueue()
        self._results: deque[TextResult] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="coordinator-text", daemon=True)
        self._thread.start()

    def put(self, job: TextJob) -> None:
        self._jobs.put(job)

    def take_results(self) -> list[TextResult]:
        """The results since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self) -> None:
        """End after the job that is being done. Twice is fine."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closing:
            try:
                result = run_text_job(job, self._tokenizer)
            except Exception as fault:  # the tokenizer is the user's: one text must not end all
                logger.exception("the tokenizer failed")
                result = _failed(job, fault)
            self._results.append(result)
            self._waker.wake()


def _failed(job: TextJob, fault: Exception) -> TextResult:
    if isinstance(job, Tokenize):
        none = np.empty(0, dtype=np.int32)
        return Tokenized(job.group_id, none, {}, WireError.of(fault))
    return Detokenized(job.server_id, None, WireError.of(fault))
