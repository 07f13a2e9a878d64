"""The coordinator as a process of its own, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import zmq

from rollout import SamplingParams
from rollout.control.commands import Pause, Resume, Shutdown, Stats
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.context import CoordinatorLimits, num_ahead
from rollout.coordinator.net.link import Link
from rollout.coordinator.net.security import CurveKeys, CurveServerKeys
from rollout.coordinator.protocol.codec import decode, encode, frames_in
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AssignRequest,
    Connect,
    Disconnect,
    EngineReply,
    Nack,
)
from rollout.errors import ConfigError, CoordinatorLostError
from rollout.wire import Message, pack
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine, tokens_of
from tests.coordinator.test_link import registration, status
from tests.processes import PROCESSES

pytestmark = pytest.mark.distributed
WAIT_S = 120.0
# Far below the lease of 30 s, and far above a fraction of a second on a busy machine.
AT_ONCE_S = 10.0


class Line:
    """A DEALER with one of the fakes behind it, driven by hand."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        peer: FakeEngine | FakeClient,
        *,
        keys: CurveKeys | None = None,
    ) -> None:
        self.peer = peer
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(address)

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def turn(self, wait_s: float = 0.0) -> bool:
        """Take what is there and answer; an engine then makes a step."""
        is_here = self.socket.poll(wait_s * 1000) != 0
        self.take()
        if isinstance(self.peer, FakeEngine):
            self.send(*self.peer.step())
        return is_here

    def take(self, wait_s: float = 0.0) -> list[Message]:
        """Take what is there and answer."""
        taken = []
        while self.socket.poll(1000 * wait_s if not taken else 0):
            for frame in frames_in(self.socket.recv()):
                taken.append(decode(frame))
                self.send(*self.peer.receive(taken[-1]))
        return taken


