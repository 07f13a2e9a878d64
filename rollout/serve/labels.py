"""VersionLabels: clients name weights by texts, engines number them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any


class VersionLabels:
    """The label of each weights version: its number, unless a client gave it another one."""

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def set(self, version: int, label: str) -> None:
        """Call `version` by `label` from now on."""
        self._labels[version] = label

    def of(self, version: int) -> str:
        """Return the label of `version`."""
        return self._labels.get(version, str(version))

    def runs(self, versions: Iterable[int]) -> list[dict[str, Any]]:
        """Return [{"version", "start", "end"}] of the versions of generated tokens, one run for
        neighbours of the same label. `start` and `end` count generated tokens from 0.
        """
        runs, end = [], 0
        for label, same in groupby(versions, key=self.of):
            start, end = end, end + sum(1 for _ in same)
            runs.append({"version": label, "start": start, "end": end})
        return runs
