"""FakeClient: checks the tokens that it gets against the seeds of its requests. For FakeFleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout import SamplingParams
from rollout.control.commands import Command, ControlMessage
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    Attempt,
    ConnectAck,
    EngineReply,
    EngineReplyPartial,
    Nack,
    ReplyAck,
    Sample,
    SubmitRequest,
    UpdateWeights,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
)
from rollout.weights.source import WeightsSource
from rollout.wire import Message, unpack
from tests.coordinator.fake_engine import tokens_of

PROMPT = (1, 2, 3, 4)


@dataclass
class Asked:
    """One request and all that its client got. `streamed`: the streamed tokens, by offset."""

    seed: int
    num_total: int
    is_streaming: bool
    streamed: list[int] = field(default_factory=list)
    replies: list[EngineReply] = field(default_factory=list)


@dataclass
class FakeClient:
    """Acknowledges replies unless `acknowledges` is off, and checks all messages that it gets."""

    identity: bytes
    client_id: bytes
    acknowledges: bool = True
    asked: dict[int, Asked] = field(default_factory=dict)
    submitted: list[SubmitRequest] = field(default_factory=list)
    answers: dict[int, list[Ack | Nack | None]] = field(default_factory=dict)
    connect_ack: ConnectAck | None = None
    seen: list[Message] = field(default_factory=list)
    num_commands: int = 0

    def submission(
        self, num_tokens: Sequence[int], *, streaming: bool = False, **more: Any
    ) -> SubmitRequest:
        """A new group with a sample per entry of `num_tokens`."""
        samples = []
        for count in num_tokens:
            request_id = len(self.asked)
            seed = request_id + 1000 * int.from_bytes(self.client_id[-4:], "big")
            self.asked[request_id] = Asked(seed, count, streaming)
            params = pack_params(SamplingParams(num_tokens_to_generate=count))
            samples.append(Sample(request_id=request_id, sampling_params=params, seed=seed))
        more.setdefault("prompt_tokens", np.array(PROMPT, np.int32))
        message = SubmitRequest(samples=tuple(samples), streaming=streaming, **more)
        self.submitted.append(message)
        return message

    def abort_all(self) -> AbortRequest:
        return AbortRequest(attempts=tuple(Attempt(request_id=i) for i in self.asked))

    def command(self, kind: type[Command[Any]], **more: Any) -> Command[Any]:
        self.num_commands += 1
        return kind(command_id=self.num_commands, **more)

    def update(self, source: WeightsSource, **more: Any) -> UpdateWeights:
        self.num_commands += 1
        return UpdateWeights(command_id=self.num_commands, source=source, **more)

    def answer(self, message: ControlMessage[Any]) -> Ack | Nack | None:
        """Return the latest answer to a command; None without an answer."""
        return self.answers.get(message.command_id, [None])[-1]

    def receive(self, message: Message) -> list[Message]:
        self.seen.append(message)
        if isinstance(message, ConnectAck):
            self.connect_ack = message
        elif isinstance(message, (Ack, Nack)) and message.command_id is not None:
            self.answers.setdefault(message.command_id, []).append(message)
        elif isinstance(message, EngineReplyPartial):
            asked, run = self.asked[message.request_id], message.tokens
            assert asked.is_streaming
            assert run.token_ids.tolist() == tokens_of(asked.seed, run.offset, run.end)
            assert run.offset <= len(asked.streamed), "a piece is missing"
            asked.streamed[run.offset :] = max(
                asked.streamed[run.offset :], run.token_ids.tolist(), key=len
            )
        elif isinstance(message, EngineReply):
            asked = self.asked[message.request_id]
            asked.replies.append(message)
            assert message == asked.replies[0], "answered twice, and differently"
            if message.record is not None:
                tokens = unpack(message.record)
                assert tokens == tokens_of(asked.seed, 0, len(tokens))
                assert message.is_failed or len(tokens) == asked.num_total
            if self.acknowledges:
                return [ReplyAck(attempts=(Attempt(request_id=message.request_id),))]
        return []
