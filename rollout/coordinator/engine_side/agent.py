"""EngineAgent: does with one engine what the coordinator's messages ask. Messages in, messages out.

No socket, no thread, no clock: whoever owns those calls `handle` for each message and `step` while
the engine may run.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollout.coordinator.engine_side.commands import run_command
from rollout.coordinator.engine_side.requests import EngineRequests
from rollout.coordinator.protocol.headers import PROTOCOL_VERSION, Headers
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    AssignRequest,
    Command,
    Commit,
    EngineReply,
    EngineReplyPartial,
    EngineStatus,
    Message,
    Nack,
    Prepare,
    Register,
    RegisterAck,
    ReplyAck,
    Rollback,
    WeightsSource,
    nack_of,
)
from rollout.engine.engine import Engine
from rollout.engine.state import EngineState
from rollout.errors import ProtocolError, RolloutError, WeightUpdateError
from rollout.runner.weight_update import NamedTensors, StagedWeights, WeightUpdateReport

_logger = logging.getLogger(__name__)
_ANSWERS_KEPT = 256
Ordered = Command | Prepare | Commit | Rollback


@dataclass(frozen=True, slots=True)
class _Prepared:
    message: Prepare
    staged: StagedWeights


class EngineAgent:
    """The only caller of its engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        engine_id: bytes,
        block_size_tokens: int,
        max_requests: int,
        fetch: Callable[[WeightsSource], NamedTensors],
    ) -> None:
        """`fetch` brings the tensors of a source; they must not change until the next call."""
        self._engine, self._engine_id, self._fetch = engine, engine_id, fetch
        self._block_size, self._max_requests = block_size_tokens, max_requests
        self._requests = EngineRequests(engine)
        self._answers: OrderedDict[tuple[type, int], Ack | Nack] = OrderedDict()
        self._prepared: _Prepared | None = None
        self._checksum = engine.weights_checksum()
        self._report_interval = 1
        self._num_steps = self._reported_step = 0
        self.is_shut_down = False

    @property
    def has_work(self) -> bool:
        """Whether `step` would bring something."""
        return self._engine.state is EngineState.RUNNING and self._engine.has_unfinished_requests()

    def registration(self) -> Register:
        """What the coordinator must know of the engine, at first and after a lease has run out.

        Another thread may ask.
        """
        prepared = self._prepared
        return Register(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            state=self._engine.state.name,
            weights_version=self._engine.weights_version,
            weights_checksum=self._checksum,
            block_size_tokens=self._block_size,
            max_requests=self._max_requests,
            running=tuple(self._requests.held()),
            prepared_command_id=None if prepared is None else prepared.message.command_id,
        )

    def status(self) -> EngineStatus:
        """For a heartbeat; another thread may ask."""
        stats = self._engine.stats()
        return EngineStatus(
            state=stats.state.name,
            num_steps=self._num_steps,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running + stats.num_paused,
            num_blocks_free=stats.num_blocks_total - stats.num_blocks_used,
            weights_version=stats.weights_version,
        )

    def step(self) -> Sequence[Message]:
        """One step of the engine; returns progress and ends. Whatever the step raises is raised."""
        records = self._engine.step()
        self._num_steps += 1
        replies = self._requests.note_ended(records)
        if self._num_steps - self._reported_step < self._report_interval:
            return [*self._requests.due_progress(), *replies]
        return [*self._progress(), *replies]

    def _progress(self) -> Sequence[Message]:
        self._reported_step = self._num_steps
        return self._requests.progress()

    # ---- messages

    def handle(self, message: Message) -> Sequence[Message]:
        """Do what `message` asks; returns the answers.

        Raises ProtocolError for a message that is not for an engine, and WeightUpdateError where
        the weights it must have to enter the fleet cannot be had.
        """
        if isinstance(message, AssignRequest):
            return self._requests.assign(message)
        if isinstance(message, AbortRequest):
            return [reply for named in message.attempts for reply in self._requests.abort(named)]
        if isinstance(message, ReplyAck):
            for acknowledged in message.attempts:
                self._requests.forget(acknowledged)
            return []
        if isinstance(message, RegisterAck):
            return self._enter(message)
        if isinstance(message, Ordered):
            return self._answer(message)
        raise ProtocolError(f"{type(message).__name__} is no message for an engine")

    def refuse(self, reply: EngineReply | EngineReplyPartial, error: RolloutError) -> EngineReply:
        """End the attempt that `reply` tells of, as that cannot be sent; returns what can."""
        return self._requests.refuse(reply, error)

    def _answer(self, message: Ordered) -> Sequence[Message]:
        """Done once per command and phase; a repeated one gets the answer it got before.

        Before it comes all progress, so that whoever has the answer knows every token from before.
        """
        key = (type(message), message.command_id)
        if key not in self._answers:
            try:
                self._answers[key] = Ack(command_id=message.command_id, result=self._do(message))
            except Exception as error:
                if not isinstance(error, RolloutError):
                    _logger.exception("command %d failed", message.command_id)
                self._answers[key] = nack_of(message.command_id, error)
            if len(self._answers) > _ANSWERS_KEPT:
                self._answers.popitem(last=False)
        return [*self._progress(), self._answers[key]]

    def _do(self, message: Ordered) -> Mapping[str, Any]:
        if isinstance(message, Command):
            self.is_shut_down |= message.header is Headers.SHUTDOWN
            return run_command(self._engine, message)
        if isinstance(message, Prepare):
            return self._prepare(message)
        prepared = self._prepared
        if prepared is None or prepared.message.command_id != message.command_id:
            if isinstance(message, Rollback):
                return {}
            raise WeightUpdateError(
                f"nothing is prepared for version {message.version}; prepare it again"
            )
        self._prepared = None
        if isinstance(message, Rollback):
            return {}
        in_flight = prepared.message.in_flight
        return self._note_served(
            self._engine.commit_weights(prepared.staged, message.version, in_flight)
        )

    def _note_served(self, report: WeightUpdateReport) -> Mapping[str, Any]:
        self._checksum = report.checksum
        return asdict(report)

    def _prepare(self, message: Prepare) -> Mapping[str, Any]:
        self._prepared = None
        self._engine.check_update(message.version, message.in_flight)
        staged = self._staged(message.source)
        self._prepared = _Prepared(message, staged)
        return {"checksum": staged.checksum}

    def _staged(self, source: WeightsSource) -> StagedWeights:
        """Raises WeightUpdateError if they cannot be had, or are not those that were announced."""
        staged = self._engine.stage_weights(self._fetch(source), source.tensors_checksum)
        if source.checksum not in ("", staged.checksum):
            raise WeightUpdateError(
                f"the tensors at {source.address!r} have the checksum {staged.checksum}, "
                f"not {source.checksum} as announced; the serving weights are kept"
            )
        return staged

    def _enter(self, message: RegisterAck) -> Sequence[Message]:
        """Hold the attempts, serve the weights and be in the state that the coordinator says."""
        engine = self._engine
        self._report_interval = max(1, message.report_interval_tokens)
        self._requests.keep_only(message.keep)
        if message.weights is not None and message.weights_version > engine.weights_version:
            if engine.state is EngineState.RUNNING:
                engine.pause()
            elif engine.state is EngineState.SUSPENDED:
                engine.resume()  # its weights need memory to be put into
            self._prepared = None
            staged = self._staged(message.weights)
            self._note_served(engine.commit_weights(staged, message.weights_version))
        target = EngineState[message.state]
        if target is not EngineState.SUSPENDED and engine.state is EngineState.SUSPENDED:
            engine.resume()
        if target is EngineState.RUNNING:
            engine.unpause()
            return self._requests.unacknowledged()
        if engine.state is EngineState.RUNNING:
            engine.pause()
        if target is EngineState.SUSPENDED and engine.state is EngineState.PAUSED:
            engine.suspend()
        return self._requests.unacknowledged()
