"""TorchrunLauncher on rank 0, and serve_engines on the other ranks."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout.errors import ConfigError
from rollout.launch import torchrun
from rollout.launch.launcher import EngineJob
from rollout.launch.torchrun import TorchrunLauncher
from tests.launch.ranks import KEY, serve_as_rank
from tests.launch.scripted_engine import Words
from tests.processes import PROCESSES
from tests.unpickled_code import RunsCode

pytestmark = pytest.mark.distributed
WAIT_S = 120.0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mapping[str, str]:
    """Set torchrun's environment of rank 0 of three on one machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = str(tmp_path / "given")
    monkeypatch.setenv(torchrun.FOLDER_VARIABLE, folder)
    monkeypatch.setattr(torchrun.atexit, "register", lambda *_: None)
    return environment | {torchrun.FOLDER_VARIABLE: folder}


@contextmanager
def others(environment: Mapping[str, str]) -> Iterator[list[Connection]]:
    """Ranks 1 and 2, which say how `serve_engines` has ended."""
    lines, processes = [], []
    for rank in ("1", "2"):
        here, there = PROCESSES.Pipe()
        of_rank = {**environment, "RANK": rank, "LOCAL_RANK": rank}
        processes.append(PROCESSES.Process(target=serve_as_rank, args=(there, of_rank)))
        processes[-1].start()
        there.close()
        lines.append(here)
    try:
        yield lines
    finally:
        for process in processes:
            process.kill()
            process.join()


def job(listener: Listener, **changes: Any) -> EngineJob:
    address: Future[str] = Future()
    host, port = listener.address
    address.set_result(f"{host}:{port}")
    fields = {
        "module": "tests.launch.scripted_engine",
        "arguments": {"authkey": KEY, "words": Words(["hello"])},
        "num_gpus": 0,
        "address": address,
        "max_restarts": 1,
        "start_timeout_s": WAIT_S,
        "on_end": queue.Queue().put,
    } | changes
    return EngineJob(**fields)


def dialled(listener: Listener) -> tuple[Connection, int]:
    line = listener.accept()
    pid, words = line.recv()
    assert words == ["hello"]
    line.send("register")
    assert line.recv() == "registered"
    return line, pid


def test_each_other_rank_is_an_engine_of_one_fleet_after_the_other(
    ranks: Mapping[str, str],
) -> None:
    launcher = TorchrunLauncher()
    assert launcher.host == "127.0.0.1"
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener, others(ranks) as ends:
        for _ in range(2):
            assert launcher.launch(job(listener), 2) == [], "they come by themselves"
            engines = [dialled(listener) for _ in range(2)]
            os.kill(engines[0][1], signal.SIGKILL)
            engines[0] = dialled(listener)  # its rank has started it again
            for line, _ in engines:
                line.send("end")
            launcher.close()
            assert not os.listdir(ranks[torchrun.FOLDER_VARIABLE]), "keys are not left behind"
        launcher._end()
        assert [end.poll(WAIT_S) and end.recv() for end in ends] == [True, True]


def test_a_failed_start_ends_the_torchrun_rank(ranks: Mapping[str, str]) -> None:
    launcher = TorchrunLauncher()
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener, others(ranks) as ends:
        launcher.launch(job(listener), 2)
        for _ in range(2):
            line = listener.accept()
            line.recv()
            line.send("refuse")
        assert ["no such model" in end.recv() for end in ends] == [True, True]


def test_torchrun_store_holds_no_keys_and_no_pickles(ranks: Mapping[str, str]) -> None:
    launcher = TorchrunLauncher()
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        launcher.launch(job(listener), 2)
        stored = launcher._store.get(f"{torchrun._COMMAND}/1")
        (file,) = os.listdir(ranks[torchrun.FOLDER_VARIABLE])
        assert msgspec.msgpack.decode(stored) == {"file": file}
        assert KEY in (Path(ranks[torchrun.FOLDER_VARIABLE]) / file).read_bytes()
        launcher.close()


def test_a_forged_torchrun_command_runs_no_code(ranks: Mapping[str, str], tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    elsewhere = tmp_path / f"engine-{'0' * 32}"
    elsewhere.write_bytes(pickle.dumps(RunsCode(trap)))
    elsewhere.chmod(0o600)
    store = TorchrunLauncher()._store
    for words, fault in [
        (elsewhere.read_bytes(), "malformed command"),
        (msgspec.msgpack.encode({"file": str(elsewhere)}), "not the name of a file"),
        (msgspec.msgpack.encode({"file": f"../{elsewhere.name}"}), "not the name of a file"),
        (msgspec.msgpack.encode({"file": elsewhere.name}), "cannot be read"),
    ]:
        store.set(f"{torchrun._COMMAND}/1", words)
        with others(ranks) as ends:
            assert [fault in end.recv() for end in ends] == [True, True]
    assert not trap.exists()


def test_a_folder_that_others_can_write_is_refused_by_every_rank(
    ranks: Mapping[str, str],
) -> None:
    os.mkdir(ranks[torchrun.FOLDER_VARIABLE])
    os.chmod(ranks[torchrun.FOLDER_VARIABLE], 0o777)
    with pytest.raises(ConfigError, match="other users may write"):
        TorchrunLauncher()
    with others(ranks) as ends:
        assert ["other users may" in end.recv() for end in ends] == [True, True]


def test_rank_0_serves_no_engine(ranks: Mapping[str, str]) -> None:
    assert not torchrun.serve_engines()


def test_torchrun_launcher_refuses_more_engines_than_ranks(
    ranks: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        launcher = TorchrunLauncher()
        with pytest.raises(ConfigError, match="start 4 ranks"):
            launcher.launch(job(listener), 3)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"rank 1 of 3.*serve_engines"):
        TorchrunLauncher()


@pytest.mark.parametrize(
    ("local_rank", "seen", "own"),
    [("0", None, ["0", "1"]), ("1", None, ["2", "3"]), ("1", "4,5,6,7", ["6", "7"])],
)
def test_each_rank_has_gpus_of_its_own(
    local_rank: str, seen: str | None, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert torchrun._own_gpus(2, seen) == own