def until(condition: Callable[[], object], *lines: Line) -> None:
    """Turn the lines until it holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        for line in lines:
            line.turn(0.01)


@contextmanager
def coordinator_process(is_killed: bool = False, **options: Any) -> Iterator[tuple[Any, str]]:
    """Yield a coordinator process and its address. At the end the process must end by itself, in
    order, or, if `is_killed`, have been killed."""
    here, there = PROCESSES.Pipe()
    ready = PROCESSES.Event()
    options = {"data_parallel_size": 2, "tokenizer": None} | options
    process = PROCESSES.Process(
        target=DataParallelInferenceCoordinator.entrypoint, args=(there, ready), kwargs=options
    )
    process.start()
    try:
        assert ready.wait(WAIT_S)
        assert here.poll(WAIT_S)
        yield process, here.recv()
        process.join(WAIT_S)
        assert process.exitcode == (-signal.SIGKILL if is_killed else 0)
    finally:
        process.kill()
        process.join()
        here.close()


@contextmanager
def lines(address: str, num_engines: int = 2) -> Iterator[tuple[Line, list[Line]]]:
    """A connected client and registered engines."""
    context = zmq.Context()
    client = Line(context, address, FakeClient(b"c", b"c" * 16))
    client.send(Connect(protocol_version=PROTOCOL_VERSION, client_id=b"c" * 16))
    engines = []
    for index in range(num_engines):
        engine = FakeEngine(b"e%d" % index, bytes([index]) * 16)
        engines.append(Line(context, address, engine))
        engines[-1].send(engine.registration())
    try:
        until(lambda: all(line.peer.has_entered for line in engines), *engines)
        yield client, engines
    finally:
        context.destroy()


def hostile_frames() -> list[bytes]:
    return [b"", b"\xc1", b"\x93\x01\x02\x03", b"\xdd\xff\xff\xff\xff", pack([999]), pack([20, 1])]


def test_requests_commands_and_garbage_through_a_process_that_leaves_nothing_behind() -> None:
    with (
        coordinator_process() as (_, address),
        lines(address) as (client, engines),
    ):
        fake = client.peer
        assert isinstance(fake, FakeClient)
        everybody = (client, *engines)
        client.send(fake.submission([9, 5], streaming=True))
        for frame in hostile_frames():
            client.socket.send(frame)
            engines[0].socket.send(frame)
            engines[1].socket.send_multipart([frame, b"more"])
        until(lambda: all(asked.replies for asked in fake.asked.values()), *everybody)
        assert [a.replies[0].record for a in fake.asked.values()] == [
            pack(tokens_of(a.seed, 0, a.num_total)) for a in fake.asked.values()
        ]
        pause = fake.command(Pause)
        client.send(pause)
        until(lambda: fake.answer(pause), *everybody)
        assert isinstance(fake.answer(pause), Ack)
        assert [line.peer.state for line in engines] == ["PAUSED", "PAUSED"]
        refused = fake.command(Resume)
        stop = fake.command(Shutdown)
        client.send(refused, stop)
        until(lambda: any(isinstance(m, Disconnect) for m in fake.seen), *everybody)
        assert isinstance(fake.answer(refused), Ack)  # what it leads to is there already
        assert isinstance(fake.answer(stop), Ack)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        probe.bind(address)  # nobody has the port any more


def test_an_engine_process_that_is_killed_is_noticed_at_once_and_its_requests_move() -> None:
    """Before its lease runs out, which here it does not."""
    limits = CoordinatorLimits(engine_lease_s=10 * WAIT_S, max_lost_attempts=9)
    with coordinator_process(limits=limits) as (process, address):
        here, there = PROCESSES.Pipe()
        engine_process = PROCESSES.Process(target=engine_alone, args=(address, there), daemon=True)
        engine_process.start()
        there.close()
        assert here.poll(WAIT_S)
        here.recv()
        with lines(address, num_engines=0) as (client, _), zmq.Context() as context:
            fake = client.peer
            assert isinstance(fake, FakeClient)
            client.send(fake.submission([2]))
            assert here.poll(WAIT_S)
            assert here.recv() == "a request"
            other = FakeEngine(b"other", bytes([78]) * 16)
            line = Line(context, address, other)
            line.send(other.registration())
            until(lambda: other.has_entered, line)
            os.kill(engine_process.pid or 0, signal.SIGKILL)
            killed_at = time.monotonic()
            until(lambda: other.num_received, client, line)
            noticed_s = time.monotonic() - killed_at
            until(lambda: fake.asked[0].replies, client, line)
            line.socket.close()
        print(f"\nnoticed after {noticed_s:.3f} s")
        assert noticed_s < 8.0, "today's lease is 10 s, a probe goes out every 0.25 s"
        engine_process.join()
        process.terminate()


def engine_alone(address: str, pipe: Connection) -> None:
    """Takes requests and never answers."""
    context = zmq.Context()
    engine = FakeEngine(b"alone", bytes([77]) * 16)
    line = Line(context, address, engine)
    line.send(engine.registration())
    until(lambda: engine.has_entered, line)
    pipe.send("registered")
    engine.num_waiting = num_ahead(engine.max_requests)  # it makes no step
    while True:
        for message in line.take(0.05):
            if isinstance(message, AssignRequest):
                pipe.send("a request")


def test_stop_fails_unfinished_requests_and_writes_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    coordinator = DataParallelInferenceCoordinator(
        None, 1, None, schedule_output_path=str(path), limits=CoordinatorLimits(heartbeat_s=0.2)
    )
    thread = threading.Thread(target=coordinator.start)
    thread.start()
    try:
        with lines(coordinator.address, num_engines=1) as (client, _):
            fake = client.peer
            assert isinstance(fake, FakeClient)
            client.send(fake.submission([3]))
            until(lambda: coordinator.counters.num_requests == 1, client)
            coordinator.stop()
            until(lambda: any(isinstance(m, Disconnect) for m in fake.seen), client)
            (reply,) = (m for m in fake.seen if isinstance(m, EngineReply))
            assert reply.error is not None
    finally:
        coordinator.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert json.loads(path.read_text())["num_requests"] == 1


def test_an_oversized_frame_ends_only_the_connection_of_its_sender() -> None:
    coordinator = DataParallelInferenceCoordinator(None, 1, None, max_frame_bytes=10_000)
    thread = threading.Thread(target=coordinator.start)
    thread.start()
    try:
        with lines(coordinator.address, num_engines=1) as (client, engines):
            fake = client.peer
            assert isinstance(fake, FakeClient)
            unknown = zmq.Context.instance().socket(zmq.DEALER)
            unknown.setsockopt(zmq.LINGER, 0)
            unknown.connect(coordinator.address)
            unknown.send(b"x" * 20_000)
            client.send(fake.submission([3]))
            until(lambda: fake.asked[0].replies, client, *engines)
            unknown.close()
    finally:
        coordinator.stop()
        thread.join(WAIT_S)


def test_a_coordinator_process_ends_when_its_parent_is_killed() -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    parent = spawn.Process(target=parent_of_a_coordinator, args=(there,))
    parent.start()
    try:
        assert here.poll(WAIT_S)
        pid = here.recv()
        os.kill(parent.pid or 0, signal.SIGKILL)
        end = time.monotonic() + WAIT_S
        while is_running(pid):
            assert time.monotonic() < end, "it outlived its parent"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.join()


def parent_of_a_coordinator(report: Connection) -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=coordinator_alone, args=(there,))
    child.start()
    here.recv()
    report.send(child.pid)
    time.sleep(WAIT_S)


def coordinator_alone(pipe: Connection) -> None:
    """With an event of its own: one that is shared outlives a parent that is killed."""
    DataParallelInferenceCoordinator.entrypoint(pipe, threading.Event(), 1, None)


def is_running(pid: int) -> bool:
    """A zombie that nobody waits for has ended."""
    with suppress(OSError):
        return " Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 0},
        {"host": "0.0.0.0"},
        {"host": "n" * 64},
        {"host": None, "inference_coordinator_port": 5555},
        {"enable_prefix_caching": True},
        {"prefix_caching_coordinator_policy": "round"},
        {"schedule_output_path": "/nowhere/at/all.json"},
    ],
)
def test_illegal_options_are_refused_and_nothing_stays_bound(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DataParallelInferenceCoordinator(
            *(None, options.pop("data_parallel_size", 1), None), **options
        )


def test_other_machines_are_let_in_where_that_is_asked_for() -> None:
    coordinator = DataParallelInferenceCoordinator(None, 1, None, host="0.0.0.0", insecure=True)
    coordinator.stop()
    assert coordinator.address.startswith("tcp://127.0.0.1:"), "which can be reached from here"


def test_a_peer_of_another_protocol_version_learns_so() -> None:
    coordinator = DataParallelInferenceCoordinator(None, 1, None)
    thread = threading.Thread(target=coordinator.start)
    thread.start()
    context = zmq.Context()
    try:
        line = Line(context, coordinator.address, FakeClient(b"c", b"c" * 16))
        other_version = Connect(protocol_version=PROTOCOL_VERSION + 1, client_id=b"c" * 16)
        line.socket.send(pack(other_version))
        until(lambda: line.peer.seen, line)
        (nack,) = line.peer.seen
        assert isinstance(nack, Nack)
        assert "protocol" in str(nack.error.message)
    finally:
        context.destroy()
        coordinator.stop()
        thread.join(WAIT_S)


def test_a_coordinator_process_continues_with_its_peers_after_sigstop() -> None:
    limits = CoordinatorLimits(client_lease_s=2, engine_lease_s=2, heartbeat_s=0.1)
    with (
        coordinator_process(limits=limits) as (process, address),
        lines(address) as (client, engines),
    ):
        fake = client.peer
        assert isinstance(fake, FakeClient)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(process.pid, signal.SIGCONT)
        client.send(fake.submission([5]))
        until(lambda: fake.asked[0].replies, client, *engines)
        assert not any(isinstance(m, Nack) for line in (client, *engines) for m in line.peer.seen)
        client.send(fake.command(Shutdown))
        until(lambda: any(isinstance(m, Disconnect) for m in fake.seen), client, *engines)


def test_with_keys_only_peers_with_known_keys_are_accepted() -> None:
    public, secret = zmq.curve_keypair()
    keys = CurveServerKeys(public=public, secret=secret, clients=frozenset())
    _, unknown = keys.with_client()
    keys, known = keys.with_client()
    coordinator = DataParallelInferenceCoordinator(None, 1, None, host="0.0.0.0", curve=keys)
    thread = threading.Thread(target=coordinator.start)
    thread.start()
    context, address = zmq.Context(), coordinator.address
    try:
        outsiders = [
            Line(context, address, FakeClient(b"o", b"o" * 16), keys=own) for own in (None, unknown)
        ]
        for outsider in outsiders:
            outsider.send(Connect(protocol_version=PROTOCOL_VERSION, client_id=b"o" * 16))
        until(lambda: coordinator.refusals.num_unknown_keys, *outsiders)
        insider = Line(context, address, FakeClient(b"i", b"i" * 16), keys=known)
        insider.send(Connect(protocol_version=PROTOCOL_VERSION, client_id=b"i" * 16))
        until(lambda: insider.peer.seen, insider, *outsiders)
        assert not any(outsider.peer.seen for outsider in outsiders)
        assert coordinator.counters.num_frames == 1
        insider.send(insider.peer.command(Stats))
        until(lambda: any(isinstance(m, Ack) for m in insider.peer.seen), insider, *outsiders)
        (answer,) = (m for m in insider.peer.seen if isinstance(m, Ack))
        refused = coordinator.refusals
        assert refused.num_unknown_keys >= 1
        assert answer.result["refused"].keys() == {*asdict(refused), "num_unknown_peers"}
        assert answer.result["refused"]["num_unknown_keys"] >= 1
    finally:
        context.destroy()
        coordinator.stop()
        thread.join(WAIT_S)


def test_a_coordinator_loads_no_torch() -> None:
    program = (
        "import sys, rollout.coordinator.coordinator as module; "
        "module.DataParallelInferenceCoordinator(None, 1, None).stop(); "
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout.split() == []


# ---- a killed coordinator


def test_pending_futures_fail_at_once_when_the_coordinator_is_killed() -> None:
    async def work(process: Any, address: str) -> None:
        async with InferenceClient(address) as client:
            # Without an engine no request ends.
            params = SamplingParams(num_tokens_to_generate=5)
            pending = [client.add_request([1], params) for _ in range(100)]
            stats = await client.engine_stats()  # which says that all have arrived
            assert stats.state == "RUNNING"
            stream = client.stream([1], params)
            process.kill()
            killed_at = time.monotonic()
            for future in pending:
                with pytest.raises(CoordinatorLostError, match="connections are refused"):
                    await future
            with pytest.raises(CoordinatorLostError):
                await stream.__anext__()
            seconds = time.monotonic() - killed_at
            print(f"\nall failed {seconds:.3f} s after the SIGKILL")
            assert seconds < AT_ONCE_S
            with pytest.raises(CoordinatorLostError, match="connections are refused"):
                client.unpause_engines()

    with coordinator_process(is_killed=True) as (process, address):
        asyncio.run(work(process, address))


def test_an_engine_ends_some_time_after_its_coordinator_is_killed() -> None:
    with (
        coordinator_process(is_killed=True) as (process, address),
        Link(address, handshake=registration, status=status, give_up_s=1.0) as link,
    ):
        link.wait_registered(WAIT_S)
        link.receive()
        process.kill()
        killed_at = time.monotonic()
        with pytest.raises(CoordinatorLostError, match="unreachable for 1"):
            link.receive(WAIT_S)
        assert 1.0 <= time.monotonic() - killed_at < AT_ONCE_S
