"""The coordinator process: receives frames from clients and engines, and sends the answers.

Used by `rollout.coordinator.__main__` (the child of an AsyncLLM), `rollout.cli.coordinator`,
`benchmarks.coordinator_fleet` and users. It owns the ROUTER socket, and writes the file
`schedule_output_path` if one is given.
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
    """The method of multiprocessing.Event and threading.Event that `entrypoint` calls."""

    def set(self) -> None: ...


class DataParallelInferenceCoordinator:
    """Passes requests and commands from clients to engines, and replies back. It serves from
    `start` until `stop`, a Shutdown command, or the end of its parent process."""

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
        """Bind the socket, and send its address through `pipe_connection` if one is given.

        Engines and clients may connect from now on.

        data_parallel_size: expected number of engines.
        tokenizer: not used, since clients tokenize.
        deterministic_mode: no engine gets work before all have registered, and ranks follow the
            order of the engines' ids.
        block_size_tokens: tokens per block of a prompt's prefix, for `enable_prefix_caching`.
        schedule_output_path: file to which ScheduleRecorder writes the routing decisions.
        policy_options: keyword arguments of the routing policy.
        host: host name or IP address; "0.0.0.0" for all interfaces; None for a Unix socket in a
            directory that only this user can enter.
        advertise_host: host to which peers connect, if it differs from `host`.
        curve: the coordinator's CURVE keys.
        insecure: allow a host that other machines can reach without `curve`.
        max_frame_bytes: longest frame to send or accept.

        Raises ConfigError for a wrong argument, an unsafe address, and an address that cannot be
        bound."""
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
        """Number of refused connections, by reason."""
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
        """Run a coordinator in this process until it ends. The constructor gets the arguments after
        `ready_event`. `ready_event` is set once the coordinator listens. SIGTERM ends the
        coordinator. SIGINT is ignored, because the parent handles Ctrl-C."""
        parent_pid = os.getppid()
        coordinator = cls(pipe_connection, data_parallel_size, tokenizer, *args, **kwargs)
        coordinator._parent_pid = parent_pid
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: coordinator.stop("the coordinator got SIGTERM"))
        ready_event.set()
        coordinator.start()

    def start(self) -> None:
        """Serve until `stop`, a Shutdown command, or the end of the parent process. Then disconnect
        all peers, close the socket, and write the schedule file if there is one. A second call does
        nothing. Raises the exception that made the coordinator fail."""
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
        """Make `start` return soon. If `start` was never called, close the socket now. Any thread
        and any signal handler may call it. A second call does nothing."""
        self._stop_reason = self._stop_reason or reason
        if self._is_serving:
            self._waker.wake()
        else:
            self._end(reason)

    # ---- the loop

    def _wait(self, poller: zmq.Poller) -> dict[Any, int]:
        """Wait until a descriptor is ready or a timer is due. Returns the ready descriptors."""
        deadline = self._core.next_deadline()
        wait_s = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        if self._parent_pid is not None:
            wait_s = min(wait_s, _PARENT_CHECK_S)
        timeout_ms = None if math.isinf(wait_s) else math.ceil(wait_s * 1000)
        ready: dict[Any, int] = dict(poller.poll(timeout_ms))
        self._now(wait_s)
        return ready

    def _now(self, planned_s: float = 0.0) -> float:
        """Return the monotonic time in seconds. If this process was stopped since the last call,
        all leases are extended. `planned_s` is how long this process meant to wait since the last
        call."""
        now = time.monotonic()
        asleep_s, self._awake_at = now - self._awake_at, now
        if asleep_s - planned_s > _STANDSTILL_S:
            logger.warning("the coordinator was stopped within the last %.1f s", asleep_s)
            self._core.extend_leases(asleep_s)
        return now

    def _is_orphaned(self) -> bool:
        return self._parent_pid is not None and os.getppid() != self._parent_pid

    def _run_once(self) -> None:
        """Handle arrived frames and due timers, and send the resulting messages."""
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
        outgoing: Outgoing = []
        for identity, frame in self._router.receive(_BATCH):
            # A new time for each frame: a lease at its sender began no later than now.
            outgoing += self._core.handle(identity, frame, self._now())
            if len(outgoing) >= _SENT_TOGETHER:
                self._send(outgoing)
                outgoing = []
        self._send(outgoing)

    def _send(self, outgoing: Outgoing) -> None:
        """Send each peer its messages, several small messages in one frame. A message that no frame
        can carry goes back to the core, and the core's answer is sent instead. Messages for an
        unreachable peer are kept until the end of `_run_once`."""
        while outgoing:
            encoded: dict[int, bytes | ProtocolError] = {}  # by id(message)
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
        """Send one peer its messages, and return the messages that could not be sent. A message
        that no frame can carry is returned with its fault. A message to an unreachable peer is
        returned with None. `encoded` caches frames and faults by id(message)."""
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
            # Only frames for engines are kept: a client gets missed messages at its next heartbeat.
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
    """Return the block size by which prompts are routed, or None to ignore prefixes. Raises
    ConfigError if prefix caching is enabled without a block size."""
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
    if path is None:
        return None
    name = getattr(policy, "value", policy)
    if not isinstance(name, str):
        name = f"{policy.__module__}:{getattr(policy, '__qualname__', policy)}"
    return ScheduleRecorder(path, name, data_parallel_size)


def _counted(counters: Counters | Refusals) -> str:
    """Return the counters that are not 0 as the end of a log line, or "" if all are 0."""
    shown = ", ".join(f"{name}={count}" for name, count in asdict(counters).items() if count)
    return f"; {type(counters).__name__.lower()}: {shown}" if shown else ""
