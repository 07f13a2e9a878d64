"""KeyGate: accepts connections of peers with a known CURVE key, and counts refused connections.

Used by `rollout.coordinator.net.sockets` if the coordinator has keys.
`rollout.coordinator.coordinator` reads the Refusals. It sets options of the ROUTER socket and runs
a thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from rollout.coordinator.net.security import HANDSHAKE_FAULTS, CurveServerKeys, public_key_in
from rollout.errors import ConfigError

logger = logging.getLogger(__name__)

_ZAP_ADDRESS, _ZAP_DOMAIN = "inproc://zeromq.zap.01", b"rollout"
_MAX_LOGGED_KEYS = 64
# libzmq stops reading a connection on which a frame was repeated or altered. A notified monitor
# overwrites the errno, and the connection stays open. Unanswered pings then end the connection, and
# the peer connects again, at the latest when its lease has ended.
PING_INTERVAL_MS, PING_TIMEOUT_MS = 10_000, 30_000


@dataclass(slots=True)
class Refusals:
    """How many connections were refused, by reason.

    num_unknown_keys: the coordinator does not know the peer's key.
    num_without_keys: the peer does not use CURVE, or left before the handshake.
    num_wrong_server_keys: the peer has the public key of another coordinator, or its first frames
        were altered.
    num_replayed_frames: a frame arrived twice. The connection is not read any more.
    num_malformed: the bytes are no handshake, or the handshake of an earlier connection."""

    num_unknown_keys: int = 0
    num_without_keys: int = 0
    num_wrong_server_keys: int = 0
    num_replayed_frames: int = 0
    num_malformed: int = 0


# The counter and the description of each fault that a monitor reports.
_NO_KEY = "num_without_keys", "it has no key, or disconnected before the handshake"
_FAULTS: Mapping[int, tuple[str, str]] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: _NO_KEY,
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: (
        "num_wrong_server_keys",
        "it has the public key of another coordinator",
    ),
    zmq.PROTOCOL_ERROR_ZMTP_INVALID_SEQUENCE: (
        "num_replayed_frames",
        "a frame came a second time: somebody on the network replays frames",
    ),
}
_MALFORMED = "num_malformed", "it sent no handshake, or one of an earlier connection"


class KeyGate:
    """Authenticates each connection to one ROUTER socket, in a thread that ends with the ZeroMQ
    context.

    libzmq asks the gate about each connection (ZAP, rfc.zeromq.org/spec/27) before it receives a
    frame. The socket's monitor reports repeated frames, and handshakes that fail earlier. The first
    64 unknown keys are logged once each, and so is each kind of other fault."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        keys: CurveServerKeys,
    ) -> None:
        """Set the CURVE options of `socket`, which must not be bound yet, and start the thread."""
        self.refusals = Refusals()
        self._is_known = _allow_list(keys)
        self._logged: set[bytes | str] = set()
        self._asked = context.socket(zmq.REP)
        self._asked.bind(_ZAP_ADDRESS)
        self._watch = context.socket(zmq.PAIR)
        address = f"inproc://key-gate-{id(self)}"
        socket.monitor(address, HANDSHAKE_FAULTS)
        self._watch.connect(address)
        _serve_curve(socket, keys)
        threading.Thread(target=self._run, name="key gate", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._watch, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._asked in ready:
                    self._answer(self._asked.recv_multipart())
                if self._watch in ready:
                    message = recv_monitor_message(self._watch)
                    self._count(message["event"], message["value"])
        except zmq.ContextTerminated:
            self._asked.close(linger=0)
            self._watch.close(linger=0)

    def _answer(self, question: list[bytes]) -> None:
        """Answer libzmq's ZAP request `question`, which asks whether to accept a connection."""
        version, request_id, _, address, _, _, *keys = question
        is_known = len(keys) == 1 and self._is_known(keys[0])
        if not is_known:
            self._refuse(address.decode(), b"".join(keys))
        status = [b"200", b""] if is_known else [b"400", b"unknown key"]
        self._asked.send_multipart([version, request_id, *status, b"", b""])

    def _refuse(self, address: str, key: bytes) -> None:
        self.refusals.num_unknown_keys += 1
        shown = z85.encode(key).decode() if len(key) == 32 else "none"
        if len(self._logged) < _MAX_LOGGED_KEYS:
            self._log_once(key, f"refused a peer at {address}, whose key {shown} is unknown")

    def _count(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return  # `_answer` has counted it
        counter, fault = _FAULTS.get(value, _MALFORMED)
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # it disconnected on seeing CURVE
            counter, fault = _NO_KEY
        setattr(self.refusals, counter, getattr(self.refusals, counter) + 1)
        self._log_once(counter, f"refused a peer: {fault}; further ones are only counted")

    def _log_once(self, what: bytes | str, line: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("%s", line)


def _serve_curve(socket: zmq.Socket[bytes], keys: CurveServerKeys) -> None:
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    # Refuse connections if the gate's thread cannot answer.
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)


def _allow_list(keys: CurveServerKeys) -> Callable[[bytes], bool]:
    """Return a function that tells whether a key of 32 bytes is allowed. The function reads the
    allow-list's folder for each key that is not in `keys.clients`."""
    known = {z85.decode(key) for key in keys.clients}
    folder = keys.allow_list

    def is_known(key: bytes) -> bool:
        return key in known or (folder is not None and _is_in(folder, z85.encode(key)))

    return is_known


def _is_in(folder: Path, key: bytes) -> bool:
    for path in folder.glob("*.key"):
        try:
            if public_key_in(path) == key:
                return True
        except ConfigError as fault:  # one bad file must not keep the other peers out
            logger.warning("a file of the allow-list is ignored: %s", fault)
    return False
