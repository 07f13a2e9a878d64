"""A server in a process of its own, for clients in others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.doors.environments import ROOT

EXIT_S = 60


@contextmanager
def serving(*settings: str) -> Iterator[str]:
    """Run `rollout serve` with `settings` on a free port; yields its URL. It must end with 0."""
    command = [sys.executable, "-m", "rollout", "serve", "--json", "port=0", "num_threads=1"]
    server = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line, "the server did not start"
        yield json.loads(line)["url"]
    finally:
        server.terminate()
        status = server.wait(EXIT_S)
    assert status == 0, f"the server exited with {status}"
