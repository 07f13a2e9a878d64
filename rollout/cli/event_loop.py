"""run_in_loop: runs a coroutine in uvloop if it is installed, else in asyncio's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
