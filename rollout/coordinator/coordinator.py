"""DataParallelInferenceCoordinator: the process between clients and engines. It gives
CoordinatorCore a socket and a clock.

Used by `rollout.coordinator.__main__`, as the child of an AsyncLLM, by the command `rollout
coordinator`, and by users. It owns the ROUTER socket and writes the schedule file, if any.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, Protocol

import zmq

from rollout.config import PrefixCachingCoordinatorPolicy
from rollout.coordinator.core.context import CoordinatorLimits, Counters
from rollout.coordinator.core.core import CoordinatorCore, Outgoing
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.coordinator.net.key_gate import Refusals
from rollout.coordinator.net.security import CurveServerKeys
from rollout.coordinator.net.sockets import RouterSocket, SelfPipe
from rollout.coordinator.protocol.codec import batched, encode
from rollout.coordinator.routing.policies import RoutingPolicy, make_policy
from rollout.coordinator.routing.schedule_recorder import ScheduleRecorder
from rollout.errors import ConfigError, ProtocolError
from rollout.wire import DEFAULT_MAX_FRAME_BYTES, Message

logger = logging.getLogger(__name__)

PolicySource = str | PrefixCachingCoordinatorPolicy | Callable[..., RoutingPolicy]

# Frames handled before the loop checks its timers and whether to stop.
_BATCH = 256
# Messages that are sent together after about a millisecond: the socket's thread and the receivers
# then wake once for all of them.
_SENT_TOGETHER = 32
# If a pass of the loop takes this much longer than planned, the process was stopped or the machine
# asleep.
_STANDSTILL_S = 0.5
# How often a coordinator process checks whether its parent has ended, where no descriptor shows it.
_PARENT_CHECK_S = 1.0


class Event(Protocol):
    """The part of multiprocessing.Event and threading.Event that `entrypoint` needs."""

    def set(self) -> None: ...


class DataParallelInferenceCoordinator:
    """Serves clients and engines from `start` to `stop`, a Shutdown, or the end of its parent.

    block_size_tokens: the size of the blocks by which prompts are routed if
    `enable_prefix_caching`. host: a name or an address; 0.0.0.0 for all interfaces; None for a
    socket in a directory that only this user can enter. advertise_host: the host that peers connect
    to if it is not `host`. curve: the coordinator's keys; without keys a host that other machines
    can reach is refused, unless `insecure`. max_frame_bytes: the longest frame to send or accept.
    """

    def __init__(
        self,
        pipe_connection: Connection | None,
        data_parallel_size: int,
        tokenizer: Any = None,
        inference_coordinator_port: int | None = None,
        deterministic_mode: bool = False,
        block_size_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        prefix_caching_coordinator_policy: PolicySource = (
            PrefixCachingCoordinatorPolicy.LOAD_BALANCED
        ),
        schedule_output_path: str | None = None,
        *,
        policy_options: Mapping[str, Any] | None = None,
        host: str | None = "127.0.0.1",
        advertise_host: str | None = None,
        curve: CurveServerKeys | None = None,
        insecure: bool = False,
        limits: CoordinatorLimits | None = None,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        """Bind, and send the address through the pipe. Engines and clients may connect at any time.

        data_parallel_size: how many engines are expected; in `deterministic_mode` none gets work
        before all have registered, and ranks follow the order of their ids. tokenizer: not used,
        since clients tokenize. schedule_output_path: where ScheduleRecorder writes the routing
        decisions. policy_options: keyword arguments of the policy. Raises ConfigError for a wrong
        argument, and for an address that cannot be bound or would be unsafe.
        """
        if data_parallel_size < 1:
            raise ConfigError(f"data_parallel_size={data_parallel_size} must be at least 1")
        self.data_parallel_size = data_parallel_size
        self._max_frame_bytes = max_frame_bytes
        self._parent_pid: int | None = None
        self._stop_reason: str | None = None
        self._is_serving, self._has_ended, self._awake_at = False, False, math.inf
        self._unreached: Outgoing = []
        with contextlib.ExitStack() as undo:
            self._waker = SelfPipe()
            undo.callback(self._waker.close)
            where = (host, inference_coordinator_port, advertise_host)
            self._router = RouterSocket(
                *where, max_frame_bytes=max_frame_bytes, curve=curve, insecure=insecure
            )
            undo.callback(self._router.close)
            policy = prefix_caching_coordinator_policy
            self._recorder = _recorder(schedule_output_path, policy, data_parallel_size)
            self._core = CoordinatorCore(
                make_policy(policy, **(policy_options or {})),
                coordinator_id=uuid.uuid4().bytes,
                data_parallel_size=data_parallel_size,
                limits=limits,
                block_size_tokens=_routed_block_size(block_size_tokens, enable_prefix_caching),
                deterministic_mode=deterministic_mode,
                recorder=self._recorder,
                refused=lambda: asdict(self.refusals),
            )
            if pipe_connection is not None:
                pipe_connection.send(self.address)
            undo.pop_all()

    @property
    def address(self) -> str:
        return self._router.address

    @property
    def state(self) -> CoordinatorState:
        return self._core.state

    @property
    def refusals(self) -> Refusals:
        """Number of connections that were refused for their keys, by reason."""
        return self._router.refusals

    @property
    def counters(self) -> Counters:
        return self._core.counters

    @classmethod
    def entrypoint(
        cls,
        pipe_connection: Connection,
        ready_event: Event,
        data_parallel_size: int,
        tokenizer: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run a coordinator in this process, with the arguments of the constructor.

        Sets `ready_event` once it listens. SIGTERM ends it. It ignores Ctrl-C, which its parent
        handles.
        """
        parent_pid = os.getppid()
        coordinator = cls(pipe_connection, data_parallel_size, tokenizer, *args, **kwargs)
        coordinator._parent_pid = parent_pid
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: coordinator.stop("the coordinator got SIGTERM"))
        ready_event.set()
        coordinator.start()

    def start(self) -> None:
        """Serve until `stop`, a Shutdown or the end of the parent; then disconnect all peers and
        release everything. A second call does nothing. Raises what made the coordinator fail."""
        if self._has_ended:
            return
        self._is_serving, self._awake_at = True, time.monotonic()
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._waker.descriptor, zmq.POLLIN)
        parent = multiprocessing.parent_process()
        sentinel = None if parent is None else parent.sentinel  # readable once the parent has ended
        if sentinel is not None:
            poller.register(sentinel, zmq.POLLIN)
        try:
            while self._stop_reason is None and not self._core.is_over:
                ready = self._wait(poller)
                if sentinel in ready or self._is_orphaned():
                    self.stop("the coordinator's parent has ended")
                if self._waker.descriptor in ready:
                    self._waker.drain()
                self._run_once()
        except Exception:
            logger.exception("the coordinator failed")
            raise
        finally:
            self._end(self._stop_reason or "the coordinator was shut down")

    def stop(self, reason: str = "the coordinator was stopped") -> None:
        """Make `start` return soon, or release everything if it never ran. Any thread and any
        signal handler may call it. A second call does nothing."""
        self._stop_reason = self._stop_reason or reason
        if self._is_serving:
            self._waker.wake()
        else:
            self._end(reason)

    # ---- the loop

    def _wait(self, poller: zmq.Poller) -> dict[Any, int]:
        """Wait until a descriptor is ready or a timer is due. Returns what is ready."""
        deadline = self._core.next_deadline()
        wait_s = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        if self._parent_pid is not None:
            wait_s = min(wait_s, _PARENT_CHECK_S)
        timeout_ms = None if math.isinf(wait_s) else math.ceil(wait_s * 1000)
        ready: dict[Any, int] = dict(poller.poll(timeout_ms))
        self._now(wait_s)
        return ready

    def _now(self, planned_s: float = 0.0) -> float:
        """Return the monotonic time in seconds. Extends all leases if this process was stopped
        since the last call. `planned_s`: seconds since then that it meant to wait."""
        now = time.monotonic()
        asleep_s, self._awake_at = now - self._awake_at, now
        if asleep_s - planned_s > _STANDSTILL_S:
            logger.warning("the coordinator was stopped within the last %.1f s", asleep_s)
            self._core.extend_leases(asleep_s)
        return now

    def _is_orphaned(self) -> bool:
        return self._parent_pid is not None and os.getppid() != self._parent_pid

    def _run_once(self) -> None:
        """Handle the frames that have arrived and the timers that are due. Send the results."""
        self._router.flush()
        self._receive()
        self._send(self._core.tick(self._now()))
        while self._unreached:
            # A peer that cannot be reached may have disconnected, which has arrived by now.
            unreached, self._unreached = self._unreached, []
            self._receive()
            now = self._now()
            for identity, message in unreached:
                self._send(self._core.undelivered(identity, message, None, now))

    def _receive(self) -> None:
        """Handle frames that have arrived, and send the answers."""
        outgoing: Outgoing = []
        for identity, frame in self._router.receive(_BATCH):
            # A new time for each frame: a lease at its sender began no later than now.
            outgoing += self._core.handle(identity, frame, self._now())
            if len(outgoing) >= _SENT_TOGETHER:
                self._send(outgoing)
                outgoing = []
        self._send(outgoing)

    def _send(self, outgoing: Outgoing) -> None:
        """Send each peer its messages, small ones together. A message to several peers is encoded
        once. Messages that no frame can carry go back to the core at once, which may return others
        instead. Messages whose peer cannot be reached are kept for the end of `_run_once`."""
        while outgoing:
            encoded: dict[int, bytes | ProtocolError] = {}  # by the message's identity
            by_peer: dict[bytes, list[Message]] = {}
            for identity, message in outgoing:
                by_peer.setdefault(identity, []).append(message)
            outgoing = []
            for identity, messages in by_peer.items():
                for message, fault in self._send_to(identity, messages, encoded):
                    if self._has_ended:  # a peer that has left needs no Disconnect
                        continue
                    if fault is None:
                        self._unreached.append((identity, message))
                    else:
                        now = time.monotonic()
                        outgoing += self._core.undelivered(identity, message, fault, now)

    def _send_to(
        self,
        identity: bytes,
        messages: Sequence[Message],
        encoded: dict[int, bytes | ProtocolError],
    ) -> list[tuple[Message, ProtocolError | None]]:
        """Send one peer its messages. Returns the messages that could not be sent, each with the
        fault if no frame can carry it, and with None if the peer cannot be reached. `encoded`: the
        frames or faults of messages by id(message); new ones are added."""
        failed: list[tuple[Message, ProtocolError | None]] = []
        sendable, frames = [], []
        for message in messages:
            frame = encoded.get(id(message))
            if frame is None:
                try:
                    frame = encode(message, self._max_frame_bytes)
                except ProtocolError as fault:
                    frame = fault
                encoded[id(message)] = frame
            if isinstance(frame, ProtocolError):
                failed.append((message, frame))
            else:
                frames.append(frame)
                sendable.append(message)
        num_sent = 0
        for frame, num_messages in batched(frames, self._max_frame_bytes):
            if not self._router.send(identity, frame, num_messages, keeps=self._core.is_engine):
                return [*failed, *((message, None) for message in sendable[num_sent:])]
            num_sent += num_messages
        return failed

    # ---- the end

    def _end(self, reason: str) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._send(self._core.close(reason))
        self._router.close()
        if self._recorder is not None:
            self._recorder.close()
        self._waker.close()
        logger.info("%s%s%s", reason, _counted(self._core.counters), _counted(self.refusals))


