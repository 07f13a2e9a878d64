"""VersionWatch: the weights version of the engines, as a producer sees it.

Used by AsyncRolloutProducer and its orders, which begin groups by version.
"""

from __future__ import annotations

from trainer_hooks.producer.groups import GeneratesAsync


class VersionWatch:
    """The weights version that the llm reports, and the newest version seen on a token.

    All engines have version `reported` or newer. `newest`: the newest version that the llm or a
    token has shown. Groups begin under `reported`, so no engine samples them under an older one.
    """

    def __init__(self, llm: GeneratesAsync) -> None:
        self._llm = llm
        self._start = self.reported = self.newest = 0

    @property
    def since_start(self) -> int:
        """The reported version, counted from the producer's start."""
        return self.reported - self._start

    @property
    def is_under_way(self) -> bool:
        """Whether a token has a version that the llm does not report yet."""
        return self.newest > self.reported

    def start(self) -> None:
        """Count versions from the present one."""
        self._start = self.reported = self.newest = self._llm.weights_version

    def refresh(self) -> None:
        """Read the llm's version."""
        self.reported = max(self.reported, self._llm.weights_version)
        self.observe(self.reported)

    def observe(self, version: int) -> None:
        """Record that a token was sampled under `version`."""
        self.newest = max(self.newest, version)
