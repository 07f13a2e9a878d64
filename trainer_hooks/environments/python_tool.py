"""PythonTool: runs Python programs that a model wrote, in processes with limits and in a sandbox.

Used by users' environments with a Python tool, such as `examples.python_tool`. Each program runs in
a child process (`trainer_hooks.environments.sandboxed_python`) and a temporary directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rollout.errors import ConfigError
from rollout.ranges import PositiveInt, PositiveSeconds, check_fields
from trainer_hooks.environments import sandboxed_python
from trainer_hooks.environments.sandboxed_python import PROTECTIONS
from trainer_hooks.rewards.limiter import CallLimiter

_PROBE_TIMEOUT_S, _END_TIMEOUT_S = 60.0, 5.0
_KILLED_STATUS = 128 + signal.SIGKILL
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLimits:
    """Limits of one program. A limit that is not positive, or not whole where it must be, raises
    ConfigError.

    `wall_s`: seconds from start to end.
    `cpu_s`: whole seconds of processor time.
    `memory_bytes`: size of the address space.
    `output_bytes`: printed bytes. A program that prints more is ended.
    `file_bytes`: size of one file.
    `disk_bytes`: size of all files, which are kept in memory.
    """

    wall_s: PositiveSeconds = 10.0
    cpu_s: PositiveInt = 5
    memory_bytes: PositiveInt = 512 << 20
    output_bytes: PositiveInt = 16 << 10
    file_bytes: PositiveInt = 4 << 20
    disk_bytes: PositiveInt = 16 << 20

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """The output of a program, including standard error, and how it ended.

    `exit_status`: the program's status, or 128 plus the number of the signal that ended it.
    `stopped_by`: the limit that ended the program, or None.
    """

    output: str
    exit_status: int
    stopped_by: str | None = None

    def __str__(self) -> str:
        """Return the output for a model, with a line in brackets if a limit ended the program."""
        if self.stopped_by is None:
            return self.output
        separator = "\n" if self.output and not self.output.endswith("\n") else ""
        return f"{self.output}{separator}[stopped: {self.stopped_by}]"


class PythonTool:
    """Runs at most `num_processes` programs at a time. Further programs wait in order of arrival.

    Each program has its own interpreter with the packages of this process, and an empty directory
    that is deleted afterwards. It has no environment variables of this process and no standard
    input. Nothing is kept between programs.

    `protections` has the names of the protections that this kernel gives. With "network" a program
    has no sockets. With "processes" it cannot start or signal another process. With "files" it
    reads only Python, its packages and system libraries, and writes only its own directory. With
    "disk" the total size of its files is limited.

    The protections use user namespaces, Landlock and seccomp of the Linux kernel. The sandbox is no
    virtual machine. It does not protect from faults of the kernel. A program can see names, sizes
    and times of files, and the time that other programs take.
    """

    def __init__(
        self,
        limits: PythonLimits | None = None,
        *,
        num_processes: int = 4,
        required: Sequence[str] = PROTECTIONS,
    ) -> None:
        """Find the kernel's protections by starting Python once.

        `limits`: limits of each program. None takes the defaults.
        `required`: protections without which no program is run.

        Raises ConfigError if the kernel lacks a required protection, for `num_processes` below 1,
        for limits under which Python does not start, and outside Linux.
        """
        if num_processes < 1:
            raise ConfigError(f"num_processes={num_processes} must be at least 1")
        self.limits = limits or PythonLimits()
        self.protections = _protections(self.limits)
        self._required = required
        self._limiter = CallLimiter(num_processes)
        if missing := [name for name in required if name not in self.protections]:
            raise ConfigError(
                f"this kernel cannot protect {', '.join(missing)} from the model's programs; run "
                f"them in a container or virtual machine, and leave these names out of "
                f"required={required!r}"
            )

    async def run(self, program: str) -> PythonResult:
        """Run `program` to its end and return its output. Cancelling this call ends the program.
        Raises OSError if no process can be started."""
        permit = await self._limiter.acquire()
        try:
            with tempfile.TemporaryDirectory(prefix="python-tool-") as directory:
                return await self._run_in(directory, program)
        finally:
            self._limiter.release(permit)

    async def python(self, code: str) -> str:
        """Run Python code. Returns what it prints.

        Args:
            code: A whole program. Only what it prints is returned.
        """
        return str(await self.run(code))

    async def _run_in(self, directory: str, program: str) -> PythonResult:
        process = await asyncio.create_subprocess_exec(
            *_command(self.limits, directory, self._required),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(directory),
            start_new_session=True,  # so that its process group can be killed
        )
        output, stopped_by = bytearray(), None
        try:
            exchange = self._exchange(process, program, output)
            stopped_by = await asyncio.wait_for(exchange, self.limits.wall_s)
        except asyncio.TimeoutError:
            stopped_by = f"more than {self.limits.wall_s:g} s"
        finally:
            await _end(process)
        assert process.returncode is not None
        text = output[: self.limits.output_bytes].decode(errors="replace")
        if process.returncode == _KILLED_STATUS and stopped_by is None:
            stopped_by = f"more than {self.limits.cpu_s} s of processor time"
        return PythonResult(output=text, exit_status=process.returncode, stopped_by=stopped_by)

    async def _exchange(
        self, process: asyncio.subprocess.Process, program: str, output: bytearray
    ) -> str | None:
        """Send the program to the process and append its output to `output`, until it ends. Return
        the limit that the output exceeded, or None."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # the output says why the process ended early
            process.stdin.write(program.encode(errors="replace"))
            await process.stdin.drain()
            process.stdin.close()
        while chunk := await process.stdout.read(_READ_BYTES):
            output += chunk
            if len(output) > self.limits.output_bytes:
                return f"more than {self.limits.output_bytes} bytes of output"
        await process.wait()
        return None


async def _end(process: asyncio.subprocess.Process) -> None:
    """Terminate the process and wait for its end. After 5 s, kill its process group and raise."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()  # the process kills and reaps its child
        try:
            await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        except BaseException:  # also if the caller is cancelled
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _protections(limits: PythonLimits) -> frozenset[str]:
    """Return the protections that this kernel gives. Raises ConfigError outside Linux, and if
    Python does not start under `limits`."""
    if sys.platform != "linux":
        raise ConfigError(f"PythonTool needs Linux; this is {sys.platform}")
    with tempfile.TemporaryDirectory(prefix="python-tool-") as directory:
        answer = subprocess.run(
            _command(limits, directory, ()),
            env=_environment(directory),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    if answer.returncode:
        raise ConfigError(
            f"Python does not start under {limits}; raise the limits: "
            f"{answer.stdout}{answer.stderr}"
        )
    return frozenset(json.loads(answer.stdout))


def _command(limits: PythonLimits, directory: str, required: Sequence[str]) -> list[str]:
    settings = json.dumps(asdict(limits) | {"directory": directory, "required": list(required)})
    # With -I, neither the environment nor the working directory changes what is imported.
    return [sys.executable, "-I", "-u", sandboxed_python.__file__, settings]


def _environment(directory: str) -> dict[str, str]:
    """Return the environment variables of a program, without this process's, which can hold
    keys."""
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {"HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", "PATH": ""} | one_thread
