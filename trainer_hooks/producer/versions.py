"""VersionWatch: the weights version as far as a producer knows it."""

from __future__ import annotations

from trainer_hooks.producer.scoped_llm import GeneratesAsync


class VersionWatch:
    """`told`: that of all engines, by the llm. `newest`: a token may show that one is ahead of it.

    Batches are admitted by what is told: only then can no engine sample under an older version.
    """

    def __init__(self, llm: GeneratesAsync) -> None:
        self._llm = llm
        self._start = self.told = self.newest = 0

    @property
    def since_start(self) -> int:
        """What is told, counted from the producer's start."""
        return self.told - self._start

    def begin(self) -> None:
        """Count from here."""
        self._start = self.told = self.newest = self._llm.weights_version

    def look(self, version: int | None = None) -> None:
        """Ask the llm. `version`: one that it does not tell."""
        self.told = max(self.told, self._llm.weights_version, version or 0)
        self.saw(self.told)

    def saw(self, version: int) -> None:
        """A token was sampled under `version`."""
        self.newest = max(self.newest, version)
