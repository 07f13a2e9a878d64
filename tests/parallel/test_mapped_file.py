"""MappedFile: what a push does where there is little room for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from rollout.parallel.mapped_file import MappedFile

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def test_all_the_room_that_there_is_can_be_used(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, allocate = 5 * MIB, os.posix_fallocate

    def allocate_in_little_room(descriptor: int, start: int, num_bytes: int) -> None:
        if start + num_bytes > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate_in_little_room)
    file = MappedFile(descriptor, 100 * MIB)
    for start in range(0, room, MIB):
        file.room(start, MIB).fill_(1)
    with pytest.raises(OSError, match="No space left"):
        file.room(room, 1)
    file.cut(room)
    assert os.read(descriptor, room + 1) == bytes([1]) * room


def test_no_byte_of_a_file_is_without_memory_also_if_it_was_not_written(descriptor: int) -> None:
    MappedFile(descriptor, MIB).cut(10)
    status = os.fstat(descriptor)
    assert (status.st_size, status.st_blocks > 0) == (10, True)


CHILD = """
    import os, resource
    from rollout.parallel.mapped_file import MappedFile

    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    file = MappedFile(os.memfd_create("test"), {capacity})
    file.room(0, {limit}).fill_(1)
    try:
        file.room(0, {limit} + 1)
    except OSError as error:
        print(error)
"""


def test_a_limit_on_the_size_of_files_is_kept_and_refuses_nothing_below_it() -> None:
    source = textwrap.dedent(CHILD).format(limit=4 * MIB, capacity=100 * MIB)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.stdout == f"{4 * MIB + 1} bytes are more than the file's capacity of {4 * MIB}\n", (
        run
    )
