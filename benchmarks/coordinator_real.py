"""The "real" peers of `benchmarks.coordinator`: InferenceClients, and engines with a Link.

Used by `benchmarks.coordinator_fleet`, which runs each function `serve_*` in a process of its own.
The peers open sockets on loopback.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.coordinator_load import (
    PARAMS,
    Grants,
    Timing,
    next_load,
    prompt,
    registration,
)
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.net.link import Link
from rollout.coordinator.protocol.messages import (
    AssignRequest,
    EngineReply,
    EngineStatus,
    RegisterAck,
)


def serve_real_engine(pipe: Connection, address: str, record: bytes) -> None:
    """Reply to each request at once with `record`, through a Link.

    Sends "ready" into the pipe. Returns when the pipe is closed.
    """
    engine_id = uuid.uuid4().bytes
    status = EngineStatus(
        state="RUNNING",
        num_steps=0,
        num_waiting=0,
        num_running=0,
        weights_version=0,
    )
    with Link(address, handshake=lambda: registration(engine_id), status=lambda: status) as link:
        link.wait_registered(30.0)
        pipe.send("ready")
        grants = Grants()
        while not pipe.poll():
            for message in link.receive(0.2):
                if isinstance(message, RegisterAck):
                    grants = Grants(message.session)
                samples = message.samples if isinstance(message, AssignRequest) else ()
                for sample in samples:
                    reply = EngineReply(
                        request_id=sample.request_id, attempt=sample.attempt, record=record
                    )
                    link.queue(reply)
                if (credit := grants.take(len(samples))) is not None:
                    link.queue(credit)
            link.flush()


def serve_real_clients(pipe: Connection, address: str, num_clients: int) -> None:
    """Run each Load that the pipe delivers, with InferenceClients on one event loop.

    Sends "ready" once, then "prepared" and a Timing for each Load. Returns when the pipe is closed.
    """
    asyncio.run(_real_clients(pipe, address, num_clients))


async def _real_clients(pipe: Connection, address: str, num_clients: int) -> None:
    clients = [InferenceClient(address) for _ in range(num_clients)]
    for client in clients:
        await client.start()
    pipe.send("ready")
    while (load := await asyncio.to_thread(next_load, pipe)) is not None:
        pipe.send("prepared")
        await asyncio.to_thread(pipe.recv)
        latencies: list[float] = []
        start = time.monotonic()
        if load.window == 0:
            for _ in range(load.num_requests):
                for client in clients:
                    await _ask(client, 1, latencies)
        else:
            await asyncio.gather(
                *(
                    _ask(client, len(range(place, load.num_requests, load.window)), latencies)
                    for client in clients
                    for place in range(load.window)
                )
            )
        pipe.send(Timing(start=start, end=time.monotonic(), latencies=latencies))
    for client in clients:
        await client.aclose()


async def _ask(client: InferenceClient, num_requests: int, latencies: list[float]) -> None:
    """Send requests one after another, and append the latency of each in seconds."""
    tokens: Any = prompt()  # an array is sent as it is
    for _ in range(num_requests):
        start = time.monotonic()
        await client.add_request(tokens, PARAMS)
        latencies.append(time.monotonic() - start)
