"""TokenLog: the tokens of one request that its engines have reported so far."""

from __future__ import annotations

from rollout.coordinator.protocol.messages import TokenRun
from rollout.coordinator.protocol.token_runs import join_runs
from rollout.errors import ProtocolError

# Runs kept apart at most: all tokens of a request are copied once for so many reports.
_MAX_RUNS = 64


class TokenGapError(ProtocolError):
    """A run that begins behind the last reported token."""


class TokenLog:
    """Tokens [0, len) and what is stamped on them. Only grows, and never changes a token."""

    __slots__ = ("_num_tokens", "_runs")

    def __init__(self) -> None:
        self._runs: list[TokenRun] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    def append(self, run: TokenRun) -> TokenRun | None:
        """Add what is new in `run`, and return it; None if nothing is.

        Raises TokenGapError if tokens are missing before it, ProtocolError if it carries other
        values than the runs before. The log is unchanged then.
        """
        if run.offset > self._num_tokens:
            raise TokenGapError(f"tokens from {run.offset} on, but only {self._num_tokens} known")
        if run.end <= self._num_tokens:
            return None
        if self._runs and _values(self._runs[0]) != _values(run):
            raise ProtocolError("only some runs of a request have log-probs, or top-n")
        new = run.from_offset(self._num_tokens)
        self._runs.append(new)
        self._num_tokens = new.end
        if len(self._runs) > _MAX_RUNS:
            self._runs = [join_runs(self._runs)]
        return new

    def whole(self) -> TokenRun | None:
        """All tokens as one run from offset 0; None if there are none."""
        if len(self._runs) > 1:
            self._runs = [join_runs(self._runs)]
        return self._runs[0] if self._runs else None


def _values(run: TokenRun) -> tuple[bool, bool]:
    return run.log_probs is None, run.top_n is None
