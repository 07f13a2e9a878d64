"""Hostile peers beside honest ones, at a coordinator in a process of its own: right answers go on,
and its memory stays bounded."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import zmq

from rollout import DynamicInferenceRequest, SamplingParams
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.protocol.codec import decode, encode, frames_in
from rollout.coordinator.protocol.messages import ConnectAck, Heartbeat
from rollout.weights.transports.shared import SharedTransport
from tests.coordinator.client_commands import publish
from tests.coordinator.hostile_peers import (
    Frames,
    HostilePeer,
    client_connect,
    engine_registration,
    is_harmless,
    rss_mib,
    submission,
)
from tests.coordinator.live_fleet import LiveEngine, model
from tests.coordinator.test_coordinator_process import coordinator_process
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, Margins, generate_all, prompt_of, tiny_engine

pytestmark = pytest.mark.distributed
NUM_FRAMES = 200_000 if IS_LONG else 20_000
NUM_IDENTITIES = 20_000 if IS_LONG else 1000
MAX_FRAME_BYTES = 2**20
LIMITS = CoordinatorLimits(
    heartbeat_s=0.2,
    client_lease_s=2.0,
    engine_lease_s=5.0,
    max_client_requests=1000,
    max_client_request_bytes=8 * 2**20,
    max_kept_reply_bytes=8 * 2**20,
)
# A live peer sends something within its lease, also on a machine that is busy with other things.
PATIENT = replace(LIMITS, client_lease_s=10.0, engine_lease_s=15.0)
WAIT_S = 60.0
WEIGHTS_VERSION = 1


class Honest:
    """Two real engines and a client, in threads of their own; keeps some requests going."""

    NUM_AT_ONCE = 8

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_over, self.is_up = threading.Event(), threading.Event()
        self.requests: list[DynamicInferenceRequest] = []
        self.slowest_s = 0.0
        self.error: BaseException | None = None
        self._engines = [LiveEngine(address, number) for number in range(2)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:  # a thread's error would go unseen
            self.error = error
        finally:
            self.is_up.set()

    async def _work(self) -> None:
        for engine in self._engines:
            engine.link.wait_registered(WAIT_S)
        publisher = SharedTransport()
        async with InferenceClient(self._address) as client:
            await client.update_weights(publish(publisher), WEIGHTS_VERSION, in_flight=True)
            self.is_up.set()
            await asyncio.gather(*(self._ask(client, i) for i in range(self.NUM_AT_ONCE)))
        publisher.close()

    async def _ask(self, client: InferenceClient, number: int) -> None:
        while not self._is_over.is_set():
            number += self.NUM_AT_ONCE
            params = SamplingParams(num_tokens_to_generate=12, seed=number)
            start = time.monotonic()
            record = await asyncio.wait_for(
                client.add_request(prompt_of(3 + number % 20, seed=number), params), WAIT_S
            )
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)
            self.requests.append(record.merge())

    def finish(self) -> None:
        """End the thread. Raises its error; all answers must be those of an undisturbed engine."""
        self._is_over.set()
        self._thread.join(WAIT_S)
        for engine in self._engines:
            engine.close()
        if self.error is not None:
            raise self.error
        assert not self._thread.is_alive()
        margins = Margins()
        inputs = [(r.prompt_tokens.tolist(), r.sampling_params) for r in self.requests]
        expected = generate_all(tiny_engine(model()), inputs)
        for request, wanted in zip(self.requests, expected, strict=True):
            margins.compare(model(), request, wanted.generated_tokens, wanted.sampling_params)
        margins.check()


@contextmanager
def beset(**options: object) -> Iterator[tuple[int, str]]:
    """Yield pid and address of a coordinator process, which must still run at the end."""
    options = {"tokenizer": None, "limits": LIMITS, "max_frame_bytes": MAX_FRAME_BYTES} | options
    with coordinator_process(**options) as (process, address):
        yield process.pid, address
        assert process.is_alive()
        process.terminate()


def wait_until_served(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """All that was sent before is taken, as far as one can tell from outside: a new client is
    connected, and its heartbeat answered."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            socket.send(encode(client_connect(random.getrandbits(100))))
            if socket.poll(1000) and isinstance(decode(socket.recv()), ConnectAck):
                socket.send(encode(Heartbeat(sequence=1)))
                assert socket.poll(WAIT_S * 1000)
                return
    raise AssertionError("nobody is served any more")


