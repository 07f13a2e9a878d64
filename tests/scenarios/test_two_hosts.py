"""A fleet over several hosts: a trainer with its coordinator, and engines that join it with keys.

Hosts are network namespaces, so only packets travel between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import async_minimal
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.key_folder import ENGINE, create_key_folder
from tests.apis.fleets import directory
from tests.apis.shells import ENGINE_WORDS
from tests.scenarios.network_hosts import Host, Remote, network_of
from tests.scenarios.remote_coordinator import a_coordinator, unknown_peers
from tests.scenarios.remote_engines import a_held_engine, an_engine
from tests.scenarios.remote_trainers import a_trainer, a_training_job
from tests.waiting import until

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
CUT_S = 5.0  # how long a link is cut


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Three hosts: one for the trainer and its coordinator, two for an engine each."""
    with network_of(3) as made:
        yield made


def cut_while_it_goes_on(cut: Host, *held: Remote) -> None:
    """Cut a cable for CUT_S, and let the held processes go on meanwhile."""
    cut.cut()
    for each in held:
        each.pipe.send("go on")
    time.sleep(CUT_S)  # the duration of the cut; no event is awaited
    cut.mend()


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(CoordinatorLimits(), id="the lease outlives the cut", marks=pytest.mark.slow),
        pytest.param(
            CoordinatorLimits(engine_lease_s=2.0, heartbeat_s=0.5),
            id="the lease ends meanwhile",
        ),
    ],
)
def test_a_cut_cable_loses_no_request_and_all_engines_get_equal_weights(
    hosts: list[Host], tmp_path: Path, limits: CoordinatorLimits
) -> None:
    create_key_folder(tmp_path / "keys")
    trainer = hosts[0].start(a_trainer, hosts[0].address, directory(), tmp_path, limits)
    address = trainer.receive()
    assert address.startswith(f"tcp://{hosts[0].address}:")
    keys = str(tmp_path / "keys" / ENGINE)
    words = (address, directory(), keys, ENGINE_WORDS)
    engines = [host.start(a_held_engine, *words) for host in hosts[1:]]

    assert [engine.receive() for engine in engines] == ["generates", "generates"]
    cut_while_it_goes_on(hosts[0], *engines)
    trainer.pipe.send("mended")

    assert [engine.receive() for engine in engines] == ["fetches", "fetches"]
    cut_while_it_goes_on(hosts[2], *engines)
    trainer.pipe.send("mended")

    fault, num_requests, num_tokens = trainer.receive()
    print(f"\npush: {fault}; {num_requests} requests once, {num_tokens} tokens checked")
    assert [engine.receive() for engine in engines] == [0, 0], "the shutdown reaches them"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "lease_s"),
    [
        ("directory:{}", 2.0),
        ("delta+directory:{}", 10.0),
        ("collective", 10.0),
        ("collective", 2.0),
        ("delta+collective", 2.0),
    ],
)
def test_the_async_job_trains_through_cuts_in_a_generation_and_in_a_push(
    hosts: list[Host], tmp_path: Path, transport: str, lease_s: float
) -> None:
    """The trainer's cable is cut while an engine is in the midst of requests, then that engine's
    while it takes the next push. No HOST is given to the collective: it has the coordinator's."""
    create_key_folder(tmp_path / "keys")
    limits = CoordinatorLimits(engine_lease_s=lease_s, heartbeat_s=min(lease_s / 4, 1.0))
    trainer = hosts[0].start(a_training_job, hosts[0].address, tmp_path, limits, transport)
    settings = [f"{name}={value}" for name, value in async_minimal.ENGINE.items()]
    words = (trainer.receive(), str(tmp_path / "model"), str(tmp_path / "keys" / ENGINE), settings)
    carrier = "collective" if "collective" in transport else "directory"
    held = hosts[1].start(a_held_engine, *words, carrier)
    hosts[2].start(an_engine, *words)

    assert held.receive() == "generates"
    cut_while_it_goes_on(hosts[0], held)
    assert held.receive() == "fetches"
    cut_while_it_goes_on(hosts[1], held)

    version, served_checksum, own_checksum = trainer.receive()
    rewards, (faults, prompts, requests) = trainer.receive(), trainer.receive()
    print(f"\nreward {rewards[0]:.3f} -> {rewards[-1]:.3f}; pushes that failed: {faults}")
    assert served_checksum == own_checksum
    assert version == len(rewards) == async_minimal.NUM_STEPS
    assert bool(faults) or lease_s > CUT_S, "an engine whose lease ends fails the push"
    assert len(set(prompts)) == len(prompts) == async_minimal.NUM_STEPS * async_minimal.BATCH_GROUPS
    assert len(set(requests)) == len(requests) == len(prompts) * async_minimal.GROUP_SIZE
    assert sum(rewards[:5]) / 5 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.5


# ---- authentication


def test_unknown_peers_of_another_host_are_refused_counted_and_logged_once(
    hosts: list[Host], tmp_path: Path
) -> None:
    create_key_folder(tmp_path / "keys")
    coordinator = hosts[0].start(a_coordinator, hosts[0].address, tmp_path / "keys")

    def count() -> tuple[dict[str, int], int, int]:
        coordinator.pipe.send("count")
        counted: tuple[dict[str, int], int, int] = coordinator.receive()
        return counted

    peers = hosts[1].start(unknown_peers, coordinator.receive(), tmp_path / "keys")
    assert peers.receive() == "a frame is sent"
    until(lambda: count()[2] == 1, "one engine is there")
    refused = {
        "num_unknown_keys": 3,
        "num_without_keys": 3,
        "num_wrong_server_keys": 3,
        "num_replayed_frames": 0,
        "num_malformed": 0,
    }
    until(lambda: count() == (refused, 3, 1), "three peers are refused")
    peers.pipe.send("it is received")
    assert peers.receive() == "a frame is repeated"
    replayed = {**refused, "num_replayed_frames": 1}
    until(lambda: count() == (replayed, 4, 1), "a replayed frame is refused")
    peers.pipe.send("it is counted")
    assert peers.receive() == "done"
