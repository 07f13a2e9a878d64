"""What tests/conftest.py and the pytest settings promise every test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch

from tests.run_kind import max_examples
from tests.run_seed import VARIABLE, run_seed, sets_left_out
from tests.run_seed import pytest_configure as choose_seed


def test_connection_to_another_machine_is_refused() -> None:
    # 192.0.2.0/24 is reserved for documentation (RFC 5737).
    with (
        socket.socket() as client,
        pytest.raises(RuntimeError, match=r"loopback only, not to \('192\.0\.2\.1', 80\)"),
    ):
        client.connect(("192.0.2.1", 80))


def test_connection_to_loopback_is_allowed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert client.getpeername() == server.getsockname()


def test_torch_runs_one_thread() -> None:
    assert torch.get_num_threads() == 1


def test_hypothesis_draws_from_the_runs_seed_alone(request: pytest.FixtureRequest) -> None:
    profile = hypothesis.settings()
    assert not profile.derandomize
    assert profile.database is None
    assert profile.print_blob
    assert profile.deadline is None
    assert profile.max_examples == max_examples()
    assert request.config.getoption("hypothesis_seed") == run_seed()


DRAWS_AND_FAILS = """
import pytest
from hypothesis import given, settings, strategies as st
from tests.run_seed import run_seed

@pytest.mark.parametrize("worker", range(2))
def test_draws(worker):
    drawn = []

    @settings(database=None)
    @given(st.integers())
    def draw(number):
        drawn.append(number)

    draw()
    with open(f"{worker}.txt", "w") as file:
        print(run_seed(), drawn, file=file)
    assert not drawn
"""


def drawn_in_a_run(directory: Path, *arguments: str) -> tuple[str, list[str]]:
    """Return a run's output, and the seed and draws of each of its two tests."""
    (directory / "test_draws.py").write_text(DRAWS_AND_FAILS)
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ["-p", "tests.run_seed", "-p", "xdist", "-p", "_hypothesis_pytestplugin"]
    run = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-q"), *plugins, *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    return run.stdout, [(directory / f"{worker}.txt").read_text() for worker in range(2)]


def test_seed_is_shared_by_all_workers_printed_and_draws_the_same_again(tmp_path: Path) -> None:
    printed, drawn = drawn_in_a_run(tmp_path, "-n2")
    seed = drawn[0].split()[0]
    assert drawn[0] == drawn[1]
    assert printed.count(f"seed of this run: {seed} ") == 2  # before the tests, and as some fail
    assert drawn_in_a_run(tmp_path, f"--hypothesis-seed={seed}")[1] == drawn


def test_seed_is_that_of_the_option_or_the_variable_or_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seed_of(option: str | None, variable: str) -> int:
        monkeypatch.setenv(VARIABLE, variable)
        choose_seed(SimpleNamespace(option=SimpleNamespace(hypothesis_seed=option)))
        return run_seed()

    assert seed_of("5", variable="7") == 5
    assert seed_of(None, variable="7") == 7
    assert seed_of(None, variable="") != seed_of(None, variable="")


@pytest.mark.parametrize("module", ["rollout", "rollout.worker.kv_cache", "trainer_hooks.losses"])
def test_warning_of_our_own_packages_is_an_error(module: str) -> None:
    with pytest.raises(UserWarning, match="careless"):
        warnings.warn_explicit("careless", UserWarning, "file.py", 1, module=module)


def test_warning_of_another_package_is_none() -> None:
    with pytest.warns(UserWarning, match="theirs"):
        warnings.warn_explicit("theirs", UserWarning, "file.py", 1, module="rollouts")


@dataclass(frozen=True, eq=False)
class Item:
    """The attributes of a collected test that `sets_left_out` reads."""

    nodeid: str
    marks: tuple[tuple[str, pytest.Mark], ...] = (("drawn", pytest.mark.drawn(2).mark),)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return dict(self.marks).get(name)


def left_out(items: list[Item], seed: int) -> set[str]:
    return {item.nodeid for item in sets_left_out(items, seed)}  # type: ignore[arg-type, misc]


@pytest.fixture
def whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test`, whatever this run is."""
    monkeypatch.delenv("ROLLOUT_TEST_QUICK", raising=False)
    monkeypatch.delenv("ROLLOUT_TEST_LONG", raising=False)


@pytest.mark.usefixtures("whole_run")
def test_max_examples_follows_the_kind_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [max_examples()]
    for variable in ("ROLLOUT_TEST_QUICK", "ROLLOUT_TEST_LONG"):
        monkeypatch.setenv(variable, "1")
        found.append(max_examples())
    assert found == [25, 5, 1000]


@pytest.mark.usefixtures("whole_run")
def test_sets_left_out_are_all_but_as_many_as_drawn_says() -> None:
    items = [Item(f"test_many.py::test_many[{number}]") for number in range(9)]
    assert len(left_out(items, seed=1)) == 7
    assert left_out(items, seed=1) == left_out(items, seed=1)
    assert left_out(items, seed=1) != left_out(items, seed=2)
    assert left_out(items[:2], seed=1) == set()


@pytest.mark.usefixtures("whole_run")
def test_sets_left_out_has_no_skipped_set_and_no_test_without_the_mark() -> None:
    drawn = [Item(f"test_many.py::test_many[{number}]") for number in range(3)]
    skipped = Item(
        "test_many.py::test_many[gpu]", (*drawn[0].marks, ("skip", pytest.mark.skip.mark))
    )
    unmarked = [Item(f"test_others.py::test_other[{number}]", ()) for number in range(9)]
    (name,) = left_out([*drawn, skipped, *unmarked], seed=1)
    assert name in {item.nodeid for item in drawn}
