"""ChildProcess: a child imports its parent's main module if needed, reports errors, and ends
with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout import child_process
from rollout.child_process import ChildProcess, pickled
from rollout.errors import ConfigError, InvalidRequestError, RemoteError

ROOT = Path(__file__).parents[2]
MODULE = "tests.apis.child_modules"
WAIT_S = 120.0
MAIN = """
from pathlib import Path

class Tokenizer:
    pass

def reward():
    return 1.0

with Path(__file__).with_name("imports").open("a") as imports:
    imports.write(__name__ + " ")
"""
UNGUARDED = """
from rollout import LLM, SamplingParams

with LLM({model!r}, use_coordinator=True, buffer_size_gb=0.02, block_size_tokens=8,
         max_sequence_length=64) as llm:
    [request] = llm.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=4), progress=False)
print(len(request.generated_tokens))
"""
OF_MAIN = """
from rollout import LLM, SamplingParams

class Letters:
    eos_id = bos_id = None
    vocab_size = 211
    def encode(self, text): return [ord(letter) for letter in text]
    def decode(self, ids): return "".join(map(chr, ids))

{guard}
    with LLM({model!r}, Letters(), use_coordinator=True, buffer_size_gb=0.02, block_size_tokens=8,
             max_sequence_length=64) as llm:
        request = llm.generate("abc", SamplingParams(num_tokens_to_generate=4))
    print(len(request.generated_text))
"""


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process's main module, as if it had been started with a file."""
    path = tmp_path / "program.py"
    path.write_text(MAIN)
    module = ModuleType("__main__")
    module.__file__ = str(path)
    exec(compile(MAIN, path, "exec"), module.__dict__)
    for name in ("__main__", "__mp_main__"):  # what processes that import it call it
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "imports").unlink()
    return module


@contextmanager
def child(what: str, value: Any = None) -> Iterator[ChildProcess]:
    """One that does `what`; it must have ended at the end."""
    process = ChildProcess(MODULE)
    try:
        process.send(pickled(what, "a word"), pickled(value, "a value"))
        yield process
        process.pipe.close()
        process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait()


def echoed(value: Any) -> Any:
    """What a child makes of it."""
    with child("echo", value) as process:
        return process.receive(WAIT_S)[1]


def imports_of(main: Any) -> str:
    path = Path(main.__file__).with_name("imports")
    return path.read_text() if path.exists() else ""


def test_child_process_that_the_system_refuses_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    error = r"the process /no/such/python -m tests.apis.child_modules --child cannot be started"
    with pytest.raises(ConfigError, match=error):
        ChildProcess(MODULE)


def test_a_child_that_needs_nothing_of_main_does_not_import_it(main: Any) -> None:
    assert echoed({"tokenizer": None, "path": "model"}) == {"tokenizer": None, "path": "model"}
    assert imports_of(main) == ""
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize(
    "of", [lambda main: main.Tokenizer(), lambda main: partial(main.reward)], ids=["object", "call"]
)
def test_what_main_defines_has_it_imported_under_another_name(
    main: Any, of: Callable[[Any], Any]
) -> None:
    value = of(main)
    assert type(echoed(value)) is type(value)
    assert imports_of(main) == "__mp_main__ "


def test_what_cannot_be_pickled_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="the tokenizer cannot be sent to another process"):
        pickled(threading.Lock(), "the tokenizer")


def test_a_child_looks_for_modules_where_its_parent_does_and_leaves_the_variable_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    for value in ("/somewhere", None):
        with monkeypatch.context() as patch:
            if value is None:
                patch.delenv("PYTHONPATH", raising=False)
            else:
                patch.setenv("PYTHONPATH", value)
            with child("environment") as process:
                assert process.receive(WAIT_S) == ("environment", (value, True))


def test_an_error_of_the_child_is_raised_at_the_parent() -> None:
    with child("raise", InvalidRequestError("no such prompt")) as process:
        with pytest.raises(InvalidRequestError, match="no such prompt"):
            process.receive(WAIT_S)
        assert process.wait(WAIT_S) == 1
    with (
        child("raise", FileNotFoundError("gone")) as process,
        pytest.raises(RemoteError, match="FileNotFoundError: gone"),
    ):
        process.receive(WAIT_S)


def test_a_child_that_dies_before_its_answer_says_how() -> None:
    with (
        child("die", signal.SIGKILL) as process,
        pytest.raises(ConfigError, match=r"child_modules\) died while it started \(SIGKILL\)"),
    ):
        process.receive(WAIT_S)


def test_a_child_that_does_not_answer_in_time_is_named() -> None:
    process = ChildProcess(MODULE)
    try:
        with pytest.raises(ConfigError, match=rf"{process.pid} .*did not start within 0.01 s"):
            process.receive(0.01)
    finally:
        process.kill()
        process.wait()


def test_a_child_ends_with_its_parent_also_if_somebody_else_holds_its_pipe() -> None:
    program = f"""
import os, signal, time
from rollout.child_process import ChildProcess, pickled
process = ChildProcess({MODULE!r})
process.send(pickled("echo", ""))
process.receive({WAIT_S})
if os.fork() == 0:  # has a copy of this end of the pipe
    os.close(1)
    time.sleep({WAIT_S})
    os._exit(0)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # In a group of its own, so that the fork can be found at the end.
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = parent.communicate(timeout=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while is_alive(int(said)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere none is forked")
def test_the_forks_of_the_tests_look_like_children_that_were_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looks() -> list[object]:
        process = ChildProcess("rollout.coordinator")
        try:
            folder = Path(f"/proc/{process.pid}")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command, deadline = b"", time.monotonic() + WAIT_S
            while not command and time.monotonic() < deadline:
                # Empty for a moment while the process takes on its program.
                command = (folder / "cmdline").read_bytes().rstrip(b"\0")
            return [parent, command, os.readlink(folder / "cwd")]
        finally:
            process.kill()
            assert process.wait(WAIT_S) == -signal.SIGKILL

    forked = looks()
    monkeypatch.setattr(child_process, "subprocess", subprocess)
    assert forked == looks()
    assert forked[0] == os.getpid()


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def run(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    from tests.apis.fleets import directory

    path = tmp_path / "program.py"
    path.write_text(program.replace("{model!r}", repr(directory())))
    command = [sys.executable, str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_fleet_starts_from_an_unguarded_program(tmp_path: Path) -> None:
    done = run(tmp_path, UNGUARDED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "4"


@pytest.mark.slow
def test_engines_get_what_a_guarded_program_defines_and_an_unguarded_one_is_told(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, OF_MAIN.replace("{guard}", 'if __name__ == "__main__":'))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "4"
    done = run(tmp_path, OF_MAIN.replace("{guard}", "if True:"))
    assert done.returncode == 1
    assert "freeze_support" in done.stderr, "what Python says of a program without a guard"
