"""Children of `ChildProcess` as forks of one process that has imported the modules they run.

A new interpreter imports torch for two seconds before it is an engine. A fork is what it then is:
a child of the same parent, with the same environment, open files, working directory and command
line. The process that is forked is `python -m tests.forked_children`. It has no other thread.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout import child_process

# By the name that a command gives them.
MODULES = {
    "rollout.coordinator": "rollout.coordinator.__main__",
    "rollout.apis.engine_process": "rollout.apis.engine_process",
    "rollout.tensor_parallel.rank_process": "rollout.tensor_parallel.rank_process",
}
ROOT = Path(__file__).parents[1]
_MAX_REQUEST_BYTES = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36
_MAX_DESCRIPTORS = 1 << 10


@contextmanager
def forked_children() -> Iterator[None]:
    """Meanwhile the children of this process that run one of MODULES are forks."""
    forks = Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", SimpleNamespace(Popen=forks.popen))
        yield
    forks.close()


class Forks:
    """`popen` is subprocess.Popen, which forks what runs one of MODULES."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """`command`: python -m MODULE --child."""
        if command[2] in MODULES:
            return _Forked(self, command, **options)
        return subprocess.Popen(command, **options)

    def fork(self, command: Sequence[str], stdin: int, env: dict[str, str]) -> int:
        """The process id of a new child of this process."""
        request = json.dumps([command, os.getcwd(), env]).encode()
        assert len(request) <= _MAX_REQUEST_BYTES
        with self._lock:
            if self._process is None:
                self._start()
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [request], [stdin, 1, 2])
                return int(self._socket.recv(64))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        self._socket.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait()

    def _start(self) -> None:
        with self._theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *MODULES],
                stdin=self._theirs,
                cwd=ROOT,
                env=self._environment,
            )
        assert self._socket.recv(64) == b"ready"


class _Forked(subprocess.Popen[bytes]):
    """A Popen whose process `forks` makes."""

    def __init__(self, forks: Forks, command: Sequence[str], *, stdin: int, env: Any) -> None:
        self._forks, self._stdin, self._env = forks, stdin, env
        super().__init__(command, stdin=stdin, env=env)

    def _execute_child(self, args: Sequence[str], *_: Any) -> None:
        self.pid = self._forks.fork(args, self._stdin, self._env)
        self._child_created = True


def _adopt_orphans(is_on: bool) -> None:
    """Return whether a grandchild becomes this process's child when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


# ---- in the process that is forked


def _serve(parent: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Fork for each request, until the parent ends. Returns in the forks: command, environment."""
    parent.send(b"ready")
    while True:
        request, descriptors, _, _ = socket.recv_fds(parent, _MAX_REQUEST_BYTES, 3)
        if not request:
            sys.exit()
        pid_out, pid_in = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            command, directory, environment = json.loads(request)
            _show(command)
            os.chdir(directory)
            # Only now is it what it looks like.
            os.write(pid_in, b"%d" % os.getpid())
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            parent.detach()
            os.closerange(3, _MAX_DESCRIPTORS)
            return command, environment
        os.close(pid_in)
        os.waitpid(between, 0)
        parent.send(os.read(pid_out, 64))
        for descriptor in (*descriptors, pid_out):
            os.close(descriptor)


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Be what `command` starts."""
    os.environ.clear()
    os.environ |= environment
    random.seed()
    _, _, module, *sys.argv[1:] = command
    runpy.run_module(MODULES[module], run_name="__main__", alter_sys=True)


def _show(command: list[str]) -> None:
    """Have the system show `command` as what this process runs."""
    # Fields 48 and 49 of the file are where its command line lies.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = b"".join(os.fsencode(word) + b"\0" for word in command)
    ctypes.memmove(start, shown[: end - start].ljust(end - start, b"\0"), end - start)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in MODULES.values():
        importlib.import_module(module)
        # It is run once more, under the name of the main module.
        del sys.modules[module]
    _show([sys.executable, "-m", "tests.forked_children"])
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as parent:
        request = _serve(parent)
    _run(*request)


if __name__ == "__main__":
    _main()
