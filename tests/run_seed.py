"""One seed for all that is random in a test run: fresh, printed, and the same in all workers.

A pytest plugin that tests/conftest.py loads. `--hypothesis-seed=N` or ROLLOUT_TEST_SEED=N run the
tests again as the run did that printed N.
"""

from __future__ import annotations

import os
import random

import pytest

VARIABLE = "ROLLOUT_TEST_SEED"
_NUM_BITS = 31  # generators of numpy and torch take it as it is, also with a small number added


def run_seed() -> int:
    """The seed of this run. A test that needs several adds small numbers to it."""
    return int(os.environ[VARIABLE])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed, before hypothesis reads the option; workers and children inherit both."""
    given = config.option.hypothesis_seed
    if given in (None, "random"):
        given = os.environ.get(VARIABLE) or random.SystemRandom().getrandbits(_NUM_BITS)
    config.option.hypothesis_seed = int(given)
    os.environ[VARIABLE] = str(given)


# Hooks of their own: the usual header is not shown in quiet runs.
@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed when the run begins."""
    _print_seed(session.config.pluginmanager.get_plugin("terminalreporter"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print it again below the failures."""
    if exitstatus:
        _print_seed(terminalreporter)


def _print_seed(reporter: pytest.TerminalReporter | None) -> None:
    if reporter is not None:  # a worker has none
        seed = run_seed()
        again = f"{VARIABLE}={seed} make test, or pytest --hypothesis-seed={seed}"
        reporter.write_line(f"seed of this run: {seed} (again: {again})")
