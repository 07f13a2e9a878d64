"""EngineLease: for how long an engine may step without a word from the coordinator."""

from __future__ import annotations

import math


class EngineLease:
    """Counted from when what was answered was *sent*, so that it ends no later than the coordinator
    thinks it does. Times in seconds of one clock. One thread writes, any may read `until`.
    """

    def __init__(self) -> None:
        self.until = -math.inf
        self._lease_s = 0.0
        self._sequence = 0
        self._sent_at: dict[int, float] = {}

    def begin(self, lease_s: float, sent_at: float) -> None:
        """A registration that was sent at `sent_at` is answered."""
        self._lease_s = lease_s
        self._sent_at.clear()
        self.until = sent_at + lease_s

    def end(self) -> None:
        """It counts no more; only a registration begins another."""
        self.until = -math.inf
        self._sent_at.clear()

    def heartbeat(self, now: float) -> int:
        """Return the sequence number of a heartbeat that is sent now."""
        self._sequence += 1
        self._sent_at[self._sequence] = now
        return self._sequence

    def answered(self, sequence: int, now: float) -> None:
        """A heartbeat's answer is here. One that comes after the end is too late, whatever it was
        an answer to: meanwhile the engine may have been given up.
        """
        sent_at = self._sent_at.pop(sequence, None)
        if sent_at is None or now >= self.until:
            return
        for earlier in [s for s in self._sent_at if s < sequence]:
            del self._sent_at[earlier]
        self.until = max(self.until, sent_at + self._lease_s)
