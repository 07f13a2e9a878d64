"""Hosts of a network as Linux network namespaces, each with a cable to a switch.

Packets on a cut cable vanish without a report to either end, as in a failing network. Needs root or
user namespaces; `network_of` skips the test if neither is permitted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.processes import PROCESSES

WAIT_S = 300.0
_SWITCH, _CARD = "switch", "card"
_TOOLS = ("unshare", "nsenter", "ip")
_IS_ROOT = os.geteuid() == 0


class Remote:
    """A process on a host, and a pipe to it."""

    def __init__(self, work: Callable[..., None], namespace: int, arguments: Any) -> None:
        """Run `work(pipe, *arguments)`."""
        self.pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(
            target=_on_host, args=(namespace, work, theirs, arguments), daemon=False
        )
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Return the next message of the process. Raises AssertionError with its traceback if it
        failed."""
        assert self.pipe.poll(WAIT_S), "no message"
        message = self.pipe.recv()
        assert not isinstance(message, _Failure), message
        return message

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


class _Failure(str):
    """The traceback of a Remote."""


class Host:
    """A host of the network, with the IP address `address`."""

    def __init__(self, network: Network, number: int, namespace: int) -> None:
        self.address = f"10.83.0.{number}"
        self.namespace = namespace  # the id of a process in it
        self._network, self._cable = network, f"cable{number}"

    def cut(self) -> None:
        """Cut the cable: no packet leaves or arrives."""
        self._network.run("ip", "link", "set", self._cable, "nomaster")

    def mend(self) -> None:
        """Connect the cable again."""
        self._network.run("ip", "link", "set", self._cable, "master", _SWITCH)

    def start(self, work: Callable[..., None], *arguments: Any) -> Remote:
        """Run `work(pipe, *arguments)` here, until the network ends."""
        remote = Remote(work, self.namespace, arguments)
        self._network.things.callback(remote.end)
        return remote

    def connect(self) -> None:
        """Connect the host to the switch."""
        place = ("name", _CARD, "netns", str(self.namespace))
        self._network.run("ip", "link", "add", self._cable, "type", "veth", "peer", *place)
        self._network.run("ip", "link", "set", self._cable, "up")
        self.mend()
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", _CARD),
            ("link", "set", "lo", "up"),
        ):
            _run(*_within(self.namespace), "ip", *words)
        _run(*_within(self.namespace), "ip", "link", "set", _CARD, "up")


class Network:
    """A switch in a namespace of its own. `things` has what ends with the network."""

    def __init__(self, things: ExitStack) -> None:
        self.things = things
        new = (
            ("unshare", "--net") if _IS_ROOT else ("unshare", "--user", "--map-root-user", "--net")
        )
        self._namespace = self._begin(*new)
        self.run("ip", "link", "add", _SWITCH, "type", "bridge")
        self.run("ip", "link", "set", _SWITCH, "up")

    def run(self, *command: str) -> None:
        """Run a command in the switch's namespace."""
        _run(*_within(self._namespace), *command)

    def add_host(self, number: int) -> Host:
        namespace = self._begin(*_within(self._namespace), "unshare", "--net")
        host = Host(self, number, namespace)
        host.connect()
        return host

    def _begin(self, *command: str) -> int:
        """Return a process in the new namespace, which ends with this one."""
        process = subprocess.Popen(
            [*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.things.callback(process.communicate)
        self.things.callback(process.kill)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"\n")
            process.stdin.flush()
        if not process.stdout.readline():  # it answers once it is in its namespace
            raise OSError(process.communicate()[1].decode())
        return process.pid


@contextmanager
def network_of(num_hosts: int) -> Iterator[list[Host]]:
    """Yield the hosts of a network, which ends afterwards with all its processes."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    with ExitStack() as things:
        try:
            network = Network(things)
            hosts = [network.add_host(number + 1) for number in range(num_hosts)]
            assert hosts[0].start(_say_here).receive() == "here"
        except (OSError, AssertionError) as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield hosts


def _say_here(pipe: Connection) -> None:
    pipe.send("here")


def _within(namespace: int) -> tuple[str, ...]:
    user = () if _IS_ROOT else ("--user", "--preserve-credentials")
    return ("nsenter", "--target", str(namespace), *user, "--net")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _on_host(namespace: int, work: Callable[..., None], pipe: Connection, arguments: Any) -> None:
    try:
        _enter(namespace)
        work(pipe, *arguments)
    except BaseException:
        pipe.send(_Failure(traceback.format_exc()))
        raise


def _enter(namespace: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    for kind in ("net",) if _IS_ROOT else ("user", "net"):
        descriptor = os.open(f"/proc/{namespace}/ns/{kind}", os.O_RDONLY)
        if library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns to the {kind} namespace")
        os.close(descriptor)
