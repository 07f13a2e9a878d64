"""Frames as no honest peer sends them, and what they are sent over."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from rollout import ProtocolError, SamplingParams
from rollout.control.commands import Command, Pause, Shutdown, Stats
from rollout.coordinator.protocol.codec import batched, decode, encode
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    Attempt,
    Connect,
    EngineReply,
    Headers,
    Heartbeat,
    Register,
    ReplyAck,
    Sample,
    SubmitRequest,
    UpdateWeights,
    nack_of,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
)
from rollout.errors import RolloutError
from rollout.wire import Message
from tests.coordinator.fake_engine import progress_of
from tests.coordinator.message_strategies import TYPES, run_of
from tests.coordinator.protocol.test_message_fields import EXAMPLES

MiB = 2**20
FRAMES = [encode(example) for example in EXAMPLES if type(example) in TYPES]
# Valid commands: any peer that may connect may send them.
_EFFECTIVE = (Pause, Shutdown, Stats)


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def engine_registration(engine_id: bytes, version: int) -> Register:
    return Register(
        engine_id=engine_id,
        state="RUNNING",
        weights_version=version,
        weights_checksum="",
        block_size_tokens=8,
        max_requests=4,
    )


def submission(chance: random.Random, request_id: int, num_prompt: int = 5) -> SubmitRequest:
    params = SamplingParams(num_tokens_to_generate=chance.randint(1, 4))
    return SubmitRequest(
        samples=(Sample(request_id=request_id, sampling_params=pack_params(params), seed=1),),
        prompt_tokens=np.full(num_prompt, chance.randrange(200), np.int32),
        priority=chance.choice((0, 0, -5, 2**62)),
        deadline_s=chance.choice((None, None, 0.0, 1e9)),
        streaming=chance.random() < 0.3,
    )


class Frames:
    """Makes messages of frames, as lists of parts, from one seed. `made`: how many of which kind.

    `is_harmless`: whether a frame may be sent that turns out to be a valid message.
    """

    def __init__(self, seed: int, max_frame_bytes: int, is_harmless: Callable[[Message], bool]):
        self._chance, self._max_frame_bytes = random.Random(seed), max_frame_bytes
        self._is_harmless = is_harmless
        self._recent: deque[bytes] = deque(maxlen=200)
        self.made: Counter[str] = Counter()
        self._kinds: dict[str, tuple[int, Callable[[], list[bytes]]]] = {
            "random": (15, self._random),
            "mutated": (40, self._mutated),
            "truncated": (10, self._truncated),
            "wrong header": (8, self._wrong_header),
            "valid": (14, lambda: [self._valid()]),
            "replayed": (8, lambda: [self._chance.choice(self._recent)]),
            "batched": (10, self._batched),
            "multi-part": (4, lambda: [self._valid() for _ in range(self._chance.randint(2, 6))]),
        }

    def next(self) -> list[bytes]:
        kinds, weights = list(self._kinds), [weight for weight, _ in self._kinds.values()]
        while True:
            (kind,) = self._chance.choices(kinds, weights)
            if kind == "replayed" and not self._recent:
                continue
            parts = self._kinds[kind][1]()
            if len(parts) == 1:
                try:
                    if not self._is_harmless(decode(parts[0])):
                        continue
                except ProtocolError:
                    pass
            self._recent.append(parts[0])
            self.made[kind] += 1
            return parts

    def large(self) -> list[bytes]:
        """Legal in size; what it claims to hold is costly to look at."""
        self.made["large"] += 1
        size = self._max_frame_bytes // 2
        fillings = (b"\x93\x14", b"\x91", b"\xdd\x00\x03\xff\xff", b"\xc6\x00\x07\xff\x00")
        return [(self._chance.choice(fillings) * size)[:size]]

    def oversized(self) -> list[bytes]:
        self.made["oversized"] += 1
        return [bytes(self._max_frame_bytes + 1)]

    def _valid(self) -> bytes:
        """What some peer may send at some time: to requests, attempts and commands of others."""
        chance = self._chance
        request_id, attempt = chance.randrange(3000), chance.randrange(3)
        named = (Attempt(request_id=request_id, attempt=attempt),)
        made: list[Message] = [
            submission(chance, request_id),
            AbortRequest(attempts=named),
            ReplyAck(attempts=named),
            Heartbeat(sequence=request_id),
            Ack(command_id=chance.getrandbits(62)),
            nack_of(chance.getrandbits(62), RolloutError("no")),
            progress_of(request_id, attempt, run_of(3)),
            EngineReply(request_id=request_id, attempt=attempt, record=chance.randbytes(50)),
        ]
        return encode(chance.choice(made)) if chance.random() < 0.7 else chance.choice(FRAMES)

    def _batched(self) -> list[bytes]:
        """Messages among garbage, which is to hurt none of them."""
        frames = [self._valid() for _ in range(self._chance.randint(1, 4))]
        frames = [frame for frame in frames if self._is_harmless(decode(frame))]
        frames += [*self._random(), *self._random(), b""]
        self._chance.shuffle(frames)
        return [frame for frame, _ in batched(frames)]

    def _random(self) -> list[bytes]:
        return [self._chance.randbytes(self._chance.randrange(300))]

    def _mutated(self) -> list[bytes]:
        chance, frame = self._chance, bytearray(self._valid())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(frame) + 1)
            how = chance.randrange(3)
            if how == 0 and at < len(frame):
                frame[at] ^= 1 << chance.randrange(8)
            elif how == 1:
                frame[at:at] = chance.randbytes(chance.randint(1, 9))
            else:
                del frame[at : at + chance.randint(1, 9)]
        return [bytes(frame)]

    def _truncated(self) -> list[bytes]:
        frame = self._valid()
        return [frame[: self._chance.randrange(len(frame))]]

    def _wrong_header(self) -> list[bytes]:
        frame = bytearray(self._valid())
        frame[1] = self._chance.choice((*(int(header) for header in Headers), 127, 0xC0))
        return [bytes(frame)]


def is_harmless(message: Message, weights_version: int) -> bool:
    """Return whether a message cannot harm the fleet: not an effective command, and no report of an
    engine that it has the fleet's weights, which would get work. Handshakes have random ids.
    """
    if isinstance(message, Command):
        return not isinstance(message, _EFFECTIVE)
    if isinstance(message, UpdateWeights):
        return not message.in_flight
    if isinstance(message, Register):
        return message.weights_version != weights_version
    if isinstance(message, Heartbeat) and message.status is not None:
        return message.status.weights_version != weights_version
    return True


class HostilePeer:
    """A DEALER, with or without a handshake, that ignores the messages that it gets."""

    def __init__(
        self, context: zmq.Context[Any], address: str, handshake: Message | None, *, reads: bool
    ) -> None:
        self._context, self._address, self.reads = context, address, reads
        self._handshake = handshake
        self.connect()

    def connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(self._address)
        self.shake_hands()

    def shake_hands(self) -> None:
        if self._handshake is not None:
            self.socket.send(encode(self._handshake))

    def send(self, parts: list[bytes]) -> None:
        self.socket.send_multipart(parts)
        while self.reads and self.socket.poll(0):
            self.socket.recv_multipart()

    def drop(self) -> None:
        """Hang up without a word, and come again as another identity."""
        self.socket.close(linger=0)
        self.connect()


def client_connect(number: int) -> Connect:
    return Connect(client_id=number.to_bytes(16, "big"))
