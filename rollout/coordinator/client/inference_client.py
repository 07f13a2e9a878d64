"""InferenceClient: an asyncio client that submits requests and commands to a coordinator.

Used by `rollout.apis.async_llm`, `rollout.cli.top`, `benchmarks.coordinator_real` and users who
connect to a running fleet. It owns a Link with its thread and socket, a listener task, and the
futures of pending calls.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import zmq
from msgspec import structs

from rollout.control.commands import (
    COMMAND_DEADLINE_S,
    UPDATE_DEADLINE_S,
    ClientControlCalls,
    Command,
    ControlMessage,
    FleetResults,
    R,
    engine_state_of,
)
from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.coordinator.client.pending_requests import PendingRequests
from rollout.coordinator.client.streams import (
    RequestFuture,
    RequestStream,
    set_exception,
    streams_of,
)
from rollout.coordinator.client.submission import submission_of
from rollout.coordinator.net.link import Link
from rollout.coordinator.net.security import CurveKeys
from rollout.coordinator.net.sockets import address_of
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Connect,
    ConnectAck,
    EngineReply,
    EngineReplyPartial,
    Nack,
    UpdateWeights,
)
from rollout.errors import ClientStateError, CoordinatorLostError, RolloutError
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import given_or_drawn
from rollout.text import Prompt, as_tokenizer
from rollout.weights.source import WeightsSource
from rollout.wire import DEFAULT_MAX_FRAME_BYTES, Message

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)
_Message = TypeVar("_Message", bound=ControlMessage[Any])
_BATCH = 64  # messages handled before other tasks of the event loop run

Group = tuple[Prompt, Sequence[SamplingParams]]


@dataclass(frozen=True, slots=True)
class _Pending:
    """An unanswered command. `read` converts the engines' results to the future's result."""

    command: ControlMessage[Any]
    future: asyncio.Future[Any]
    read: Callable[[FleetResults[Any]], Any]


class CommandFutures:
    """The futures of unanswered commands, by command id. All methods run in one event loop. `state`
    and `weights_version` are the fleet's, according to the coordinator's latest answer. asyncio
    does not report failures that nobody awaits."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._grace_s = 0.0  # seconds after a deadline in which the coordinator may still answer
        self._pending: dict[int, _Pending] = {}
        self.state, self.weights_version = EngineState.RUNNING, 0

    def connected(self, ack: ConnectAck) -> None:
        """Keep the fleet's state and the coordinator's grace period."""
        self._grace_s = ack.answer_grace_s
        self.state, self.weights_version = engine_state_of(ack.state), ack.weights_version

    def submit(
        self, command: ControlMessage[R], read: Callable[[FleetResults[R]], _T]
    ) -> asyncio.Future[_T]:
        """Send a command, and return the future of its results, converted by `read`. The
        coordinator enforces the command's deadline. The future fails if a grace period after the
        deadline ends without an answer. Raises ConfigError for an argument of a wrong type."""
        command.check()
        loop, command_id = asyncio.get_running_loop(), command.command_id
        future: asyncio.Future[_T] = loop.create_future()
        self._send(command)
        self._pending[command_id] = _Pending(command, future, read)
        timer: asyncio.TimerHandle | None = None
        if command.deadline_s is not None:
            limit_s = command.deadline_s + self._grace_s
            error = CoordinatorLostError(f"{command.name} has no answer after {limit_s:g} s")
            timer = loop.call_later(limit_s, set_exception, future, error)
        future.add_done_callback(partial(self._done, command_id, timer))
        return future

    def _done(
        self, command_id: int, timer: asyncio.TimerHandle | None, future: asyncio.Future[Any]
    ) -> None:
        del self._pending[command_id]
        if timer is not None:
            timer.cancel()
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not report it

    def take(self, answer: Ack | Nack) -> None:
        """Resolve a command's future by its answer, and keep the fleet's state. Ignores the answer
        if the future is done or unknown."""
        pending = None if answer.command_id is None else self._pending.get(answer.command_id)
        if pending is None or pending.future.done():
            return
        if isinstance(answer, Nack):
            pending.future.set_exception(answer.error.to_error())
            return
        try:
            results = pending.command.read(answer.result or {})
            self.state = engine_state_of(results.state)
            self.weights_version = results.weights_version
            pending.future.set_result(pending.read(results))
        except RolloutError as error:  # the answer is malformed, or engines disagree
            pending.future.set_exception(error)

    def fail(self, error: RolloutError) -> None:
        """Fail all futures."""
        for pending in list(self._pending.values()):
            set_exception(pending.future, type(error)(*error.args))


