"""A process imports the program's main module where it needs it, and nowhere else."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout.apis.clean_process import mentions_main, needs_main, start_clean_process

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
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
from rollout import LLM, InferenceConfig, SamplingParams

config = InferenceConfig(buffer_size_gb=0.02, block_size_tokens=8, max_sequence_length=64)
with LLM({model!r}, inference_config=config, use_coordinator=True) as llm:
    [request] = llm.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=4), progress=False)
print(len(request.generated_tokens))
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


def echoed(value: Any) -> Any:
    """What a new process makes of it. The standard library is all it needs for that."""
    process, pipe = start_clean_process(
        Connection.send, value, name="echo", imports_main=needs_main(value)
    )
    with pipe:
        assert pipe.poll(WAIT_S)
        answer = pipe.recv()
        process.join(WAIT_S)
    assert process.exitcode == 0
    return answer


def imports_of(main: Any) -> str:
    path = Path(main.__file__).with_name("imports")
    return path.read_text() if path.exists() else ""


def test_a_process_that_needs_nothing_of_main_does_not_import_it(main: Any) -> None:
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
    assert mentions_main(pickle.dumps(value))
    assert type(echoed(value)) is type(value)
    assert imports_of(main) == "__mp_main__ "


def test_what_only_multiprocessing_can_pickle_may_need_main() -> None:
    assert needs_main(threading.Lock())
    assert not needs_main("__mp_main__")


def test_threads_pickle_what_main_defines_while_processes_start(main: Any) -> None:
    is_over, failures = threading.Event(), []

    def pickle_all_the_time() -> None:
        while not is_over.is_set():
            try:
                pickle.loads(pickle.dumps(main.reward))
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=pickle_all_the_time)
    thread.start()
    try:
        for number in range(3):
            assert echoed(number) == number
    finally:
        is_over.set()
        thread.join()
    assert not failures


@pytest.mark.slow
def test_an_unguarded_program_runs_engines_in_processes(tmp_path: Path) -> None:
    from tests.apis.fleets import directory

    program = tmp_path / "program.py"
    program.write_text(UNGUARDED.format(model=directory()))
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "4"
