"""A pickle that runs code when it is loaded, as an attacker would send it."""

from __future__ import annotations

import os
from pathlib import Path


class RunsCode:
    """Makes the folder `trap` where it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self._trap = str(trap)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._trap,)
