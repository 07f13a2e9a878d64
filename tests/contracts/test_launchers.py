"""Contract of Launcher: how it starts, restarts and ends engines, over every launcher."""

from __future__ import annotations

import gc
import os
import queue
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.launch import supervised_process
from rollout.launch.launcher import EngineJob, LaunchedEngine, Launcher
from rollout.launch.local import LocalLauncher
from tests.apis.test_child_process import is_alive
from tests.launch.clusters import has_ray, has_submitit, ray_launcher, slurm_launcher
from tests.launch.scripted_engine import Words
from tests.waiting import until

pytestmark = pytest.mark.distributed
WAIT_S = 120.0
KEY = b"of this test"
LAUNCHERS: dict[str, Callable[[], Launcher]] = {"local": LocalLauncher}
if has_ray():
    LAUNCHERS["ray"] = ray_launcher
if has_submitit():
    LAUNCHERS["slurm"] = slurm_launcher


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_process, "FIRST_BACKOFF_S", 0.01)


class Place:
    """A launcher under test: the address that its engines connect to, and their reported ends."""

    def __init__(self, launcher: Launcher, listener: Listener) -> None:
        self._launcher, self._listener = launcher, listener
        self.words = Words(["as it was"])
        self.ends: queue.Queue[tuple[str, str | None]] = queue.Queue()
        self.engines: list[LaunchedEngine] = []

    def launch(self, num_engines: int = 1, **changes: Any) -> None:
        address: Future[str] = Future()
        host, port = self._listener.address
        job = {
            "module": "tests.launch.scripted_engine",
            "arguments": {"authkey": KEY, "words": self.words},
            "num_gpus": 0,
            "address": address,
            "max_restarts": 1,
            "start_timeout_s": WAIT_S,
            "on_end": lambda *end: self.ends.put(end),
        } | changes
        address.set_result(f"{host}:{port}")
        self.engines += self._launcher.launch(EngineJob(**job), num_engines)

    def dialled(self) -> tuple[Connection, int, list[str]]:
        """Accept the next engine. Returns its connection, process id and words."""
        line = self._listener.accept()
        return line, *line.recv()

    def registered(self) -> tuple[Connection, int]:
        line, pid, _ = self.dialled()
        line.send("register")
        assert line.recv() == "registered"
        return line, pid


@pytest.fixture(params=LAUNCHERS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with ExitStack() as stack:
        launcher = LAUNCHERS[request.param]()
        stack.callback(launcher.close)
        place = Place(launcher, stack.enter_context(Listener(("127.0.0.1", 0), authkey=KEY)))
        stack.callback(end_all, place.engines)
        yield place


def end_all(engines: list[LaunchedEngine]) -> None:
    for engine in engines:
        engine.end_restarts()
        engine.kill()
        engine.join(WAIT_S)


def test_launched_engines_connect_to_the_address_and_stop_on_request(place: Place) -> None:
    place.launch(2)
    assert [engine.name for engine in place.engines] == ["engine 0", "engine 1"]
    lines = [place.registered()[0] for _ in place.engines]
    for engine in place.engines:
        engine.started.result(WAIT_S)
    assert place.ends.empty()
    for line in lines:
        line.send("end")
    assert sorted(place.ends.get(timeout=WAIT_S) for _ in lines) == [
        ("engine 0", None),
        ("engine 1", None),
    ]
    for engine in place.engines:
        engine.join(WAIT_S)


def test_a_launched_engine_gets_its_arguments_as_of_the_launch(place: Place) -> None:
    place.launch()
    place.words[0] = "changed meanwhile"
    line, pid, words = place.dialled()
    assert words == ["as it was"]
    line.send("register")
    place.engines[0].started.result(WAIT_S)
    os.kill(pid, signal.SIGKILL)
    assert place.dialled()[2] == ["as it was"], "the next one, too"


def test_a_launcher_does_not_keep_an_engines_arguments(place: Place) -> None:
    given = weakref.ref(place.words)
    place.launch()
    place.words = Words()
    gc.collect()
    assert given() is None


def test_an_engine_has_not_started_before_it_is_registered(place: Place) -> None:
    place.launch()
    line, _, _ = place.dialled()
    assert not place.engines[0].started.done()
    line.send("register")
    place.engines[0].started.result(WAIT_S)


@pytest.mark.parametrize("end", ["killed", "fails"])
def test_a_launcher_restarts_an_engine_at_most_max_restarts_times(place: Place, end: str) -> None:
    place.launch()
    pids = set()
    for _ in range(2):
        line, pid = place.registered()
        place.engines[0].started.result(WAIT_S)
        pids.add(pid)
        assert place.ends.empty()
        if end == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            line.send("fail")
    name, reason = place.ends.get(timeout=WAIT_S)
    assert name == "engine 0"
    assert reason
    assert len(pids) == 2
    place.engines[0].join(WAIT_S)


def test_an_error_at_the_start_of_an_engine_is_raised_without_a_restart(place: Place) -> None:
    place.launch()
    place.dialled()[0].send("refuse")
    with pytest.raises(ConfigError, match="no such model"):
        place.engines[0].started.result(WAIT_S)
    place.engines[0].join(WAIT_S)
    assert place.ends.empty()


def test_a_start_has_a_deadline(place: Place) -> None:
    place.launch(start_timeout_s=0.01)
    with pytest.raises(ConfigError, match=r"did not start within 0\.01 s"):
        place.engines[0].started.result(WAIT_S)


def test_a_terminated_engine_ends_for_good(place: Place) -> None:
    place.launch(max_restarts=3)
    line, pid = place.registered()
    (engine,) = place.engines
    engine.started.result(WAIT_S)
    engine.end_restarts()
    engine.terminate()
    engine.join(WAIT_S)
    with pytest.raises(EOFError):
        line.recv()
    until(lambda: not is_alive(pid), "the engine has ended")
    engine.terminate()
    engine.kill()
    assert place.ends.get(timeout=WAIT_S)[1]


def test_local_launcher_raises_one_error_and_ends_all_if_the_system_refuses_a_process() -> None:
    address: Future[str] = Future()
    address.set_result("127.0.0.1:1")
    job = EngineJob(
        module="tests.launch.scripted_engine",
        arguments={},
        num_gpus=0,
        address=address,
        max_restarts=1,
        start_timeout_s=WAIT_S,
        on_end=lambda name, reason: None,
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(4096)) - set(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[6], limits[1]))  # enough for three processes
    try:
        with pytest.raises(ConfigError, match=r"cannot be started .*Too many open files"):
            LocalLauncher().launch(job, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    supervisors = [thread for thread in threading.enumerate() if thread.name.endswith(" watch")]
    for thread in supervisors:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "each has waited for the end of its process"
