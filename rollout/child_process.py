"""ChildProcess: runs `python -m MODULE --child` as a child that ends with its parent.

The child's stdin is a socket in both directions. The parent sends pickled arguments. The child
answers when it is ready, or sends the error that keeps it from starting. The child imports the
parent's main module only if the arguments need it. A process of multiprocessing always imports it,
which takes time and runs a main module without the guard `if __name__ == "__main__":`.

Parents are `rollout.launch` (engines and coordinators), `rollout.tensor_parallel` (ranks),
`rollout.serve.control.process_group` (weight receivers), `trainer_hooks.rewards.processes` and GPU
benchmarks. The modules that they start, such as `rollout.apis.engine_process`, call `run_child`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from multiprocessing.spawn import get_preparation_data, prepare
from types import MappingProxyType
from typing import Any

from rollout.errors import ConfigError, decode_error, encode_error

CHILD_FLAG = "--child"
_PATH = "PYTHONPATH"
_PARENT_CHECK_S, _END_S = 0.2, 5.0
_NO_CHANGES: Mapping[str, str] = MappingProxyType({})


def pickled(value: Any, what: str) -> bytes:
    """Return `value` pickled, as an argument for `ChildProcess.send`. Tensors are copied. Raises
    ConfigError, in which `what` names the value, if the value cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # objects of users may raise anything
        raise ConfigError(f"{what} cannot be sent to another process: {error}") from error


class ChildProcess:
    """A child process, which the constructor starts. The parent calls `send` once and then
    `receive` once. `pipe` is the parent's end of the connection, for later messages."""

    def __init__(self, module: str, environment: Mapping[str, str] = _NO_CHANGES) -> None:
        """Start the child with the variables of `environment` added to this process's environment.
        Raises ConfigError if the system refuses another process or file. Raises RuntimeError if
        this process is a child whose parent's main module has no guard."""
        self._preparation = get_preparation_data(module)
        self._preparation["authkey"] = bytes(self._preparation["authkey"])  # which pickle refuses
        # The child must find the modules of this process; it restores the variable.
        environment = {**os.environ, **environment, _PATH: os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", module, CHILD_FLAG]
        try:
            self.pipe, theirs = Pipe()
            with theirs, _no_interrupt():
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        except OSError as error:
            raise ConfigError(
                f"the process {' '.join(command)} cannot be started ({error}); see the limits of "
                "open files and processes (ulimit -n, -u), and free memory"
            ) from error
        self.pid = self._process.pid
        self.name = f"process {self.pid} ({module})"

    def send(self, *arguments: bytes) -> None:
        """Send the arguments, each created by `pickled`. Raises OSError if the child has ended.
        With large arguments it waits until the child reads them, after the import of its module."""
        preparation = self._preparation
        if not any(b"__main__" in argument for argument in arguments):
            preparation.pop("init_main_from_name", None)
            preparation.pop("init_main_from_path", None)
        self.pipe.send((os.getpid(), os.environ.get(_PATH), preparation, len(arguments)))
        for argument in arguments:
            self.pipe.send_bytes(argument)

    def receive(self, timeout_s: float) -> Any:
        """Return the child's first answer, which it sends when it is ready. Raises the error that
        the child sent instead. Raises ConfigError if the child ended, or did not answer within
        `timeout_s`."""
        if not self.pipe.poll(timeout_s):
            raise ConfigError(f"{self.name} did not start within {timeout_s:g} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            end = end_of(self.wait())
            raise ConfigError(
                f"{self.name} died while it started ({end}); its log says why"
            ) from None
        if isinstance(answer, dict):
            raise decode_error(answer)
        return answer

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the child's end and return its exit code. Raises subprocess.TimeoutExpired after
        `timeout_s`."""
        return self._process.wait(timeout_s)

    def terminate(self) -> None:
        """Send SIGTERM. Does nothing if the child has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if the child has ended."""
        self._process.kill()


def end_of(exit_code: int) -> str:
    """Return an exit code of `ChildProcess.wait` as text, such as "exit code 1" or "SIGKILL"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-exit_code).name
    return f"signal {-exit_code}"


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Block SIGINT in this thread and in the processes that it starts in the block."""
    # The parent alone handles Ctrl-C, and ends its children.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the child


def run_child(work: Callable[..., object]) -> None:
    """Call `work` with the pipe to the parent and the arguments that the parent sent.

    It is the main function of a child. It replaces stdin and ignores SIGINT. An exception is
    raised, and sent to the parent if the parent still reads. Exits with 1 if the parent ends before
    it has sent the arguments.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    pipe = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        parent_pid, path, preparation, num_arguments = pipe.recv()
        arguments = [pipe.recv_bytes() for _ in range(num_arguments)]
    except (EOFError, OSError):
        sys.exit(1)  # the parent has ended
    _end_with(parent_pid)
    try:
        _prepare(path, preparation)
        work(pipe, *map(pickle.loads, arguments))
    except Exception as error:  # the parent waits for the first answer
        with contextlib.suppress(OSError):
            pipe.send(encode_error(error))
        raise


def _prepare(path: str | None, preparation: dict[str, Any]) -> None:
    """Set sys.path as in the parent, and import the parent's main module if the arguments need it.
    Restores PYTHONPATH to the parent's value `path`; None removes the variable."""
    del os.environ[_PATH]
    if path is not None:
        os.environ[_PATH] = path
    process: Any = multiprocessing.current_process()
    # A main module without a guard must not start this very process again.
    process._inheriting = True
    try:
        prepare(preparation)
    finally:
        del process._inheriting


def _end_with(parent_pid: int) -> None:
    """Start a thread that ends this process after its parent has ended, even by SIGKILL. The thread
    sends SIGTERM to this process, and exits 5 s later."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)  # for a child that has something to clean up
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
