"""Child processes with a time limit: engines under comparison, and their installers.

Used by `benchmarks.peers`, `benchmarks.peers_environments` and `benchmarks.peers_rounds`. Starts
and kills processes, and writes log files.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_END_TIMEOUT_S = 10.0
_TAIL_LINES = 3
_READ_SIZE_BYTES = 1 << 20


class PeerError(Exception):
    """An engine does not install, start or reply. The message has the reason."""


def run_logged(
    command: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str]
) -> None:
    """Run `command` to its end, and append its output to `log`.

    Raises PeerError if the command fails or takes longer than `timeout_s`. Kills the command in the
    second case.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except BaseException as error:
            _kill(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise PeerError(f"not installed within {timeout_s:g} s") from None
            raise
    if code != 0:
        raise PeerError(f"not installed, exit code {code}: {_tail(log)}")


class WorkerProcess:
    """The process of an engine, which runs `serve` of `benchmarks.peers_worker`.

    A context manager: the process ends with the block.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the process. Appends its stderr to the file `log`."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._unread = b""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, or None while it runs."""
        return self._process.poll()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request, and return its reply.

        Raises PeerError if the reply is an error or not JSON, if the process has ended, or if no
        reply comes in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost() from None
        line = self._read_line(time.monotonic() + timeout_s)
        if line is None:
            raise PeerError(f"no answer to {request['method']} within {timeout_s:g} s")
        try:
            reply = json.loads(line)
        except ValueError:
            raise PeerError(f"answered {request['method']} with {line[:80]!r}, not JSON") from None
        if "error" in reply:
            raise PeerError(reply["error"])
        return dict(reply)

    def _read_line(self, deadline: float) -> bytes | None:
        """Return the next line, or None after the deadline. Raises PeerError at the end of
        output."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                return None
            piece = os.read(pipe, _READ_SIZE_BYTES)
            if not piece:
                raise self._lost()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self) -> PeerError:
        """Return the error for a process that has ended, with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        return PeerError(f"its process ended ({self.exit_code}): {_tail(self._log)}")

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the process's stdin, wait for its end, and kill its whole process group.

        Waits at most 10 s, and not at all after an error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S if error is None else 0)
        _kill(self._process)
        self._process.stdout.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of this process's group, and wait for this process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    """Return the last lines of a log file as one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-_TAIL_LINES:]) or "it printed nothing"
