"""Descriptors, sockets and shared memory of processes with a mark in their environment, found in
/proc, to test that none is left."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "ROLLOUT_TEST_MARK"
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Census:
    """Processes by id, ports they listen at, memory files that they hold."""

    pids: frozenset[int]
    ports: frozenset[int]
    memory_files: frozenset[str]


def census(mark: str, *more_pids: int) -> Census:
    """Of the processes that were started under `mark`, and of those named."""
    marked = {pid for pid in _all_pids() if f"{MARK}={mark}" in _environment(pid)}
    pids = marked.union(more_pids)
    links = [link for pid in pids for link in _open_files(pid)]
    inode_ports = _listening_ports()
    return Census(
        pids=frozenset(pids),
        ports=frozenset(inode_ports[link] for link in links if link in inode_ports),
        memory_files=frozenset(link for link in links if link.startswith("/memfd:rollout")),
    )


def fleet_pids() -> list[int]:
    """The coordinator that this process has started, then its engines; none that has ended."""
    modules = ("rollout.coordinator", "rollout.apis.engine_process")
    return [pid for module in modules for pid in sorted(_all_pids()) if _is_own_child(pid, module)]


def children_of(parent: int) -> list[int]:
    """The processes that process `parent` has started and that run."""
    return [
        pid
        for pid in sorted(_all_pids())
        if (fields := _text(f"/proc/{pid}/stat").rpartition(")")[2].split())[1:2] == [str(parent)]
        and fields[0] != "Z"
    ]


def _is_own_child(pid: int, module: str) -> bool:
    """Whether this process has started it as `python -m module`."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    is_own = len(fields) > 1 and int(fields[1]) == os.getpid()
    return is_own and module in _text(f"/proc/{pid}/cmdline").split("\0")


def holders(memory_files: frozenset[str]) -> list[int]:
    """All processes that have one of them open."""
    return [pid for pid in _all_pids() if memory_files.intersection(_open_files(pid))]


def wait_until_gone(mark: str, timeout_s: float = 60.0) -> float:
    """Wait until no process has the mark; the seconds it took."""
    start = time.monotonic()
    while (left := census(mark).pids) and time.monotonic() < start + timeout_s:
        time.sleep(0.02)
    names = {pid: _text(f"/proc/{pid}/cmdline").replace("\0", " ") for pid in left}
    assert not left, f"left after {timeout_s:g} s: {names}"
    return time.monotonic() - start


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def unused(names: set[str]) -> set[str]:
    """Those in /dev/shm that no process has mapped: other programs may work there, too.

    By inode: a semaphore is mapped before it gets its name.
    """
    mapped: set[str] = set()
    for pid in _all_pids():
        rows = [line.split() for line in _text(f"/proc/{pid}/maps").splitlines()]
        mapped |= {row[4] for row in rows if row[5:] and row[5].startswith("/dev/shm/")}
    left = set()
    for name in names:
        try:
            inode = os.stat(f"/dev/shm/{name}").st_ino
        except FileNotFoundError:
            continue
        if str(inode) not in mapped:
            left.add(name)
    return left


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[str]:
    return _text(f"/proc/{pid}/environ").split("\0")


def _open_files(pid: int) -> list[str]:
    """Names of files; one that is closed meanwhile, as that of this listing, is passed over.

    Memory files with their inodes: those of other fleets on the machine have the same names.
    """
    folder, links = Path(f"/proc/{pid}/fd"), []
    with suppress(OSError):  # the process has just ended
        for name in os.listdir(folder):
            with suppress(OSError):
                link = os.readlink(folder / name)
                is_memory = link.startswith("/memfd:")
                links.append(f"{link} {os.stat(folder / name).st_ino}" if is_memory else link)
    return links


def _listening_ports() -> dict[str, int]:
    """By the name that the socket has among a process's open files."""
    rows = [line.split() for line in _text("/proc/net/tcp").splitlines()[1:]]
    return {
        f"socket:[{row[9]}]": int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == _LISTENING
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
