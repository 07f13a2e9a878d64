"""A rank of torchrun other than 0, as a process of a test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection

from rollout.launch.torchrun import serve_engines

KEY = b"of this test"


def serve_as_rank(end: Connection, environment: Mapping[str, str]) -> None:
    """Says what `serve_engines` returns or raises."""
    os.environ.update(environment)
    try:
        end.send(serve_engines())
    except Exception as error:
        end.send(str(error))
