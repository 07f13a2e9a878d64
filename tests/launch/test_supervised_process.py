"""SupervisedProcess restarts a child that fails, at most `max_restarts` times in a row."""

from __future__ import annotations

import logging
import signal
import weakref
from typing import Any

import pytest

from rollout.child_process import ChildProcess, pickled
from rollout.errors import ConfigError
from rollout.launch import supervised_process
from rollout.launch.supervised_process import SupervisedProcess
from tests.waiting import until

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_process, "FIRST_BACKOFF_S", 0.01)


class Script:
    """What the children do, one after another; a child beyond these answers and stays."""

    def __init__(self, *words: tuple[str, Any]) -> None:
        self._words = list(words)
        self.children: list[ChildProcess] = []

    def __call__(self, child: ChildProcess) -> None:
        number = len(self.children)
        self.children.append(child)
        what = self._words[number] if number < len(self._words) else ("echo", number)
        child.send(*(pickled(each, "a word") for each in what))


def supervised(script: Script, **options: Any) -> SupervisedProcess:
    options = {"start_timeout_s": WAIT_S} | options
    return SupervisedProcess("engine 7", "tests.apis.child_modules", script, **options)


def end(process: SupervisedProcess) -> None:
    process.end_restarts()
    process.kill()
    process.join()


def test_supervised_process_restarts_a_killed_child() -> None:
    script = Script(("echo", "first"))
    process = supervised(script, max_restarts=1)
    try:
        assert process.started.result(WAIT_S) == ("echo", "first")
        pid = process.pid
        script.children[0].kill()
        until(lambda: len(script.children) == 2, "a second child")
        assert process.pid != pid
    finally:
        end(process)


def test_max_restarts_limits_restarts_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    script, ends = Script(("echo", 0), *[("die", signal.SIGKILL)] * 5), []
    process = supervised(script, max_restarts=3, on_end=ends.append)
    process.started.result(WAIT_S)
    script.children[0].kill()
    process.join()
    assert len(script.children) == 4
    assert ends == [-signal.SIGKILL]
    assert "engine 7 (process" in caplog.text
    assert "has ended (SIGKILL), after 3 restarts in a row" in caplog.text


def test_a_restart_that_the_system_refuses_counts_to_max_restarts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script, ends = Script(("echo", 0)), []
    process = supervised(script, max_restarts=2, on_end=ends.append)
    process.started.result(WAIT_S)
    monkeypatch.setattr("sys.executable", "/no/such/python")
    script.children[0].kill()
    process.join(WAIT_S)
    assert ends == [-signal.SIGKILL]
    assert caplog.text.count("engine 7 could not be restarted: the process /no/such/python") == 2
    assert "has ended (SIGKILL), after 2 restarts in a row" in caplog.text


def test_a_steady_child_resets_max_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_process, "STEADY_S", 0.0)
    script, ends = Script(), []
    process = supervised(script, max_restarts=1, on_end=ends.append)
    try:
        process.started.result(WAIT_S)
        for number in range(1, 4):
            script.children[-1].kill()
            until(lambda number=number: len(script.children) > number, "another child")
        assert ends == []
    finally:
        end(process)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_arguments_of_a_child_are_kept_only_for_restarts(max_restarts: int) -> None:
    script = Script()
    kept = weakref.ref(script)
    process = supervised(script, max_restarts=max_restarts)
    process.started.result(WAIT_S)
    del script
    try:
        assert (kept() is not None) is (max_restarts > 0)
    finally:
        end(process)


def test_a_child_that_exits_with_0_is_not_restarted() -> None:
    script, ends = Script(), []
    process = supervised(script, max_restarts=3, on_end=ends.append)
    process.started.result(WAIT_S)
    script.children[0].pipe.send("go")
    process.join()
    assert (len(script.children), ends) == (1, [0])


def test_an_error_of_the_first_start_is_raised_without_restart() -> None:
    script, ends = Script(("raise", ConfigError("no such model"))), []
    process = supervised(script, max_restarts=3, on_end=ends.append)
    with pytest.raises(ConfigError, match="no such model"):
        process.started.result(WAIT_S)
    process.join()
    assert (len(script.children), ends) == (1, [])


def test_an_error_before_the_child_gets_arguments_is_raised() -> None:
    def begin(child: ChildProcess) -> None:
        raise ZeroDivisionError

    process = supervised(begin)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        process.started.result(WAIT_S)
    process.join()


def test_start_timeout_s_limits_a_start(caplog: pytest.LogCaptureFixture) -> None:
    process = supervised(Script(), start_timeout_s=0.01)
    with pytest.raises(ConfigError, match=r"did not start within 0.01 s"):
        process.started.result(WAIT_S)
    process.join()


def test_end_restarts_ends_a_backoff(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervised_process, "FIRST_BACKOFF_S", 10 * WAIT_S)
    monkeypatch.setattr(supervised_process, "MAX_BACKOFF_S", 10 * WAIT_S)
    caplog.set_level(logging.WARNING)
    script = Script()
    process = supervised(script, max_restarts=1)
    process.started.result(WAIT_S)
    script.children[0].kill()
    until(lambda: "it is restarted in" in caplog.text, "the line about the start")
    process.end_restarts()
    process.join(WAIT_S)
    assert len(script.children) == 1