def test_honest_requests_complete_rightly_beside_hostile_frames_in_bounded_memory() -> None:
    harmless = partial(is_harmless, weights_version=WEIGHTS_VERSION)
    chance = random.Random(run_seed() + 3)
    frames = Frames(run_seed(), MAX_FRAME_BYTES, harmless)
    with beset(limits=PATIENT) as (pid, address), zmq.Context() as context:
        honest = Honest(address)
        assert honest.is_up.wait(WAIT_S)
        handshakes = [
            *(None, None, client_connect(1), client_connect(2)),
            *(engine_registration(bytes([n]) * 16, 0) for n in (101, 102)),
        ]
        peers = [
            HostilePeer(context, address, handshake, reads=index % 2 == 0)
            for index, handshake in enumerate(handshakes)
        ]
        marks = []
        for number in range(-NUM_FRAMES // 4, NUM_FRAMES):  # allocators fill before the first mark
            peer = chance.choice(peers)
            if number % 500 == 499:
                peer.send(frames.oversized())
                peer.drop()
                chance.choice(peers).send(frames.large())
            elif number % 100 == 99:
                peer.shake_hands()
            peer.send(frames.next())
            if number % (NUM_FRAMES // 4) == NUM_FRAMES // 4 - 1:
                wait_until_served(address, context)
                marks.append(rss_mib(pid))
        end = time.monotonic() + WAIT_S
        while len(honest.requests) <= 20 and time.monotonic() < end:
            chance.choice(peers).send(frames.next())
        for peer in peers:
            peer.socket.close(linger=0)
        num_meanwhile = len(honest.requests)
        honest.finish()
        print(
            f"\n{frames.made.total()} frames ({dict(frames.made)}), {num_meanwhile} honest "
            f"requests meanwhile, the slowest in {honest.slowest_s:.2f} s; RSS before and at each "
            f"quarter {', '.join(f'{mark:.1f}' for mark in marks)} MiB"
        )
    assert num_meanwhile > 20
    assert marks[-1] - marks[0] < 32


def test_a_flood_of_identities_is_forgotten() -> None:
    """Clients, engines and unknown peers that come, say something and hang up, or say nothing."""
    chance = random.Random(run_seed() + 4)
    frames = Frames(run_seed(), MAX_FRAME_BYTES, partial(is_harmless, weights_version=0))
    with beset() as (pid, address), zmq.Context() as context:
        marks = []
        for number in range(-NUM_IDENTITIES // 4, NUM_IDENTITIES):  # as above
            handshake = chance.choice(
                (
                    *(None, client_connect(chance.getrandbits(100))),
                    engine_registration(chance.randbytes(16), chance.randrange(3)),
                )
            )
            peer = HostilePeer(context, address, handshake, reads=False)
            peer.send(frames.next())
            # Half of them wait for an answer, so that they have surely been there.
            if handshake is not None and number % 2:
                peer.socket.poll(1000)
            peer.socket.close(linger=chance.choice((0, 1000)))
            if number % (NUM_IDENTITIES // 4) == NUM_IDENTITIES // 4 - 1:
                wait_until_served(address, context)
                marks.append(rss_mib(pid))
        print(
            f"\n{NUM_IDENTITIES} identities; RSS before and at each quarter "
            f"{', '.join(f'{mark:.1f}' for mark in marks)} MiB"
        )
    assert marks[-1] - marks[0] < 16


@pytest.mark.parametrize("has_engine", [False, True])
def test_a_client_that_never_acknowledges_cannot_fill_the_memory(has_engine: bool) -> None:
    """Its requests are valid and large: they wait for an engine, or have failed and are kept."""
    num_prompt, num_requests = MAX_FRAME_BYTES // 5, LIMITS.max_client_requests // 5
    chance = random.Random(run_seed() + 5)
    with beset() as (pid, address), zmq.Context() as context:
        engine = LiveEngine(address, 0) if has_engine else None
        if engine is not None:
            engine.link.wait_registered(WAIT_S)
        peer = HostilePeer(context, address, client_connect(7), reads=True)
        wait_until_served(address, context)
        before = rss_mib(pid)
        for number in range(num_requests):
            peer.send([encode(submission(chance, number, num_prompt))])
        peer.socket.send(encode(Heartbeat(sequence=7)))
        while encode(Heartbeat(sequence=7)) not in frames_in(peer.socket.recv()):
            pass
        after = rss_mib(pid)
        if engine is not None:
            engine.close()
        print(
            f"\n{num_requests} requests of {num_prompt * 4 / 2**20:.1f} MiB, engine: {has_engine}; "
            f"RSS {before:.1f}, then {after:.1f} MiB"
        )
    assert after - before < 48
