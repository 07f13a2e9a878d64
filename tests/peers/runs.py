"""A run: the files of a suite that one pytest takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Files that run together.

    model_name: the name under which a server serves the model to all of them. None: the tests
    start their servers.
    """

    files: tuple[str, ...]
    model_name: str | None = None
