"""Logging of the commands that run until they are stopped: serve, coordinator and engine.

Used by `rollout.cli.serve`, `rollout.cli.coordinator` and `rollout.cli.engine`. It configures
Python's root logger.
"""

from __future__ import annotations

import argparse
import logging

_QUIET = "%(asctime)s %(message)s"
_VERBOSE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option --verbose to `parser`."""
    parser.add_argument(
        "--verbose", action="store_true", help="log connections, sessions and sockets, too"
    )


def log_to_stderr(*, is_verbose: bool) -> None:
    """Write log lines of level INFO and above to stderr. If `is_verbose`, lines show their level
    and logger, and loggers of `rollout` begin at DEBUG."""
    logging.basicConfig(
        level=logging.INFO,
        format=_VERBOSE if is_verbose else _QUIET,
        datefmt=None if is_verbose else "%H:%M:%S",
    )
    if is_verbose:
        logging.getLogger("rollout").setLevel(logging.DEBUG)
