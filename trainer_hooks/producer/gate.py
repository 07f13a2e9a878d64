"""AdmissionGate: the rule that keeps every token of a batch young enough."""

from __future__ import annotations

from rollout.errors import ConfigError


class AdmissionGate:
    """Counts the batches that were let in, and says whether one more may come.

    Versions are counted from the producer's start. One batch makes one version: batch k is trained
    at version k. At version v at most v + S + 1 batches have ever been admitted, so batch k is
    admitted at a version >= k - S, and no token of it is more than S versions old when it is
    trained. The place of a batch becomes free with the version that it made, not with its
    hand-over: freed at the hand-over, a batch admitted while its predecessor trains would be one
    version too old at its turn.
    """

    def __init__(self, max_staleness_versions: int) -> None:
        """Raises ConfigError for a bound below 0."""
        if max_staleness_versions < 0:
            raise ConfigError(f"max_staleness_versions={max_staleness_versions} must be 0 or more")
        self.max_staleness_versions = max_staleness_versions
        self.num_admitted = 0
        self.num_handed_over = 0

    def may_admit(self, version: int) -> bool:
        """Whether the next batch may begin at `version`.

        A trainer that makes several versions of one batch frees more places than it uses. So that
        unused batches do not pile up, no more than S + 1 of them wait.
        """
        num_waiting = self.num_admitted - self.num_handed_over
        num_allowed = version + self.max_staleness_versions + 1
        return self.num_admitted < num_allowed and num_waiting <= self.max_staleness_versions

    def admit(self, version: int) -> int:
        """Let the next batch in; returns its number, from 0."""
        assert self.may_admit(version), "ask first"
        self.num_admitted += 1
        return self.num_admitted - 1

    def hand_over(self) -> None:
        """The oldest waiting batch has gone to the trainer."""
        assert self.num_handed_over < self.num_admitted, "a batch is admitted first"
        self.num_handed_over += 1
