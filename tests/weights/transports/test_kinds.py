"""transport_of: the transport that a name means, and the host at which a collective listens."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from rollout.addresses import LOOPBACK, host_towards, own_host
from rollout.errors import ConfigError
from rollout.weights.transports.registry import transport_of


@pytest.mark.parametrize(
    ("named", "host"),
    [
        ("collective", "127.0.0.5"),
        ("delta+collective", "127.0.0.5"),
        ("collective:127.0.0.7", "127.0.0.7"),
    ],
)
def test_transport_of_collective_without_a_host_calls_own_host(named: str, host: str) -> None:
    transport = transport_of(named, reject_non_finite=True, own_host=lambda: "127.0.0.5")
    with closing(transport):
        assert transport.publish({}).address.startswith(f"{host}:")


def test_transport_of_other_kinds_does_not_call_own_host(tmp_path: Path) -> None:
    asked = []

    def own_host() -> str:
        asked.append(1)
        return LOOPBACK

    for named in (None, "shared", f"directory:{tmp_path}", "collective:127.0.0.1"):
        transport_of(named, reject_non_finite=True, own_host=own_host).close()
    assert not asked
    transport_of("collective", reject_non_finite=True, own_host=own_host).close()
    assert asked


def test_own_host_refuses_a_host_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"no engine can reach weights at '192\.0\.2\.1'"):
        transport_of("collective:192.0.2.1", reject_non_finite=True)


@pytest.mark.parametrize(
    ("host", "advertise_host", "reached_at"),
    [
        (None, None, LOOPBACK),
        ("10.0.0.3", None, "10.0.0.3"),
        ("host1", None, "host1"),
        ("0.0.0.0", "host1", "host1"),
        ("0.0.0.0", None, LOOPBACK),
        ("::", None, "::1"),
    ],
)
def test_own_host_is_the_host_of_the_coordinator(
    host: str | None, advertise_host: str | None, reached_at: str
) -> None:
    assert own_host(host, advertise_host) == reached_at


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "ipc:///run/socket"])
def test_host_towards_this_machine_is_the_loopback(address: str) -> None:
    assert host_towards(address) == LOOPBACK


def test_host_towards_another_host_is_the_address_of_the_interface() -> None:
    assert host_towards("tcp://127.0.0.9:5555") == "127.0.0.1"
    assert host_towards("tcp://[::1]:5555") in ("::1", LOOPBACK), "where there is IPv6"
