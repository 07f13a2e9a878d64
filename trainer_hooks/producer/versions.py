"""VersionWatch: the weights version of the engines, as a producer sees it.

Used by `producer`, `admission` and `ready` of `trainer_hooks.producer`.
"""

from __future__ import annotations

from trainer_hooks.producer.groups import GeneratesAsync


class VersionWatch:
    """The weights version that the llm reports, and the newest version seen on a token.

    `reported`: version that every engine has reached. Groups begin under it, so no engine samples
    their tokens under an older version.
    `newest`: newest version that the llm or a token has shown.
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
        """Count versions from the llm's present one."""
        self._start = self.reported = self.newest = self._llm.weights_version

    def refresh(self) -> None:
        """Read the version that the llm reports."""
        self.reported = max(self.reported, self._llm.weights_version)
        self.observe(self.reported)

    def observe(self, version: int) -> None:
        """Record that a token was sampled under `version`."""
        self.newest = max(self.newest, version)
