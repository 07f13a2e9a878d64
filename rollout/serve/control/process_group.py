"""BroadcastGroup: this server's rank in a trainer's torch.distributed group.

Used by `rollout.serve.control.weight_transfer`, and by the vLLM and SGLang routes for Packing. It
starts a child process for each group. The trainer is rank 0: it owns the TCPStore and broadcasts
tensors, which are received as bytes. All engines of the server read one copy in shared memory, so
the server is one rank.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rollout.child_process import ChildProcess, pickled
from rollout.errors import RolloutError, WeightUpdateError, decode_error
from rollout.serve.control.announcement import TensorMetadata

_logger = logging.getLogger(__name__)
_MODULE = "rollout.serve.control.receiver"
_START_S = 60.0  # seconds for the receiver's start, and for its answer beyond its own time limit
# Tensors that are sent as one broadcast, without gaps between them.
Chunk = Sequence[TensorMetadata]
# Splits the tensors of a call into broadcasts.
Packing = Callable[[Sequence[TensorMetadata]], Sequence[Chunk]]


class BroadcastGroup:
    """A joined group, in which a child process (`receiver.py`) receives broadcasts.

    packing: how the trainer splits tensors into broadcasts. announced: tensors of the latest call,
    set by WeightTransfer. A broadcast that fails or takes too long ends the group, since its ranks
    then no longer make the same calls. The trainer must make another group.
    """

    def __init__(self, name: str, receiver: ChildProcess, packing: Packing) -> None:
        self.name, self.packing = name, packing
        self.announced: Sequence[TensorMetadata] = ()
        self._receiver = receiver
        self._lock = asyncio.Lock()
        self._discarding: set[asyncio.Future[None]] = set()

    async def receive(self, chunks: Sequence[Chunk], timeout_s: float) -> list[tuple[str, Tensor]]:
        """Receive broadcasts that the trainer makes now, and return their tensors.

        Raises WeightUpdateError if they do not arrive within `timeout_s` seconds, or if the trainer
        has disconnected.
        """
        sizes = [sum(tensor.num_bytes for tensor in chunk) for chunk in chunks]
        descriptor = os.memfd_create("rollout-broadcasts", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(1, sum(sizes)))
            await self._request(f"/proc/{os.getpid()}/fd/{descriptor}", sizes, timeout_s)
            bytes_N = torch.frombuffer(mmap.mmap(descriptor, max(1, sum(sizes))), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        return _split(bytes_N, [tensor for chunk in chunks for tensor in chunk])

    def discard(self, chunks: Sequence[Chunk], timeout_s: float) -> None:
        """Receive and drop announced broadcasts, so that the group stays usable. Does not wait."""
        sizes = [sum(tensor.num_bytes for tensor in chunk) for chunk in chunks]
        task = asyncio.ensure_future(self._request(None, sizes, timeout_s))
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)
        task.add_done_callback(_log_error)

    def close(self) -> None:
        """Leave the group. A call that waits for a broadcast raises WeightUpdateError; the
        trainer's calls fail."""
        self._receiver.kill()
        self._receiver.wait()

    async def _request(self, path: str | None, sizes: Sequence[int], timeout_s: float) -> None:
        async with self._lock:
            try:
                # If the receiver has ended, its last answer may still be in the pipe.
                with suppress(OSError):
                    self._receiver.pipe.send((path, sizes, timeout_s))
                answer = asyncio.to_thread(self._receiver.pipe.recv)
                error = await asyncio.wait_for(answer, timeout_s + _START_S)
            except (EOFError, OSError, asyncio.TimeoutError):
                self.close()
                error = {}
            except BaseException:
                self.close()  # the next request would get this request's answer
                raise
        if error is not None:
            raise _broken(self.name, error)


async def join_group(
    *,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    packing: Packing,
    backend: str,
    timeout_s: float,
) -> BroadcastGroup:
    """Start a receiver, join a group of the backend gloo or nccl, and return it. Waits for the
    other ranks. Raises WeightUpdateError if one is missing after `timeout_s` seconds."""
    starting = asyncio.ensure_future(asyncio.to_thread(ChildProcess, _MODULE))
    try:
        receiver = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_end_started)
        raise

    def connect() -> None:
        arguments = (host, port, rank, world_size, name, backend, timeout_s)
        receiver.send(*(pickled(argument, "the group") for argument in arguments))
        receiver.receive(timeout_s + _START_S)

    try:
        await asyncio.to_thread(connect)
    except BaseException as error:
        receiver.kill()
        receiver.wait()
        if not isinstance(error, RolloutError | OSError):
            raise
        raise WeightUpdateError(
            f"joining the group {name!r} at {host}:{port} as rank {rank} of {world_size} failed: "
            f"{error}"
        ) from error
    return BroadcastGroup(name, receiver, packing)


def _end_started(starting: asyncio.Future[ChildProcess]) -> None:
    """End the receiver of a caller that was cancelled while it started."""
    if not starting.cancelled() and starting.exception() is None:
        receiver = starting.result()
        receiver.kill()
        receiver.wait()


def single_chunks(tensors: Sequence[TensorMetadata]) -> list[Chunk]:
    """Return the chunks of tensors that are broadcast one by one."""
    return [[tensor] for tensor in tensors]


def one_chunk(tensors: Sequence[TensorMetadata]) -> list[Chunk]:
    """Return all tensors as one chunk, which SGLang calls a flattened bucket."""
    return [tensors]


def packed_chunks(tensors: Sequence[TensorMetadata], buffer_size_bytes: int) -> list[Chunk]:
    """Return the chunks of vLLM's packed broadcasts. Each ends with the tensor that makes it larger
    than the buffer."""
    chunks: list[list[TensorMetadata]] = []
    num_bytes = buffer_size_bytes + 1
    for tensor in tensors:
        if num_bytes > buffer_size_bytes:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return list(chunks)


def _split(bytes_N: Tensor, tensors: Sequence[TensorMetadata]) -> list[tuple[str, Tensor]]:
    """Return the named tensors in `bytes_N`, one after the other: views if aligned, else copies."""
    pairs, start = [], 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        part_N = bytes_N[start:end]
        if start % tensor.dtype.itemsize:
            part_N = part_N.clone()
        pairs.append((tensor.name, part_N.view(tensor.dtype).view(tensor.shape)))
        start = end
    return pairs


def _broken(name: str, error: dict[str, Any]) -> WeightUpdateError:
    """Return the error of a failed broadcast. error: the receiver's; {} if the receiver ended."""
    reason = str(decode_error(error)) if error else "its receiver has ended"
    return WeightUpdateError(
        f"the broadcasts in the group {name!r} did not arrive ({reason}); the trainer has to make "
        "another group"
    )


def _log_error(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.warning("%s", error)
