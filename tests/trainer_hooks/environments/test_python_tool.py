"""PythonTool: misbehaving programs end, leave nothing behind and disturb nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from trainer_hooks.environments import sandboxed_python
from trainer_hooks.environments.python_tool import PythonLimits, PythonResult, PythonTool
from trainer_hooks.environments.sandboxed_python import PROTECTIONS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PythonTool needs Linux")
LIMITS = PythonLimits(wall_s=20.0, cpu_s=1, memory_bytes=256 << 20, output_bytes=4096)


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    tool = PythonTool(LIMITS, num_processes=2, required=())
    if tool.protections != frozenset(PROTECTIONS):
        pytest.skip(f"this kernel only protects {sorted(tool.protections)}")
    return tool


def run(tool: PythonTool, *programs: str) -> list[PythonResult]:
    async def all_of_them() -> list[PythonResult]:
        return list(await asyncio.gather(*map(tool.run, programs)))

    return asyncio.run(all_of_them())


def processes_with(text: str) -> list[int]:
    """Return the ids of processes whose command line contains `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def left_behind(result: PythonResult) -> list[int]:
    """Return the processes left by a program that printed its own directory in its first line."""
    directory = result.output.splitlines()[0]
    assert directory.startswith("/")
    assert not Path(directory).exists()
    return processes_with(directory)


HERE = "import os; print(os.getcwd(), flush=True)\n"


def test_python_tool_returns_output_in_order_and_exit_status(tool: PythonTool) -> None:
    program = "import sys; print(6 * 7); print('warning', file=sys.stderr); sys.exit(3)"
    assert run(tool, program) == [PythonResult(output="42\nwarning\n", exit_status=3)]


def test_traceback_shows_only_the_programs_lines(tool: PythonTool) -> None:
    (result,) = run(tool, "x = 1\nprint(x / 0)")
    assert result.exit_status == 1
    assert result.output.startswith('Traceback (most recent call last):\n  File "<program>"')
    assert "sandboxed_python" not in result.output
    assert result.output.endswith("ZeroDivisionError: division by zero\n")


def test_installed_packages_can_be_imported(tool: PythonTool) -> None:
    (result,) = run(tool, "import numpy; print(numpy.arange(4).sum())")
    assert result.output == "6\n"


def test_cpu_s_ends_an_endless_loop(tool: PythonTool) -> None:
    (result,) = run(tool, HERE + "while True: pass")
    assert result.stopped_by == "more than 1 s of processor time"
    assert result.exit_status == 128 + signal.SIGKILL
    assert left_behind(result) == []
    assert str(result).endswith("\n[stopped: more than 1 s of processor time]")


def test_wall_s_ends_a_sleeping_program(tool: PythonTool) -> None:
    impatient = PythonTool(PythonLimits(wall_s=0.5), required=())
    (result,) = run(impatient, HERE + "import time; time.sleep(1e6)")
    assert result.stopped_by == "more than 0.5 s"
    assert left_behind(result) == []


@pytest.mark.parametrize(
    "program",
    [
        "while True: os.fork()",
        "import subprocess; subprocess.Popen(['sleep', '1000'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "os.posix_spawn('/bin/sleep', ['sleep', '1000'], {})",
        "os.setsid()",
        "os.execv('/bin/sleep', ['sleep', '1000'])",
    ],
)
def test_program_cannot_start_a_process(tool: PythonTool, program: str) -> None:
    (result,) = run(tool, HERE + program)
    assert "PermissionError" in result.output
    assert left_behind(result) == []


def test_memory_bytes_raises_memory_error_in_the_program(tool: PythonTool) -> None:
    (result,) = run(tool, "x = [0]\nwhile True: x = x * 2")
    assert result.output.endswith("MemoryError\n")


def test_endless_threads_end_with_an_error(tool: PythonTool) -> None:
    program = HERE + (
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()"
    )
    (result,) = run(tool, program)
    assert result.exit_status != 0
    assert left_behind(result) == []


def test_output_bytes_cuts_endless_output(tool: PythonTool) -> None:
    (result,) = run(tool, "while True: print('x' * 1000)")
    assert len(result.output) == 4096
    assert result.stopped_by == "more than 4096 bytes of output"


def test_files_outside_cannot_be_read_written_or_changed(tool: PythonTool, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("password")
    secret.chmod(0o644)
    attempts = [
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.unlink({str(secret)!r})",
        f"os.rename({str(secret)!r}, 'mine')",
        f"os.chmod({str(secret)!r}, 0)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"os.symlink({str(secret)!r}, 'link'); open('link').read()",
        f"os.listdir({str(tmp_path)!r})",
        "open('/etc/passwd').read()",
        "open('/proc/1/environ').read()",
        "open('/proc/self/environ').read()",
        "os.listdir('/root')",
    ]
    results = run(tool, *(f"import os; {attempt}" for attempt in attempts))
    for attempt, result in zip(attempts, results, strict=True):
        assert "PermissionError" in result.output or "OSError: [Errno 18]" in result.output, attempt
    assert secret.read_text() == "password"
    assert [path.name for path in tmp_path.iterdir()] == ["secret.txt"]
    assert secret.stat().st_mode & 0o777 == 0o644


def test_disk_bytes_limits_the_directory_which_is_deleted(tool: PythonTool) -> None:
    program = HERE + (
        "open('a', 'w').write('kept'); print(open('a').read(), os.listdir())\n"
        "for i in range(100): open(f'b{i}', 'wb').write(bytes(1 << 20))"
    )
    (result,) = run(tool, program)
    assert result.output.splitlines()[1] == "kept ['a']"
    assert "No space left on device" in result.output
    assert left_behind(result) == []


def test_programs_find_no_files_of_earlier_programs(tool: PythonTool) -> None:
    run(tool, "open('a', 'w').write('x')")
    (second,) = run(tool, "import os; print(os.listdir())")
    assert second.output == "[]\n"


def test_program_cannot_connect_to_anything(tool: PythonTool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        (result,) = run(tool, program)
        assert "PermissionError" in result.output
        with pytest.raises(BlockingIOError):
            server.accept()


def test_program_cannot_signal_other_processes(tool: PythonTool) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        targets = (other.pid, os.getpid(), -1, 0)
        results = run(tool, *(f"import os; os.kill({target}, 9)" for target in targets))
        assert all("PermissionError" in result.output for result in results)
        assert other.poll() is None
        other.kill()


def test_program_cannot_raise_its_limits(tool: PythonTool) -> None:
    program = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (100, 100))"
    (result,) = run(tool, program)
    assert "ValueError" in result.output or "PermissionError" in result.output


def test_program_sees_no_environment_variable_of_this_process(
    tool: PythonTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "sesame")
    (result,) = run(tool, "import os; print(dict(os.environ))")
    assert "TMPDIR" in result.output, "the program ran"
    assert "API_KEY" not in result.output
    assert "sesame" not in result.output


def test_exit_status_reports_crashes(tool: PythonTool) -> None:
    crash = "import ctypes; ctypes.string_at(0)"
    deep = "print(eval('(' * 100000))"
    (crashed, nested) = run(tool, crash, deep)
    assert crashed.exit_status == 128 + signal.SIGSEGV
    assert nested.exit_status != 0


def test_num_processes_bounds_programs_at_a_time() -> None:
    tool = PythonTool(LIMITS, num_processes=1, required=())
    program = "import time; print(time.monotonic()); time.sleep(0.2); print(time.monotonic())"
    spans = [list(map(float, result.output.split())) for result in run(tool, *[program] * 3)]
    spans.sort()
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start


def test_cancelled_program_is_ended_and_releases_its_permit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel() -> None:
        tool = PythonTool(LIMITS, num_processes=1, required=())
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        run = asyncio.create_task(tool.run("import time; time.sleep(1e6)"))
        while len(processes_with(str(tmp_path))) < 2:  # the one that waits, and the program
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert processes_with(str(tmp_path)) == []
        assert (await tool.run("print('next')")).output == "next\n"

    asyncio.run(cancel())


def test_python_method_is_a_tool_that_returns_text(tool: PythonTool) -> None:
    assert asyncio.run(tool.python("print('hi')")) == "hi\n"
    assert tool.python.__name__ == "python"
    assert (tool.python.__doc__ or "").startswith("Run Python code. Returns what it prints.")


@pytest.mark.parametrize("field", ["wall_s", "cpu_s", "memory_bytes", "output_bytes"])
def test_python_limits_of_zero_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0 must be "):
        PythonLimits(**{field: 0})


def test_fractional_cpu_s_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpu_s=0\.5 must be an integer"):
        PythonLimits(cpu_s=0.5)  # type: ignore[arg-type]


def test_python_tool_reports_limits_under_which_python_cannot_start(tool: PythonTool) -> None:
    settings = {**asdict(LIMITS), "directory": "/no/such/directory", "required": []}
    command = [sys.executable, "-I", sandboxed_python.__file__, json.dumps(settings)]
    ended = subprocess.run(command, input="print(1)", capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stdout.startswith("not run: FileNotFoundError")


def test_missing_required_protection_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot protect telepathy"):
        PythonTool(LIMITS, required=("telepathy",))


def test_programs_end_with_the_process_of_their_python_tool(tmp_path: Path) -> None:
    source = (
        "import asyncio\n"
        "from trainer_hooks.environments.python_tool import PythonLimits, PythonTool\n"
        "tool = PythonTool(PythonLimits(wall_s=300), required=())\n"
        "asyncio.run(tool.run('import time; time.sleep(1e6)'))\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", source], env=environment) as trainer:
        deadline_s = time.monotonic() + 120
        while len(processes_with(str(tmp_path))) < 2:  # the one that waits, and the program
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        trainer.kill()
    assert_all_end(str(tmp_path))


def test_program_ends_if_its_parent_was_killed_before_prctl(
    tmp_path: Path,
) -> None:
    source = (
        "import os, signal, sys, time\n"
        "from trainer_hooks.environments import sandboxed_python\n"
        "parent, die_with_parent = os.getpid(), sandboxed_python._die_with_parent\n"
        "def too_late(*given):\n"
        "    if os.getpid() != parent:\n"
        "        os.kill(parent, signal.SIGKILL)\n"
        "        while os.getppid() == parent:\n"
        "            time.sleep(0.01)\n"
        "    die_with_parent(*given)\n"
        "sandboxed_python._die_with_parent = too_late\n"
        "sandboxed_python._make_namespaces = lambda: False\n"  # so that it can kill its parent
        "sandboxed_python.main(sys.argv[1:])\n"
    )
    settings = asdict(LIMITS) | {"directory": str(tmp_path), "required": []}
    ended = subprocess.run(
        [sys.executable, "-c", source, json.dumps(settings)],
        input=b"import time; time.sleep(1e6)",
        timeout=120,
    )
    assert ended.returncode == -signal.SIGKILL
    assert_all_end(str(tmp_path))


def assert_all_end(text: str) -> None:
    """Assert that all processes whose command line has `text` end. Kills those that do not."""
    deadline_s = time.monotonic() + 60
    while left := processes_with(text):
        if time.monotonic() > deadline_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
