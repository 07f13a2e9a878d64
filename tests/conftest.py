"""What every test runs under: one thread, no network, a seed that the run prints."""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from typing import Any

# Before torch and the hubs' clients are imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# No units of pairs: bfloat16 is rounded alike on every processor.
os.environ.setdefault("ROLLOUT_TUNE", "0")

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers

from rollout import child_process
from tests.device_marks import mark_device_tests
from tests.forked_children import forked_children
from tests.run_kind import max_examples
from tests.triton_interpreter import Launches, interpret_triton

torch.set_num_threads(1)
# Collecting tests makes many objects and no garbage; pytest_collection_finish enables it again.
gc.disable()
# A shell without job control has its background jobs ignore Ctrl-C, and so would all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
launches = Launches() if torch.cuda.is_available() else interpret_triton()

pytest_plugins = ["tests.printed_tables", "tests.run_seed", "tests.device_journal"]
# The run's seed decides alone: no database, no examples of earlier runs.
hypothesis.settings.register_profile(
    "rollout",
    derandomize=False,
    database=None,
    print_blob=True,
    deadline=None,
    max_examples=max_examples(),
)
hypothesis.settings.load_profile("rollout")
# It would draw constants of all modules that happen to be loaded, too: a test that runs alone would
# not draw what it drew from the same seed among all others.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


class NetworkAccessError(RuntimeError):
    """A test tried to leave the machine. No OSError: a client would take that for a bad line."""


def is_local(address: object) -> bool:
    """Return whether a socket address is a Unix path or a loopback host."""
    if not isinstance(address, tuple):
        return True
    host = address[0]
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def refuse_remote(connect: Callable[..., Any]) -> Callable[..., Any]:
    """`connect`, but raising NetworkAccessError for an address that `is_local` denies."""

    def guarded(self: socket.socket, address: object) -> Any:
        if not is_local(address):
            raise NetworkAccessError(
                f"tests may connect to loopback only, not to {address!r}; use a local fake"
            )
        return connect(self, address)

    return guarded


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Refuse connections of Python sockets to other machines, for the whole run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, refuse_remote(getattr(socket.socket, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_children() -> Iterator[None]:
    """Engines and coordinators are forks; `spawned_children` undoes it."""
    with forked_children() if sys.platform == "linux" else nullcontext():
        yield


@pytest.fixture
def spawned_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and coordinators start as they do outside of tests."""
    monkeypatch.setattr(child_process, "subprocess", subprocess)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Undo what the test before did to torch's thread count."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what launches on a device; skip what needs one where there is none, or the reverse."""
    mark_device_tests(items)
    has_device = torch.cuda.is_available()
    mark = "interpreted" if has_device else "gpu"
    reason = "counts in Triton's interpreter" if has_device else "needs a CUDA device"
    for item in items:
        if item.get_closest_marker(mark):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Fail a test that launches a kernel but is not marked, so that no device would run it."""
    before = launches.count
    result = yield
    if launches.count > before:
        is_known = any(map(pyfuncitem.get_closest_marker, ("device", "interpreted")))
        assert is_known, "it launches a Triton kernel: mark it `device`"
    return result


def pytest_collection_finish() -> None:
    """Exclude what was imported, which is most of all objects, from later garbage collections."""
    gc.freeze()
    gc.enable()  # after freeze(), else the next object starts a collection of a million others


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> Iterator[None]:
    """Exclude what the tests of a module have imported, too: torch.compile alone is a million
    objects, and every later gc.collect() would look at each of them.
    """
    num_modules = len(sys.modules)
    yield
    if len(sys.modules) > num_modules:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what a test has logged where UTF-8 cannot carry it: a worker of xdist would end."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report
