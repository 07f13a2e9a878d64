"""One seed for all that is random in a test run: fresh, printed, and the same in all workers.

A pytest plugin that tests/conftest.py loads. `--hypothesis-seed=N` or ROLLOUT_TEST_SEED=N run the
tests again as the run did that printed N. The seed also draws which parameter sets of a test
marked `drawn` a run takes.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from tests.run_kind import is_long, is_quick

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


@pytest.hookimpl(trylast=True)  # after -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the parameter sets that `sets_left_out` returns.

    All sets are kept with ROLLOUT_TEST_LONG=1 and on a machine with a CUDA device, and so is each
    set that the command line names.
    """
    candidates = [item for item in items if item.nodeid not in config.args]
    left_out = sets_left_out(candidates, run_seed())
    if not left_out or is_long():
        return
    import torch  # not above: runs without drawn tests do without its two seconds

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def sets_left_out(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """Draw `count` parameter sets of each test marked `drawn(count)`, and return the others. `make
    quick` draws one.

    The draw depends on the seed and the name of the test alone. Skipped sets are neither drawn nor
    returned.
    """
    sets: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn") and not item.get_closest_marker("skip"):
            sets[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for name, candidates in sets.items():
        (count,) = candidates[0].get_closest_marker("drawn").args  # type: ignore[union-attr]
        count = 1 if is_quick() else count
        generator = random.Random(f"{seed} {name}")
        left_out.update(generator.sample(candidates, max(len(candidates) - count, 0)))
    return left_out


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
