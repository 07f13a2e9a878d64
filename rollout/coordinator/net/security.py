"""Access to a fleet: CURVE keys and their files, and private socket addresses.

Used by the other modules of `rollout.coordinator.net`. Keys are also used by
`rollout.coordinator.coordinator`, `rollout.coordinator.client.inference_client`, `rollout.apis`,
`rollout.cli.top` and users. It creates key files, and creates and removes the directory of a
private address. docs/security.md says when a fleet needs keys.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
from zmq.utils import z85

from rollout.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIX = "rollout-"
_SOCKET = "socket"
_KEY_LINE = re.compile(r'^\s*(public|secret)-key\s*=\s*"([^"]*)"', re.MULTILINE)
# The events by which a socket's monitor reports a failed handshake.
KEY_IS_UNKNOWN = zmq.EVENT_HANDSHAKE_FAILED_AUTH
HANDSHAKE_FAULTS = (
    KEY_IS_UNKNOWN | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


# ---- CURVE keys, all in Z85


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveServerKeys:
    """A coordinator's key pair, and the public keys of all peers that may connect. Keys are in Z85.

    clients: public keys of clients and engines. An AsyncLLM adds the key of its client and engines.
    allow_list: folder of *.key files with more public keys, or None. It is read for each new
        connection. Removing a file does not end established connections."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes] = frozenset()
    allow_list: Path | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError unless all keys are 40 bytes of Z85."""
        object.__setattr__(self, "clients", frozenset(self.clients))
        for key in (self.public, self.secret, *self.clients):
            _require_key(key)

    @classmethod
    def made(cls) -> CurveServerKeys:
        """Return a new key pair of a coordinator that accepts no peer yet."""
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret, clients=frozenset())

    def with_client(self) -> tuple[CurveServerKeys, CurveKeys]:
        """Create keys for one more peer. Returns the coordinator's keys, which accept that peer,
        and the peer's keys."""
        public, secret = zmq.curve_keypair()
        own = CurveKeys(server_public=self.public, public=public, secret=secret)
        return replace(self, clients=self.clients | {public}), own


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """A client's or engine's key pair, and the coordinator's public key. Keys are in Z85."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raise ConfigError unless all keys are 40 bytes of Z85."""
        for key in (self.server_public, self.public, self.secret):
            _require_key(key)


def _require_key(key: bytes) -> None:
    try:
        is_key = len(z85.decode(key)) == 32
    except (ValueError, KeyError, TypeError):
        is_key = False
    if not is_key:
        raise ConfigError(
            "a CURVE key must be 40 bytes of Z85, as zmq.curve_keypair() makes them; one of the "
            "given keys is not"
        )


def create_key_files(folder: str | Path, name: str) -> None:
    """Create a key pair in two files of zmq.auth's format. `name.key` holds the public key, and
    `name.key_secret` both keys. Only this user can read `name.key_secret`. Raises ConfigError if a
    file exists or cannot be written."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    text = f'metadata\ncurve\n    public-key = "{public}"\n'
    files = (
        (f"{name}.key", text, 0o644),
        (
            f"{name}.key_secret",
            f'{text}    secret-key = "{secret}"\n',
            0o600,
        ),
    )
    try:
        for file_name, content, mode in files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(Path(folder, file_name), flags, mode), "w") as file:
                file.write(content)
    except OSError as fault:
        raise ConfigError(f"the keys of {name!r} cannot be written: {fault}") from fault


def public_key_in(path: str | Path) -> bytes:
    """Return the public key in a file of `create_key_files` or zmq.auth. Raises ConfigError if the
    key cannot be read."""
    return _keys_in(path, is_secret=False)["public"]


def server_keys_in(
    path: str | Path, clients: Iterable[str | Path], allow_list: Path | None = None
) -> CurveServerKeys:
    """Return the coordinator's keys. `path` is the coordinator's secret file. `clients` are public
    files of peers. Raises ConfigError for an unreadable file, or a secret file that other users can
    read."""
    keys = _keys_in(path, is_secret=True)
    return CurveServerKeys(
        public=keys["public"],
        secret=keys["secret"],
        clients=frozenset(public_key_in(client) for client in clients),
        allow_list=allow_list,
    )


def client_keys_in(path: str | Path, server: str | Path) -> CurveKeys:
    """Return a peer's keys. `path` is the secret file of the client or engine. `server` is the
    coordinator's public file. Raises ConfigError for an unreadable file, or a secret file that
    other users can read."""
    return CurveKeys(server_public=public_key_in(server), **_keys_in(path, is_secret=True))


def _keys_in(path: str | Path, *, is_secret: bool) -> dict[str, bytes]:
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            found = {kind: key.encode() for kind, key in _KEY_LINE.findall(file.read())}
    except (OSError, ValueError) as fault:
        raise ConfigError(f"the key file {str(path)!r} cannot be read: {fault}") from fault
    if is_secret and mode & 0o077:
        raise ConfigError(
            f"other users can read the key file {str(path)!r} (mode {mode & 0o777:04o}): chmod 600 "
            "it, and make new keys if somebody may have read it"
        )
    wanted = ("public", "secret") if is_secret else ("public",)
    for kind in wanted:
        if kind not in found:
            raise ConfigError(f"the key file {str(path)!r} has no {kind}-key")
    return {kind: found[kind] for kind in wanted}


def handshake_fault(event: int) -> str | None:
    """Return why a coordinator refused a handshake, or None if `event` reports no refusal. `event`
    comes from the socket monitor of the connecting peer."""
    if event == KEY_IS_UNKNOWN:
        return "it does not know the key of this peer: add the key to its allow-list"
    if event & HANDSHAKE_FAULTS:
        return "its CURVE keys differ from the ones given here, or one side has none"
    return None


# ---- addresses


def private_address() -> str:
    """Return an ipc:// address in a new directory that only this user can enter. Tries
    XDG_RUNTIME_DIR if it is set, the directory for temporary files, and /tmp. Raises ConfigError if
    none of them can be written to, or all paths are too long for a socket."""
    tried = []
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not parent:
            continue
        try:
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)  # of mode 0700
        except OSError as fault:
            tried.append(str(fault))
            continue
        path = os.path.join(directory, _SOCKET)
        if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN:
            return f"ipc://{path}"
        os.rmdir(directory)
        tried.append(f"{path!r} has more than {zmq.IPC_PATH_MAX_LEN} bytes")
    raise ConfigError(
        f"no directory can hold the fleet's socket: {'; '.join(tried)}. Set TMPDIR to a short path "
        "that can be written to"
    )


def remove_private_address(address: str) -> None:
    """Remove the directory that `private_address` made. Ignores any other address."""
    folder, name = os.path.split(address.removeprefix("ipc://"))
    if name == _SOCKET and os.path.basename(folder).startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def require_safe(host: str, address: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise ConfigError if other machines can reach `address`, unless `has_keys` or `insecure`.
    `address` is an IP address, and `host` its name in the error message. Logs who can connect if
    there are no keys."""
    if has_keys:
        return
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if is_loopback:
        logger.info("any process of this machine can join the coordinator at %s", address)
    elif insecure:
        logger.warning("the coordinator at %s takes commands from anybody who reaches it", address)
    else:
        raise ConfigError(
            f"host={host!r} can be reached by other machines: give keys (curve=, or --keys DIR "
            "in a shell), or insecure=True where the network is trusted"
        )
