"""What tests/conftest.py and the pytest settings promise every test."""

from __future__ import annotations

import os
import socket
import warnings

import hypothesis
import pytest
import torch


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


def test_hypothesis_is_reproducible_and_long_only_when_asked() -> None:
    profile = hypothesis.settings()
    long = os.environ.get("ROLLOUT_TEST_LONG") == "1"
    assert profile.derandomize
    assert profile.deadline is None
    assert profile.max_examples == (1000 if long else 50)


@pytest.mark.parametrize("module", ["rollout", "rollout.kv.cache", "trainer_hooks.losses"])
def test_warning_of_our_own_packages_is_an_error(module: str) -> None:
    with pytest.raises(UserWarning, match="careless"):
        warnings.warn_explicit("careless", UserWarning, "file.py", 1, module=module)


def test_warning_of_another_package_is_none() -> None:
    with pytest.warns(UserWarning, match="theirs"):
        warnings.warn_explicit("theirs", UserWarning, "file.py", 1, module="rollouts")