class InferenceClient(ClientControlCalls):
    """A client of a coordinator, in one event loop. It is an async context manager.

    inference_coordinator_port: port on loopback, or full address.
    tokenizer: tokenizer of `rollout.text`, directory with one, or Hugging Face tokenizer, for text
        prompts and outputs.
    seed: requests without a seed get mix_seed(seed, request id). None draws a seed.

    Control calls are plain functions that return futures, so that commands are sent in the order of
    the calls. A future may be ignored. Requests and commands raise ClientStateError before `start`,
    after `stop`, and in another event loop. Once the coordinator is lost, calls and pending futures
    fail with CoordinatorLostError. A thread of the client keeps the session, so the event loop may
    block."""

    def __init__(
        self,
        inference_coordinator_port: int | str,
        *,
        tokenizer: Any | None = None,
        seed: int | None = None,
        name: str = "",
        curve: CurveKeys | None = None,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        """Make a client that is not connected yet. Raises ConfigError for a malformed address, and
        TypeError for an unknown tokenizer."""
        self.address = address_of(inference_coordinator_port)
        self.client_id = uuid.uuid4().bytes
        self.next_request_id = 0
        self.coordinator: ConnectAck | None = None  # None before the start
        self.listener_task: asyncio.Task[None] | None = None  # handles the coordinator's messages
        self._name, self._curve, self._max_frame_bytes = name, curve, max_frame_bytes
        self.seed = given_or_drawn(seed, "a client")
        self._tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        self._next_command_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._news = asyncio.Event()
        self._requests = PendingRequests(self._send, self._tokenizer)
        self._commands = CommandFutures(self._send)
        self._lost: RolloutError | None = None
        self._is_stopped = self._is_flush_due = False

    # ---- start and stop

    async def start(
        self, loop: asyncio.AbstractEventLoop | None = None, *, timeout_s: float = 30.0
    ) -> None:
        """Connect, and begin to listen. `loop`, if given, must be the running event loop.

        Raises CoordinatorLostError if no answer comes within `timeout_s`. Raises the coordinator's
        error if it refuses this client, such as ProtocolError for another protocol version. Raises
        ClientStateError for another loop, and if the client was started or stopped before."""
        running = asyncio.get_running_loop()
        if loop not in (None, running):
            raise ClientStateError("start(loop) got another event loop than the running one")
        if self._loop is not None or self._is_stopped:
            state = "stopped, make a new one" if self._is_stopped else "started already"
            raise ClientStateError(f"this client is {state}")
        self._loop = running
        connect = Connect(
            protocol_version=PROTOCOL_VERSION, client_id=self.client_id, name=self._name
        )
        self._link = Link(
            self.address,
            handshake=lambda: connect,
            on_news=self._wake_listener,
            curve=self._curve,
            max_queued=None,  # pending requests bound the messages in both directions
            max_frame_bytes=self._max_frame_bytes,
        )
        try:
            await asyncio.to_thread(self._link.wait_registered, timeout_s)
        except BaseException:  # even a cancelled start must end the link's thread
            await self.aclose()
            raise
        self._take(self._link.receive())
        self.listener_task = running.create_task(self._listen(), name="inference-client-listener")

    async def __aenter__(self) -> InferenceClient:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def stop(self) -> None:
        """Fail pending futures, disconnect, and close the socket. The coordinator aborts unfinished
        requests. Legal in any state. A second call does nothing."""
        is_first, self._is_stopped = not self._is_stopped, True
        if not is_first or self._link is None or self._loop is None:
            return
        if not self._loop.is_closed():
            if self.listener_task is not None:
                self.listener_task.cancel()
            error = ClientStateError(
                "the client was stopped before this call was answered; start a new one"
            )
            self._requests.fail(error, quietly=True)
            self._commands.fail(error)
        self._link.close("the client stops")

    async def aclose(self) -> None:
        """Call `stop`, and wait until the listener has ended."""
        self.stop()
        if self.listener_task is not None:
            await asyncio.gather(self.listener_task, return_exceptions=True)

    # ---- state

    @property
    def state(self) -> EngineState:
        """The fleet's state, according to the coordinator's latest answer to this client."""
        return self._commands.state

    @property
    def weights_version(self) -> int:
        """The fleet's weights version, according to the coordinator's latest answer to this
        client."""
        return self._commands.weights_version

    @property
    def completion_futures(self) -> dict[int, RequestFuture]:
        """The futures of unfinished requests, by request id. Read only."""
        return self._requests.futures

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]] | None:
        """The ZeroMQ context of this client, or None before `start`."""
        return None if self._link is None else self._link.context

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """The current ZeroMQ socket, or None before `start`. Only the client's own thread may use
        it. A reconnect replaces the socket."""
        return None if self._link is None else self._link.socket

    @property
    def num_malformed(self) -> int:
        """Number of malformed messages that have arrived."""
        return 0 if self._link is None else self._link.num_malformed

    # ---- requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> RequestFuture:
        """Submit a request. Its future resolves to a DynamicInferenceRequestRecord.

        The record's request id is `future.request_id`. A failed request also resolves to a record.
        If there is no record, the future raises the error.

        Higher priorities come first. The request is aborted after `deadline_s` seconds, or if the
        future is cancelled. Any number may be submitted: requests beyond the coordinator's limits
        wait here. Raises InvalidRequestError for a malformed request, before anything is sent. If
        the tokenizer fails on the prompt, the future fails with InvalidRequestError."""
        return self._submit([(prompt, [sampling_params])], [seed], priority, deadline_s)[0][0]

    def add_group(
        self,
        prompt: Prompt,
        sampling_params: Sequence[SamplingParams],
        *,
        seeds: Sequence[int | None] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[RequestFuture]:
        """Submit samples of one prompt, which go to one engine. Returns a future per sample.
        `seeds` has a seed or None per sample. The rest is as in `add_request`."""
        return self._submit([(prompt, sampling_params)], seeds, priority, deadline_s)[0]

    def add_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestFuture]]:
        """Submit groups, each a prompt and its samples' params. Returns the futures of each group.
        No group is submitted if one is malformed. All are cancelled if an exception such as
        KeyboardInterrupt comes. The rest is as in `add_group`."""
        return self._submit(groups, None, priority, deadline_s)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> RequestStream:
        """Submit a request like `add_request`. Returns a stream of its tokens, then its record."""
        return self.stream_groups(
            [(prompt, [sampling_params])], seeds=[seed], priority=priority, deadline_s=deadline_s
        )[0][0]

    def stream_groups(
        self,
        groups: Sequence[Group],
        *,
        seeds: Sequence[int | None] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[list[RequestStream]]:
        """Submit groups like `add_groups`, each sample as a stream. `seeds` has a seed or None per
        sample, the same for each group."""
        added = self._submit(groups, seeds, priority, deadline_s, streaming=True)
        tokens_of, params = self._requests.tokens_of, [each for _, each in groups]
        return [streams_of(*each, tokens_of) for each in zip(added, params, strict=True)]

    def abort(self, request_id: int) -> None:
        """Abort a request. Its future resolves to the record with the tokens so far. The future
        fails if no engine has the request. An unknown or ended request is ignored."""
        self._require_usable()
        self._requests.abort(request_id)

    def _submit(
        self,
        groups: Sequence[Group],
        seeds: Sequence[int | None] | None,
        priority: int,
        deadline_s: float | None,
        streaming: bool = False,
    ) -> list[list[RequestFuture]]:
        self._require_usable()
        submissions, next_id = [], self.next_request_id
        for prompt, sampling_params in groups:
            ids = range(next_id, next_id + len(sampling_params))
            submissions.append(
                submission_of(
                    prompt,
                    sampling_params,
                    tokenizer=self._tokenizer,
                    request_ids=ids,
                    seeds=seeds,
                    client_seed=self.seed,
                    priority=priority,
                    deadline_s=deadline_s,
                    streaming=streaming,
                )
            )
            next_id = ids.stop
        self.next_request_id = next_id
        return self._requests.submit(submissions)

    # ---- control calls: ClientControlCalls has the other methods

    def do(
        self, command: Command[R], *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[R]:
        """Send a command to all engines. Returns a future of the merged result. See
        ClientControlCalls."""
        return self._commands.submit(self._numbered(command, deadline_s), command.merged)

    def ask(
        self, command: Command[R], *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[FleetResults[R]]:
        """Send a command to all engines. Returns a future of the result of each engine. See
        ClientControlCalls."""
        return self._commands.submit(self._numbered(command, deadline_s), lambda results: results)

    def update_weights(
        self,
        source: WeightsSource,
        version: int | None = None,
        in_flight: bool = False,
        *,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> asyncio.Future[WeightUpdateReport]:
        """Commit the weights of `source` on all engines or on none. Returns a future of the report.
        `version` None means the current version + 1. `in_flight` commits while engines run."""
        update = UpdateWeights(source=source, version=version, in_flight=in_flight)
        return self._commands.submit(self._numbered(update, deadline_s), update.merged)

    def _numbered(self, command: _Message, deadline_s: float) -> _Message:
        self._require_usable()
        self._next_command_id += 1
        return structs.replace(
            command, command_id=self._next_command_id - 1, deadline_s=float(deadline_s)
        )

    # ---- messages

    def _require_usable(self) -> None:
        if self._is_stopped or self.coordinator is None:
            remedy = "is stopped" if self._is_stopped else "is not started; await start() first"
            raise ClientStateError(f"this client {remedy}")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:
            raise ClientStateError(
                "a client belongs to the event loop it was started in; from elsewhere use "
                "loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe"
            )
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)

    def _send(self, message: Message) -> None:
        """Queue a message, unless the client has ended. All messages of one iteration of the event
        loop are sent together."""
        is_over = self._is_stopped or self._lost is not None
        if self._link is None or self._loop is None or is_over:
            return
        self._link.queue(message)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._link is not None:
            self._link.flush()

    def _wake_listener(self) -> None:
        """Wake `_listen`. The link's thread calls this when messages have arrived."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    async def _listen(self) -> None:
        """Handle the coordinator's messages until the link ends."""
        assert self._link is not None
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while True:
                    messages = self._link.receive()
                    for start in range(0, len(messages), _BATCH):
                        if start:
                            await asyncio.sleep(0)
                        self._take(messages[start : start + _BATCH])
                    if not self._link.has_news:
                        break
                    await asyncio.sleep(0)
        except RolloutError as end:
            self._fail(end)
        except Exception as fault:
            _logger.exception("the client's listener failed")
            self._fail(CoordinatorLostError(f"this client failed: {fault!r}"))
            raise
        finally:
            self._link.close("the client stops")

    def _take(self, messages: Sequence[Message]) -> None:
        replies = [m for m in messages if isinstance(m, (EngineReply, EngineReplyPartial))]
        if replies:
            self._requests.take(replies)
        for message in messages:
            if isinstance(message, (Ack, Nack)):
                self._commands.take(message)
            elif isinstance(message, ConnectAck):
                self.coordinator = message
                self._requests.connected(message)
                self._commands.connected(message)

    def _fail(self, error: RolloutError) -> None:
        self._lost = error
        self._requests.fail(error)
        self._commands.fail(error)