def _routed_block_size(block_size_tokens: int | None, enable_prefix_caching: bool) -> int | None:
    """Return the block size to route by, or None to ignore prefixes. Raises ConfigError if prefix
    caching is enabled without a block size."""
    if not enable_prefix_caching:
        return None
    if block_size_tokens is None or block_size_tokens < 1:
        raise ConfigError(
            f"enable_prefix_caching=True needs block_size_tokens of at least 1, not "
            f"{block_size_tokens}"
        )
    return block_size_tokens


def _recorder(
    path: str | None, policy: PolicySource, data_parallel_size: int
) -> ScheduleRecorder | None:
    """Return the recorder of routing decisions, or None without a path. Raises ConfigError if the
    file cannot be written."""
    if path is None:
        return None
    name = getattr(policy, "value", policy)
    if not isinstance(name, str):
        name = f"{policy.__module__}:{getattr(policy, '__qualname__', policy)}"
    return ScheduleRecorder(path, name, data_parallel_size)


def _counted(counters: Counters | Refusals) -> str:
    """Return the counters that are not 0 as text that continues a line; "" if all are 0."""
    shown = ", ".join(f"{name}={count}" for name, count in asdict(counters).items() if count)
    return f"; {type(counters).__name__.lower()}: {shown}" if shown else ""
