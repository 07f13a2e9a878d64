"""EngineAgent: executes the coordinator's messages on one engine. `serve` is its main loop.

Used by `rollout.apis.engine_process`. The agent changes the state, requests and weights of its
engine, and returns the messages to send. `serve` sends them through a Link.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from rollout.control.commands import Command, Shutdown
from rollout.control.state import EngineState
from rollout.coordinator.agent.requests import EngineRequests
from rollout.coordinator.agent.updates import Fetch, WeightUpdates
from rollout.coordinator.core.context import num_ahead
from rollout.coordinator.net.link import Link
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    Ack,
    AssignRequest,
    Attempt,
    Commit,
    Credit,
    EngineReply,
    EngineStatus,
    Heartbeat,
    Nack,
    Prepare,
    Register,
    RegisterAck,
    ReplyAck,
    Rollback,
    nack_of,
)
from rollout.engine.engine import Engine
from rollout.errors import (
    ConfigError,
    LockstepError,
    ProtocolError,
    RolloutError,
    WeightUpdateError,
)
from rollout.ranges import MAX_SECONDS
from rollout.wire import MAX_ITEMS, Message

_logger = logging.getLogger(__name__)
_NUM_ANSWERS_KEPT = 256
_ENTRY_S = 600.0  # to fetch and stage the fleet's weights, for each attempt to enter the fleet
_RETRY_S = 0.5  # between two attempts
_MAX_ENTRY_FAILURES = 20  # in sequence
_IDLE_S = 0.5
_STAGING_POLL_S = 0.005
_MAX_FAILED_STEPS = 3  # in sequence, whatever their requests
FleetCommand = Command[Any] | Prepare | Commit | Rollback


class EngineAgent:
    """Executes the coordinator's messages on one engine. The engine enters the fleet once it serves
    the fleet's weights and is in the fleet's state. One thread calls all methods, except that the
    Link's thread calls `registration` and `status`. Another thread stages weights."""

    def __init__(
        self,
        engine: Engine,
        *,
        engine_id: bytes,
        block_size_tokens: int,
        max_requests: int,
        settings: Mapping[str, str],
        fetch: Fetch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings` must be equal on all engines of the fleet. `fetch` is passed to WeightUpdates.
        `clock` returns monotonic seconds for deadlines. Raises ConfigError if `max_requests` is
        above half the number of attempts that one Register message can hold."""
        if max_requests > MAX_ITEMS // 2:
            raise ConfigError(
                f"max_requests={max_requests} of an engine of a fleet must be at most "
                f"{MAX_ITEMS // 2}"
            )
        self._engine, self._engine_id, self._clock = engine, engine_id, clock
        self._block_size, self._max_requests = block_size_tokens, max_requests
        self._settings = settings
        self._requests = EngineRequests(engine)
        self._updates = WeightUpdates(engine, fetch)
        self._answers: OrderedDict[tuple[type, int], Ack | Nack] = OrderedDict()
        self._registered_vote: int | None = None  # the command id in the latest registration
        self._entry: RegisterAck | None = None  # until the engine is in its state, with its weights
        self._num_entry_failures, self._retry_at = 0, 0.0
        self._num_steps = self._num_granted = self._session = 0
        self._last_step_s = 0.0
        # A commit made while there is work, its answer, and its end time. The first step after the
        # commit confirms it.
        self._committed: tuple[Commit, Ack, float] | None = None
        self.is_shut_down = False

    @property
    def has_work(self) -> bool:
        """Whether the engine has unfinished requests, and may run them in its state."""
        is_in_fleet = self._entry is None and self._engine.state is EngineState.RUNNING
        return is_in_fleet and self._engine.has_unfinished_requests()

    @property
    def is_staging(self) -> bool:
        """Whether weights are being staged. A later `poll` returns the result."""
        return self._updates.in_staging is not None

    @property
    def max_idle_s(self) -> float:
        """Longest time in seconds between two calls of `poll` while there is no work."""
        return _STAGING_POLL_S if self.is_staging else _IDLE_S

    @property
    def is_broken(self) -> bool:
        """Whether the engine refuses every further call."""
        return self._engine.is_broken

    @property
    def suspects(self) -> tuple[Attempt, ...]:
        """The attempts in the latest step that raised. Any of them may have caused the error."""
        return self._requests.attempts(self._engine.suspects())

    def registration(self) -> Register:
        """Return the first message of a session: the engine's state, weights and attempts. The
        Link's thread calls it. Records which staged update the message names."""
        self._registered_vote = self._updates.voted_command_id
        return Register(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            state=self._engine.state.name,
            weights_version=self._engine.weights_version,
            weights_checksum=self._updates.checksum,
            block_size_tokens=self._block_size,
            max_requests=self._max_requests,
            running=self._requests.held(),
            prepared_command_id=self._registered_vote,
            settings=self._settings,
        )

    def check_ranks(self) -> None:
        """Raise LockstepError if a rank of the engine has ended."""
        self._engine.check_ranks()

    def status(self) -> EngineStatus:
        """Return the engine's status for a heartbeat. Any thread may call it."""
        stats = self._engine.stats(of_ranks=False)
        return EngineStatus(
            state=stats.state.name,
            num_steps=self._num_steps,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running + stats.num_paused,
            weights_version=stats.weights_version,
            longest_step_s=min(self._engine.longest_step_s, MAX_SECONDS),
        )

    def step(self) -> Sequence[Message]:
        """Run one step of the engine, and return progress, replies and credit. Raises the engine's
        error."""
        start = time.perf_counter()
        records = self._engine.step()
        confirmations = self._confirm_commit(stepped=True)
        self._last_step_s = time.perf_counter() - start
        self._num_steps += 1
        replies = self._requests.ended(records)
        return [*self._requests.due_progress(), *replies, *confirmations, *self._credit()]

    def _credit(self) -> Sequence[Message]:
        """Return a Credit if the engine has room for more requests than it has granted, else []. At
        most `num_ahead` requests wait in the engine. Nothing is granted before the engine has
        entered the fleet."""
        if self._entry is not None:
            return []
        ahead, requests = num_ahead(self._max_requests), self._requests
        room = min(
            ahead - self._engine.num_waiting,
            self._max_requests + ahead - requests.num_running,
        )
        num_granted = requests.num_received + max(0, room)
        if num_granted <= self._num_granted:
            return []
        self._num_granted = num_granted
        return [Credit(num_granted=num_granted, session=self._session)]

    # ---- messages

    def handle(self, message: Message) -> Sequence[Message]:
        """Execute `message`, and return the answers and credit. Raises ProtocolError if `message`
        is not for an engine. Raises the latest error if the engine could not enter the fleet in 20
        attempts."""
        return [*self._handle(message), *self._credit()]

    def _handle(self, message: Message) -> Sequence[Message]:
        if isinstance(message, AssignRequest):
            return self._requests.assign(message)
        if isinstance(message, EngineReply):  # the failure of an unreadable assignment
            return [self._requests.refuse(message)]
        if isinstance(message, Nack):  # the refusal of an unreadable command
            return [message]
        if isinstance(message, AbortRequest):
            return [reply for named in message.attempts for reply in self._requests.abort(named)]
        if isinstance(message, ReplyAck):
            for acknowledged in message.attempts:
                self._requests.drop_reply(acknowledged)
            return []
        if isinstance(message, RegisterAck):
            return self._begin_session(message)
        if isinstance(message, (Command, Prepare, Commit, Rollback)):
            return self._answer(message)
        raise ProtocolError(f"{type(message).__name__} is not a message for an engine")

    def poll(self, *, may_step: bool = True) -> Sequence[Message]:
        """Return answers that do not come from a step, such as votes on a Prepare, and credit.
        `may_step` tells that a step follows if there is work. Raises the latest error if the engine
        could not enter the fleet in 20 attempts."""
        confirmed = [] if self.has_work and may_step else self._confirm_commit()
        return [*confirmed, *self._poll(), *self._credit()]

    def _poll(self) -> Sequence[Message]:
        ended = self._updates.poll(self._clock())
        if ended is not None:
            cause, error = ended
            if isinstance(cause, Prepare):
                return [self._vote(cause, error)]
            return self._enter(error)
        is_due = self._entry is not None and self._clock() >= self._retry_at
        return self._enter() if is_due and not self.is_staging else []

    def instead_of(self, message: Message, error: ProtocolError) -> Sequence[Message]:
        """Return the messages to send in place of a message that no frame can carry. A Progress is
        replaced by its halves. A reply or an answer is replaced by the failure of its request or
        command with `error`. Raises `error` for any other message."""
        if isinstance(message, Ack):
            return [nack_of(message.command_id, error)]
        return self._requests.instead_of(message, error)

    def close(self) -> None:
        """Cancel staging, and wait until no other thread uses the weights."""
        self._updates.cancel()
        self._updates.wait_until_unused()

    # ---- commands

    def _answer(self, message: FleetCommand) -> Sequence[Message]:
        """Run a command, and return the messages to send. A repeated command only gets its first
        answer again. The vote on a Prepare comes later, and so does the answer to a Commit while
        there is work."""
        # Progress goes before the answer, so that the coordinator knows all earlier tokens.
        confirmed = self._confirm_commit()
        answer = self._answers.get((type(message), message.command_id))
        if answer is not None:
            return [*confirmed, *self._requests.progress(), answer]
        if isinstance(message, Prepare):
            return [*confirmed, *self._prepare(message)]
        votes = [*confirmed, *(self._cancel_update() if self._ends_staging(message) else [])]
        try:
            answer = Ack(command_id=message.command_id, result=self._do(message))
        except Exception as error:  # any error is the command's answer
            if not isinstance(error, RolloutError):
                _logger.exception("command %d failed", message.command_id)
            answer = nack_of(message.command_id, error)
        messages = [*votes, *self._requests.progress()]
        if (
            isinstance(message, Commit)
            and isinstance(answer, Ack)
            and self.has_work
            and self._last_step_s
        ):
            self._committed = message, answer, time.perf_counter()
            return messages
        return [*messages, self._keep(message, answer)]

    def _confirm_commit(self, *, stepped: bool = False) -> list[Message]:
        """Return the answer to an unanswered Commit, or [] if there is none. `stepped` tells that
        the first step after the commit has just ended. The reported stall then includes the extra
        time of that step over the step before."""
        if self._committed is None:
            return []
        (commit, answer, ended_at), self._committed = self._committed, None
        if stepped:
            more_s = time.perf_counter() - ended_at - self._last_step_s
            report = answer.result or {}
            stall_s = report["stall_seconds"] + max(0.0, more_s)
            result = {**report, "stall_seconds": stall_s}
            answer = Ack(command_id=commit.command_id, result=result)
        return [self._keep(commit, answer)]

    def _keep(self, message: FleetCommand, answer: Ack | Nack) -> Ack | Nack:
        self._answers[type(message), message.command_id] = answer
        if len(self._answers) > _NUM_ANSWERS_KEPT:
            self._answers.popitem(last=False)
        return answer

    def _do(self, message: Command[Any] | Commit | Rollback) -> Mapping[str, Any] | None:
        if isinstance(message, Command):
            self.is_shut_down |= isinstance(message, Shutdown)
            report: Mapping[str, Any] | None = to_builtins(self._engine.do(message))
            return report
        is_staged = self._updates.voted_command_id == message.command_id
        if isinstance(message, Rollback):
            if is_staged:
                self._updates.drop()
            return None
        if not is_staged:
            raise WeightUpdateError(
                f"nothing is prepared for version {message.version}; prepare it again"
            )
        return self._updates.commit()

    # ---- weight updates

    def _prepare(self, message: Prepare) -> Sequence[Message]:
        """Begin to stage the update. A later `poll` returns the vote. Returns the vote no if the
        update is illegal, and the vote no for an update that this one replaces."""
        staging = self._updates.in_staging
        if isinstance(staging, Prepare) and staging.command_id == message.command_id:
            return []
        votes = self._cancel_update()
        self._updates.drop()
        try:
            self._engine.check_update(message.version, message.in_flight)
        except RolloutError as error:
            return [*votes, self._vote(message, error)]
        seconds = math.inf if message.deadline_s is None else message.deadline_s
        self._updates.begin(message, message.source, self._clock() + seconds)
        return votes

    def _vote(self, message: Prepare, error: BaseException | None) -> Ack | Nack:
        if error is not None:
            return self._keep(message, nack_of(message.command_id, error))
        result = {"checksum": self._updates.staged_checksum}
        return self._keep(message, Ack(command_id=message.command_id, result=result))

    def _ends_staging(self, message: Command[Any] | Commit | Rollback) -> bool:
        if isinstance(message, Command):
            return message.ends_staging
        staging = self._updates.in_staging
        return isinstance(staging, Prepare) and staging.command_id == message.command_id

    def _cancel_update(self) -> list[Message]:
        """Cancel staging, and wait until no other thread uses the weights. Returns the vote no if a
        Prepare began the staging."""
        cause = self._updates.cancel()
        self._updates.wait_until_unused()
        if not isinstance(cause, Prepare):
            return []
        error = WeightUpdateError(
            f"version {cause.version} was cancelled before it was staged; the serving weights are "
            "kept"
        )
        return [self._vote(cause, error)]

    # ---- entering the fleet

    def _begin_session(self, message: RegisterAck) -> Sequence[Message]:
        """Drop the attempts that the RegisterAck does not name, and enter the fleet."""
        self._confirm_commit()  # the registration named the new weights; no answer is needed
        self._requests.report_interval = max(1, message.report_interval_tokens)
        self._requests.keep_only(message.keep)
        self._requests.num_received = self._num_granted = 0
        self._session = message.session
        if self._updates.voted_command_id != self._registered_vote:
            self._updates.drop()  # the registration did not name this vote, so it gets no decision
        self._entry, staging = message, self._updates.in_staging
        if isinstance(staging, RegisterAck) and staging.weights == message.weights:
            return []
        return [*self._cancel_update(), *self._enter()]

    def _enter(self, error: BaseException | None = None) -> Sequence[Message]:
        """Enter the fleet, or begin to stage the weights that it serves. `error` is the error with
        which staging ended, or None. A failed entry is tried again. The 20th failure in sequence is
        raised."""
        entry = self._entry
        assert entry is not None
        try:
            if error is not None:
                raise error
            if self._lacks_weights_of(entry):
                return []
            self._reach(EngineState[entry.state])
        # Memory may be short or the publisher unreachable for a while, or the weights replaced.
        except Exception as fault:
            self._num_entry_failures += 1
            if self._num_entry_failures == _MAX_ENTRY_FAILURES:
                raise
            is_known = isinstance(fault, WeightUpdateError)
            _logger.warning("entering the fleet failed: %s", fault, exc_info=not is_known)
            self._retry_at = self._clock() + _RETRY_S
            return []
        self._entry, self._num_entry_failures = None, 0
        # The heartbeat reports the entry. Otherwise work would wait for the next heartbeat.
        return [*self._requests.unacknowledged(), Heartbeat(sequence=0, status=self.status())]

    def _lacks_weights_of(self, entry: RegisterAck) -> bool:
        """Return whether the engine still lacks the weights of the RegisterAck. Commits these
        weights if they are staged. Otherwise begins to stage them."""
        engine = self._engine
        if entry.weights is None or entry.weights_version <= engine.weights_version:
            return False
        if self._updates.is_staged_for_entry:
            self._updates.commit()
            return False
        if engine.state is EngineState.RUNNING:
            engine.pause()
        elif engine.state is EngineState.SUSPENDED:
            engine.resume()  # staging needs the memory of the weights
        self._updates.begin(entry, entry.weights, self._clock() + _ENTRY_S)
        return True

    def _reach(self, target: EngineState) -> None:
        engine = self._engine
        if target is not EngineState.SUSPENDED and engine.state is EngineState.SUSPENDED:
            engine.resume()
        if target is EngineState.RUNNING:
            engine.unpause()
            return
        if engine.state is EngineState.RUNNING:
            engine.pause()
        if target is EngineState.SUSPENDED and engine.state is EngineState.PAUSED:
            engine.suspend()


def serve(agent: EngineAgent, link: Link) -> None:
    """Execute the coordinator's messages, and step while the lease is valid, until a Shutdown.

    If a single request makes a step fail, only that request ends, and the step does not raise. A
    step's error is raised after three failed steps in sequence, or if it broke the engine.
    LockstepError of any call is raised at once. The Disconnect then names the requests of the
    failed step. Raises the latest error if the engine could not enter the fleet, and RolloutError
    if the link ends."""
    num_failures = 0
    try:
        while not agent.is_shut_down:
            agent.check_ranks()
            runs = agent.has_work and link.may_step()
            for message in link.receive(0.0 if runs else agent.max_idle_s):
                _queue_all(agent, link, agent.handle(message))
            may_step = link.may_step()
            _queue_all(agent, link, agent.poll(may_step=may_step))
            link.flush()
            # Asked again: `poll` may have taken seconds.
            if not (agent.has_work and may_step and link.may_step()):
                continue
            try:
                outbox = agent.step()
            except LockstepError:
                raise
            except Exception as error:  # one step may fail for a reason that passes
                num_failures += 1
                if num_failures == _MAX_FAILED_STEPS or agent.is_broken:
                    link.close(f"it failed: {error!r}", is_fault=True, suspects=agent.suspects)
                    raise
                _logger.exception("a step failed; its requests are queued again")
                continue
            num_failures = 0
            _queue_all(agent, link, outbox)
            link.flush()
    except LockstepError as error:  # whichever call raised it: no step can run any more
        link.close(f"it failed: {error!r}", is_fault=True, suspects=agent.suspects)
        raise
    finally:
        agent.close()


def _queue_all(agent: EngineAgent, link: Link, messages: Iterable[Message]) -> None:
    for message in messages:
        try:
            link.queue(message)
        except ProtocolError as error:
            _queue_all(agent, link, agent.instead_of(message, error))
