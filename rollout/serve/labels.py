"""VersionLabels: the names that clients give to weights versions, which engines number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class VersionLabels:
    """The label of each weights version: its number, unless a client gave it another one."""

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def set(self, version: int, label: str) -> None:
        """Set the label of `version`."""
        self._labels[version] = label

    def of(self, version: int) -> str:
        """Return the label of `version`."""
        return self._labels.get(version, str(version))

    def runs(self, spans: Iterable[tuple[int, int, int]]) -> list[dict[str, Any]]:
        """Return [{"version", "start", "end"}] of (start, end, version) spans: neighbours of the
        same label become one.
        """
        runs: list[dict[str, Any]] = []
        for start, end, version in spans:
            label = self.of(version)
            if runs and runs[-1]["version"] == label:
                runs[-1]["end"] = end
            else:
                runs.append({"version": label, "start": start, "end": end})
        return runs
