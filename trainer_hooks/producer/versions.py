"""The weights version of the engines, as a producer sees it."""

from __future__ import annotations

from trainer_hooks.producer.groups import GeneratesAsync


class VersionWatch:
    """The weights version of the engines: `reported` by the llm, and the `newest` one seen.

    `reported` is in force on all engines; a token may show that one engine has a newer version.
    Groups begin under `reported`: then no engine can sample them under an older version.
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
        """A token is of a version that is not reported yet."""
        return self.newest > self.reported

    def start(self) -> None:
        """Count from the present version."""
        self._start = self.reported = self.newest = self._llm.weights_version

    def refresh(self, version: int | None = None) -> None:
        """Ask the llm. `version`: one that the llm does not report."""
        self.reported = max(self.reported, self._llm.weights_version, version or 0)
        self.observe(self.reported)

    def observe(self, version: int) -> None:
        """A token was sampled under `version`."""
        self.newest = max(self.newest, version)
