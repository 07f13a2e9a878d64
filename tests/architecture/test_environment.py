"""What tests/conftest.py and the pytest settings promise every test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch

from tests.run_seed import VARIABLE, run_seed
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
    long = os.environ.get("ROLLOUT_TEST_LONG") == "1"
    assert not profile.derandomize
    assert profile.database is None
    assert profile.print_blob
    assert profile.deadline is None
    assert profile.max_examples == (1000 if long else 50)
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
    """What a run prints, and the seed and draws of each of its two tests."""
    (directory / "test_draws.py").write_text(DRAWS_AND_FAILS)
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    run = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-q", "-p", "tests.run_seed"), *arguments],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
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
