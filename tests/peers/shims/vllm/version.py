"""The version whose tests run."""

from __future__ import annotations

import os

from vllm import absent_names

__version__ = os.environ["PEER_VERSION"]


def _prev_minor_version() -> str:
    major, minor, *_ = __version__.split(".")
    return f"{major}.{int(minor) - 1}"


__getattr__ = absent_names(__name__)
