"""Access to a fleet: processes of one user over a private socket, known keys over TCP."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.net.link import Link
from rollout.coordinator.net.security import (
    CurveKeys,
    CurveServerKeys,
    client_keys_in,
    create_key_files,
    handshake_fault,
    private_address,
    public_key_in,
    remove_private_address,
    server_keys_in,
)
from rollout.coordinator.net.sockets import DealerSocket, RouterSocket, SelfPipe
from rollout.errors import ConfigError, CoordinatorLostError
from tests.coordinator.test_link import registration, status

MAX_FRAME_BYTES = 2**20
WAIT_S = 30.0
NOBODY = 65534  # the user and group of that name


@contextmanager
def router(host: str | None, port: int | None = None, **options: Any) -> Iterator[RouterSocket]:
    made = RouterSocket(host, port, max_frame_bytes=MAX_FRAME_BYTES, **options)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def peer(address: str, keys: CurveKeys | None = None) -> Iterator[DealerSocket]:
    """A dealer that has sent `hello`."""
    context, waker = zmq.Context(), SelfPipe()
    dealer = DealerSocket(context, address, waker, max_frame_bytes=MAX_FRAME_BYTES, curve=keys)
    try:
        dealer.send(b"hello")
        yield dealer
    finally:
        dealer.close()
        context.term()
        waker.close()


def received_by(made: RouterSocket) -> list[bytes]:
    """Return the first message."""
    assert made.socket.poll(WAIT_S * 1000)
    return [frame for _, frame in made.receive(9)]


def fault_of(dealer: DealerSocket) -> str | None:
    """Why the handshake failed, as the dealer learns it."""
    dealer.wait(int(WAIT_S * 1000), for_messages=False)
    return handshake_fault(next(iter(dealer.events())))


def server_keys() -> CurveServerKeys:
    public, secret = zmq.curve_keypair()
    return CurveServerKeys(public=public, secret=secret, clients=frozenset())


# ---- the private socket


def test_a_router_without_a_host_can_be_reached_by_its_user_alone() -> None:
    with router(None) as made:
        path = Path(made.address.removeprefix("ipc://"))
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.parent.stat().st_uid == os.geteuid()
        with peer(made.address):
            assert received_by(made) == [b"hello"]
    assert not path.parent.exists()
    made.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_connect() -> None:
    program = (
        "import os, socket, sys\n"
        "os.setgroups([])\n"
        "os.setgid(int(sys.argv[2]))\n"
        "os.setuid(int(sys.argv[2]))\n"
        "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError: print('refused')"
    )
    with router(None) as made:
        path = made.address.removeprefix("ipc://")
        for user, answer in ((os.geteuid(), ""), (NOBODY, "refused")):
            command = [sys.executable, "-c", program, path, str(user)]
            ran = subprocess.run(command, text=True, capture_output=True)
            assert (ran.stdout.strip(), ran.stderr) == (answer, "")


def test_the_private_socket_lies_where_the_user_keeps_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, temporary = tmp_path / "r", tmp_path / "t"
    for folder in (runtime, temporary):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    address = private_address()
    assert address.startswith(f"ipc://{runtime}/rollout-")
    remove_private_address(address)
    remove_private_address(address)
    assert os.listdir(runtime) == []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    address = private_address()
    assert address.startswith(f"ipc://{temporary}/")
    remove_private_address(address)
    assert os.listdir(temporary) == []


def test_a_path_that_is_too_long_for_a_socket_is_passed_over_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    remove_private_address(private_address())
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix, dir: os.fspath(deep))
    monkeypatch.setattr(os, "rmdir", lambda path: None)
    with pytest.raises(ConfigError, match=r"more than 107 bytes.*TMPDIR"):
        private_address()


def test_nothing_but_a_private_sockets_directory_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for address in ("", "tcp://127.0.0.1:1", f"ipc://{kept}/socket", f"ipc://{tmp_path}/rollout-x"):
        remove_private_address(address)
    assert kept.is_dir()


# ---- keys


def test_a_known_key_is_let_in_and_a_foreign_one_is_counted_and_learns_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys, known = server_keys().with_client()
    _, foreign = keys.with_client()
    with router("127.0.0.1", curve=keys) as made:
        with peer(made.address, foreign) as unknown:
            fault = fault_of(unknown)
            assert fault is not None
            assert "allow-list" in fault
            with peer(made.address, known):
                assert received_by(made) == [b"hello"], "and nothing of the unknown peer"
        assert made.refusals.num_unknown_keys == 1
        with peer(made.address, foreign) as unknown:
            fault_of(unknown)
        assert made.refusals.num_unknown_keys == 2
    (line,) = [r.getMessage() for r in caplog.records if "refused a peer" in r.getMessage()]
    assert foreign.public.decode() in line, "whoever should come in can be let in by this line"


def test_a_peer_of_another_coordinator_or_without_keys_learns_so() -> None:
    keys, known = server_keys().with_client()
    other = dataclasses.replace(known, server_public=server_keys().public)
    with router("127.0.0.1", curve=keys) as made, router("127.0.0.1") as plain:
        for address, own in ((made.address, other), (made.address, None), (plain.address, known)):
            with peer(address, own) as unknown:
                fault = fault_of(unknown)
            assert fault is not None
            assert "differ from the ones given here" in fault
        assert not made.socket.poll(0)


def test_a_client_and_an_engine_with_foreign_keys_learn_why() -> None:
    keys, _ = server_keys().with_client()
    _, foreign = keys.with_client()
    with router("127.0.0.1", curve=keys) as made:

        async def connect() -> None:
            async with InferenceClient(made.address, curve=foreign):
                pass

        with pytest.raises(ConfigError, match="does not know the key"):
            asyncio.run(connect())
        link = Link(made.address, handshake=registration, status=status, curve=foreign)
        with link, pytest.raises(ConfigError, match="does not know the key"):
            link.wait_registered(WAIT_S)
        assert not made.socket.poll(0)


def test_an_engine_without_keys_learns_why_in_the_end() -> None:
    with router("127.0.0.1", curve=server_keys()) as made:
        link = Link(made.address, handshake=registration, status=status)
        with link:
            reason = ""
            end = time.monotonic() + WAIT_S
            while "keys" not in reason and time.monotonic() < end:
                with pytest.raises(CoordinatorLostError) as lost:
                    link.wait_registered(0.01)
                reason = str(lost.value)
            assert "is this its address? If it is: its CURVE keys differ from" in reason


def test_keys_work_on_a_private_socket_too() -> None:
    keys, known = server_keys().with_client()
    with router(None, curve=keys) as made, peer(made.address, known):
        assert received_by(made) == [b"hello"]


def test_secret_keys_are_not_in_repr() -> None:
    keys, own = server_keys().with_client()
    assert keys.secret.decode() not in repr(keys)
    assert own.secret.decode() not in repr(own)


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 41, "e" * 39, b"\xff" * 40, None])
def test_a_malformed_curve_key_is_refused(key: Any) -> None:
    public, secret = zmq.curve_keypair()
    with pytest.raises(ConfigError, match="Z85"):
        CurveServerKeys(public=public, secret=secret, clients=frozenset({key}))
    with pytest.raises(ConfigError, match="Z85"):
        CurveKeys(server_public=public, public=public, secret=key)


def test_key_files_are_made_for_their_owner_and_read_back(tmp_path: Path) -> None:
    create_key_files(tmp_path, "server")
    create_key_files(tmp_path, "engine")
    assert (tmp_path / "server.key_secret").stat().st_mode & 0o777 == 0o600
    server = server_keys_in(tmp_path / "server.key_secret", [tmp_path / "engine.key"])
    engine = client_keys_in(tmp_path / "engine.key_secret", tmp_path / "server.key")
    assert (engine.server_public, server.clients) == (server.public, {engine.public})
    assert zmq.auth.load_certificate(tmp_path / "engine.key_secret") == (
        engine.public,
        engine.secret,
    )
    with router("127.0.0.1", curve=server) as made, peer(made.address, engine):
        assert received_by(made) == [b"hello"]
    with pytest.raises(ConfigError, match="exists"):
        create_key_files(tmp_path, "server")


def test_keys_of_other_zeromq_tools_are_read(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "theirs")
    os.chmod(secret, 0o600)
    assert public_key_in(public) == zmq.auth.load_certificate(public)[0]
    assert server_keys_in(secret, [public]).secret == zmq.auth.load_certificate(secret)[1]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_secret_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    create_key_files(tmp_path, "engine")
    os.chmod(tmp_path / "engine.key_secret", mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}.*chmod 600"):
        client_keys_in(tmp_path / "engine.key_secret", tmp_path / "engine.key")


def test_a_file_without_keys_is_named(tmp_path: Path) -> None:
    create_key_files(tmp_path, "engine")
    secret, public = tmp_path / "engine.key_secret", tmp_path / "engine.key"
    empty = tmp_path / "empty"
    empty.write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match="missing"):
        public_key_in(tmp_path / "missing")
    with pytest.raises(ConfigError, match="empty"):
        public_key_in(empty)
    os.chmod(public, 0o600)
    with pytest.raises(ConfigError, match="no secret-key"):
        client_keys_in(public, public)
    assert client_keys_in(secret, public).server_public == public_key_in(public)


# ---- hosts


def known_names(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    """Names that exist for this test, besides numbers."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: Any, **options: Any) -> list[Any]:
        found = addresses.get(host, [host])
        return [entry for address in found for entry in real(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_host_may_be_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known_names(monkeypatch, here=["::1", "127.0.0.1"], there=["192.0.2.1"])
    with router("here") as made:
        assert made.address.startswith("tcp://127.0.0.1:")
        with peer(made.address):
            assert received_by(made) == [b"hello"]
    with pytest.raises(ConfigError, match=r"'there' can be reached by other machines"):
        RouterSocket("there", None, max_frame_bytes=MAX_FRAME_BYTES)
    with pytest.raises(ConfigError, match="cannot bind"):
        RouterSocket("there", None, max_frame_bytes=MAX_FRAME_BYTES, insecure=True)


@pytest.mark.parametrize("host", ["no such name", "", "a" * 300, "é" * 70, "tcp://127.0.0.1"])
def test_an_unknown_host_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="neither an IP address nor a known host name"):
        RouterSocket(host, None, max_frame_bytes=MAX_FRAME_BYTES)


def test_others_learn_the_advertised_host() -> None:
    keys, known = server_keys().with_client()
    with router("0.0.0.0", advertise_host="node7.example", curve=keys) as made:
        assert made.address.startswith("tcp://node7.example:")
        port = made.address.rpartition(":")[2]
        with peer(f"tcp://127.0.0.1:{port}", known):
            assert received_by(made) == [b"hello"]
    with router("0.0.0.0", insecure=True) as made, peer(made.address):
        assert received_by(made) == [b"hello"], "all interfaces are dialled at one of them"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_peers_connect_to_an_ipv6_host(host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with router(host, insecure=True) as made, peer(made.address):
        assert made.address.startswith("tcp://[::1]:")
        assert received_by(made) == [b"hello"]


@pytest.mark.parametrize("options", [{"port": 5555}, {"advertise_host": "node7.example"}])
def test_a_private_socket_has_no_port_and_no_other_host(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="need a host"), router(None, **options):
        pass


def refuse_to_bind(*_: Any) -> None:
    raise zmq.ZMQError(zmq.EADDRINUSE)


def test_a_refused_router_leaves_no_thread_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    keys = server_keys()
    with pytest.raises(ConfigError), router("192.0.2.1", curve=keys):
        pass
    with pytest.raises(ConfigError), router(None, port=1, curve=keys):
        pass
    monkeypatch.setattr(zmq.Socket, "bind", refuse_to_bind)
    with pytest.raises(ConfigError, match="cannot bind ipc://"), router(None):
        pass
    assert os.listdir(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "key gate"]
