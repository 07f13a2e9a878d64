"""The transport that a name says, and the host at which a collective listens."""

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
def test_a_collective_without_a_host_listens_where_others_reach_the_coordinator(
    named: str, host: str
) -> None:
    transport = transport_of(named, reject_non_finite=True, own_host=lambda: "127.0.0.5")
    with closing(transport):
        assert transport.publish({}).address.startswith(f"{host}:")


def test_other_transports_do_not_ask_for_a_host(tmp_path: Path) -> None:
    asked = []

    def own_host() -> str:
        asked.append(1)
        return LOOPBACK

    for named in (None, "shared", f"directory:{tmp_path}", "collective:127.0.0.1"):
        transport_of(named, reject_non_finite=True, own_host=own_host).close()
    assert not asked
    transport_of("collective", reject_non_finite=True, own_host=own_host).close()
    assert asked


def test_a_host_that_is_not_of_this_machine_is_refused() -> None:
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
def test_a_trainer_is_reached_where_its_coordinator_is(
    host: str | None, advertise_host: str | None, reached_at: str
) -> None:
    assert own_host(host, advertise_host) == reached_at


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "ipc:///run/socket"])
def test_the_way_to_this_machine_is_the_loopback(address: str) -> None:
    assert host_towards(address) == LOOPBACK


def test_the_way_to_a_host_begins_at_the_address_of_its_interface() -> None:
    assert host_towards("tcp://127.0.0.9:5555") == "127.0.0.1"
    assert host_towards("tcp://[::1]:5555") in ("::1", LOOPBACK), "where there is IPv6"
