"""Commands of a shell that start the coordinator and engines of a fleet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.apis.fleets import directory

ROOT = Path(__file__).parents[2]
ENGINE_WORDS = ("block_size_tokens=8", "buffer_size_gb=0.02", "num_threads=1")


@contextmanager
def shell(*words: object, within: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """`rollout WORDS`, as a user's shell would start it. `within`: a command that runs it."""
    process = subprocess.Popen(
        [*within, sys.executable, "-m", "rollout", *map(str, words)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def shell_engine(
    address: str, *words: object, within: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """An engine with version 0 of the tests' model."""
    of_engine = (f"model={directory()}", *ENGINE_WORDS, *words)
    with shell("engine", "--join", address, *of_engine, within=within) as process:
        yield process


def said_first(process: subprocess.Popen[str]) -> str:
    """The first line of its output. An AssertionError has its errors, if it ended before."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.communicate()[1]
    return line
