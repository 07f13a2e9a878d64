"""What the core answers to a Connect."""

from __future__ import annotations

from dataclasses import replace

from tests.coordinator.fake_fleet import LIMITS, FakeFleet


def test_a_client_learns_its_window_and_whether_it_is_remembered() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_client_requests=7, max_client_request_bytes=900))
    client = fleet.client()
    fleet.run()
    assert client.connect_ack is not None
    assert (client.connect_ack.max_requests, client.connect_ack.max_request_bytes) == (7, 900)
    assert not client.connect_ack.is_resumed
    fleet.cut(client)
    fleet.redial(client)
    fleet.run()
    assert client.connect_ack.is_resumed
    fleet.pass_time(10 * LIMITS.client_lease_s, silent=[client])
    fleet.cut(client)
    fleet.redial(client)
    fleet.run()
    assert not client.connect_ack.is_resumed
