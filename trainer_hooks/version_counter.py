"""Numbers for weights, each given once, across restarts of the trainer."""

from __future__ import annotations

from pathlib import Path

from trainer_hooks.files import replace_text


class WeightsVersionCounter:
    """Hands out weights versions and remembers the highest in a file.

    A trainer that goes on from an older checkpoint must not use a number again that an engine has
    seen under other weights: rollouts and journals of the lost steps may still carry it.
    `floor`: the highest version known from elsewhere, of a checkpoint say.
    """

    def __init__(self, path: Path | str, floor: int = 0) -> None:
        self._path = Path(path)
        recorded = int(self._path.read_text(encoding="utf-8")) if self._path.exists() else 0
        self._highest = max(recorded, floor)

    @property
    def highest(self) -> int:
        """The highest version handed out so far."""
        return self._highest

    def reserve(self) -> int:
        """The next version; it is on the disk before anyone can use it."""
        self._highest += 1
        replace_text(self._path, f"{self._highest}\n")
        return self._highest
