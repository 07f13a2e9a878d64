"""InferenceClient: submits requests to a coordinator, and orders its engines about."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import zmq.asyncio

from rollout.coordinator.client.commands import ClientCommands, CommandFuture
from rollout.coordinator.client.link import CoordinatorLink
from rollout.coordinator.client.requests import ClientRequests, RequestFuture, RequestStream
from rollout.coordinator.client.submission import Prompt, submission_of
from rollout.coordinator.client.verbs import EngineVerbs
from rollout.coordinator.dealer import CoordinatorLostError, CurveKeys, address_of
from rollout.coordinator.protocol.headers import PROTOCOL_VERSION
from rollout.coordinator.protocol.messages import (
    DEFAULT_MAX_FRAME_BYTES,
    Ack,
    Command,
    Connect,
    ConnectAck,
    EngineReply,
    EngineReplyPartial,
    Message,
    Nack,
    UpdateWeights,
)
from rollout.errors import RolloutError
from rollout.sampling_params import SamplingParams

# Above a coordinator's commit_grace_s and abort_grace_s: it may answer so long after a deadline.
_GRACE_S = 15.0


class ClientStateError(RolloutError):
    """A client was used before its start, after its end, or from a loop that is not its own."""


class InferenceClient(EngineVerbs):
    """A coordinator's client: of one event loop, as many as one likes. An async context manager.

    inference_coordinator_port: on loopback, or a full address. seed: requests without a seed of
    their own get mix_seed(seed, request id); None takes a seed that no other client has.
    Verbs are plain functions that return futures, so that what is called first is sent first. A
    future may be ignored. All raise ClientStateError where they cannot be used, and
    CoordinatorLostError while the coordinator is given up; pending futures fail with it then. A
    coordinator that is back sooner is told all that is pending again.
    """

    def __init__(
        self,
        inference_coordinator_port: int | str,
        *,
        seed: int | None = None,
        name: str = "",
        curve: CurveKeys | None = None,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        self.address = address_of(inference_coordinator_port)
        self.client_id = uuid.uuid4().bytes
        self.next_request_id = 0
        self._name, self._curve, self._max_frame_bytes = name, curve, max_frame_bytes
        self._seed = int.from_bytes(self.client_id[:8], "big") if seed is None else seed
        self._next_command_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: CoordinatorLink | None = None
        self._requests = ClientRequests(self._send)
        self._commands = ClientCommands(self._send)
        self._is_stopped = False

    # ---- life

    async def start(
        self, loop: asyncio.AbstractEventLoop | None = None, *, timeout_s: float = 30.0
    ) -> None:
        """Connect, and begin to listen. `loop`: if given, it must be the running one.

        Raises CoordinatorLostError if nobody answers within `timeout_s`, the coordinator's reason
        if it refuses this client (ProtocolError: another version), ClientStateError when started
        already.
        """
        running = asyncio.get_running_loop()
        if loop not in (None, running):
            raise ClientStateError("start() must be awaited in the loop that it is given")
        if self._loop is not None or self._is_stopped:
            state = "stopped, make a new one" if self._is_stopped else "started already"
            raise ClientStateError(f"this client is {state}")
        self._loop = running
        greeting = Connect(
            protocol_version=PROTOCOL_VERSION, client_id=self.client_id, name=self._name
        )
        self._link = CoordinatorLink(
            self.address,
            greeting,
            on_messages=self._take,
            on_welcome=self._welcome,
            on_lost=self._fail,
            curve=self._curve,
            max_frame_bytes=self._max_frame_bytes,
        )
        try:
            await self._link.open(timeout_s)
        except BaseException:
            await self.aclose()
            raise

    async def __aenter__(self) -> InferenceClient:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def stop(self) -> None:
        """Say goodbye, so that unfinished requests are aborted; fail what is pending and close the
        socket. From any state; twice is fine.
        """
        self._stop()

    async def aclose(self) -> None:
        """As `stop`, and wait until the tasks are gone."""
        await asyncio.gather(*self._stop(), return_exceptions=True)

    def _stop(self) -> list[asyncio.Task[None]]:
        is_first, self._is_stopped = not self._is_stopped, True
        if not is_first or self._link is None or self._loop is None:
            return []
        tasks = self._link.close("the client stops")
        if not self._loop.is_closed():
            error = ClientStateError("the client was stopped before the answer came")
            self._requests.fail(error, quietly=True)
            self._commands.fail(error)
        return tasks

    # ---- state

    @property
    def coordinator(self) -> ConnectAck | None:
        """What the coordinator said of itself in its latest greeting, None before the first."""
        return None if self._link is None else self._link.coordinator

    @property
    def completion_futures(self) -> dict[int, RequestFuture]:
        """Of unfinished requests, by request id. To look at."""
        return self._requests.futures

    @property
    def listener_task(self) -> asyncio.Task[None] | None:
        """The task that takes what the coordinator sends."""
        return None if self._link is None else self._link.listener_task

    @property
    def context(self) -> zmq.asyncio.Context | None:
        return None if self._link is None else self._link.context

    @property
    def socket(self) -> zmq.asyncio.Socket | None:
        return None if self._link is None else self._link.socket

    @property
    def num_malformed(self) -> int:
        """Messages that were dropped because they could not be understood."""
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
        """Submit a request. Its future resolves to a DynamicInferenceRequestRecord under
        `future.request_id`, also if it failed with one, and raises the error of one without.

        Higher priorities first. After `deadline_s` seconds it is aborted. Cancelling the future
        aborts it, too. Raises InvalidRequestError for a malformed one, before anything is sent.
        """
        return self._submit(prompt, [sampling_params], [seed], priority, deadline_s)[0]

    def add_group(
        self,
        prompt: Prompt,
        sampling_params: Sequence[SamplingParams],
        *,
        seeds: Sequence[int | None] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[RequestFuture]:
        """Submit samples of one prompt, which go to one engine. As `add_request` otherwise."""
        return self._submit(prompt, sampling_params, seeds, priority, deadline_s)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> RequestStream:
        """Submit a request. Iterates over its generated tokens in order, each once, as TokenRuns of
        `streaming_interval` tokens or some more; the last item is the record. As `add_request`
        otherwise. Closing the iterator aborts it.
        """
        params = replace(sampling_params, streaming=True)
        futures = self._submit(prompt, [params], [seed], priority, deadline_s, streaming=True)
        return self._requests.stream(futures[0], params.streaming_interval)

    def abort(self, request_id: int) -> None:
        """Ask for the end of a request; its future resolves to the record with the tokens so far.
        One that has ended, or is unknown, is left alone.
        """
        self._require_usable()
        self._requests.abort(request_id)

    def _submit(
        self,
        prompt: Prompt,
        sampling_params: Sequence[SamplingParams],
        seeds: Sequence[int | None] | None,
        priority: int,
        deadline_s: float | None,
        streaming: bool = False,
    ) -> list[RequestFuture]:
        self._require_usable()
        ids = range(self.next_request_id, self.next_request_id + len(sampling_params))
        submission = submission_of(
            prompt,
            sampling_params,
            request_ids=ids,
            seeds=seeds,
            client_seed=self._seed,
            priority=priority,
            deadline_s=deadline_s,
            streaming=streaming,
        )
        futures = self._requests.submit(submission, _GRACE_S)
        self.next_request_id = ids.stop
        return futures

    # ---- commands

    def _new_command_id(self) -> int:
        self._require_usable()
        self._next_command_id += 1
        return self._next_command_id - 1

    def _order(self, order: Command | UpdateWeights) -> CommandFuture:
        return self._commands.order(order, _GRACE_S)

    # ---- between the session and what is pending

    def _require_usable(self) -> None:
        if self._is_stopped or self._link is None or self._link.coordinator is None:
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
        if self._link.lost is not None:
            raise CoordinatorLostError(*self._link.lost.args)

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _take(self, messages: list[Message]) -> None:
        self._requests.take(
            [m for m in messages if isinstance(m, (EngineReply, EngineReplyPartial))]
        )
        for message in messages:
            if isinstance(message, (Ack, Nack)):
                self._commands.take(message)

    def _welcome(self, is_known: bool) -> None:
        self._requests.welcome(is_known)
        self._commands.welcome(is_known)

    def _fail(self, error: CoordinatorLostError) -> None:
        self._requests.fail(error)
        self._commands.fail(error)
