"""StepTimes: how long steps took, and how long one of the most tokens may take by that."""

from __future__ import annotations


class StepTimes:
    """The slowest step of each size; sizes within a power of two are one.

    A step of twice the tokens takes at most twice as long: what it does for each token, it does
    twice, and what it does once, such as reading the weights, it does once.
    """

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}  # by the power of two at or below the tokens

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a step, which had at least one token."""
        size = 1 << (num_tokens.bit_length() - 1)
        if seconds > self._slowest_s.get(size, 0.0):
            self._slowest_s[size] = seconds

    def longest_s(self, max_tokens: int) -> float:
        """Return how many seconds a step of `max_tokens` takes at most, 0 if none was measured."""
        bounds = (
            seconds * -(-max_tokens // size) for size, seconds in list(self._slowest_s.items())
        )
        return min(bounds, default=0.0)
