"""BroadcastGroup: this server's rank in a trainer's torch.distributed process group.

Used by `rollout.serve.control.weight_transfer`. The control routes of vLLM and SGLang choose the
Packing. Each group starts a child process, which receives tensors into shared memory. The trainer
is rank 0 and hosts the TCPStore. The server is one rank, however many engines it has.
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
_START_S = 60.0  # seconds for the receiver's start, and for an answer after its time limit
# The tensors of one broadcast, without gaps between them.
Chunk = Sequence[TensorMetadata]
# Splits the tensors of a call into broadcasts.
Packing = Callable[[Sequence[TensorMetadata]], Sequence[Chunk]]


class BroadcastGroup:
    """A process group that this server has joined. A child process (`receiver.py`) gets tensors.

    A broadcast that fails or is late closes the group. Then the trainer must make another one.

    packing: how the trainer splits tensors into broadcasts.
    announced: tensors of the latest call, set by WeightTransfer.
    """

    def __init__(self, name: str, receiver: ChildProcess, packing: Packing) -> None:
        self.name, self.packing = name, packing
        self.announced: Sequence[TensorMetadata] = ()
        self._receiver = receiver
        self._lock = asyncio.Lock()
        self._discarding: set[asyncio.Future[None]] = set()

    async def receive(self, chunks: Sequence[Chunk], timeout_s: float) -> list[tuple[str, Tensor]]:
        """Receive the broadcasts of `chunks` and return their (name, tensor) pairs. Raises
        WeightUpdateError if a broadcast takes longer than `timeout_s` seconds or the trainer
        disconnects."""
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
        """Receive and drop the broadcasts of `chunks` in the background, so that the group stays
        usable."""
        sizes = [sum(tensor.num_bytes for tensor in chunk) for chunk in chunks]
        task = asyncio.ensure_future(self._request(None, sizes, timeout_s))
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)
        task.add_done_callback(_log_error)

    def close(self) -> None:
        """End the child process. Calls that wait for a broadcast raise WeightUpdateError. The
        trainer's calls in this group fail."""
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
    """Start a receiver, join the group of a trainer, and return it. Waits for the other ranks.
    `backend` is "gloo" or "nccl". Raises WeightUpdateError if a rank is missing after `timeout_s`
    seconds."""
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
    """End a receiver whose caller was cancelled while it started."""
    if not starting.cancelled() and starting.exception() is None:
        receiver = starting.result()
        receiver.kill()
        receiver.wait()


def single_chunks(tensors: Sequence[TensorMetadata]) -> list[Chunk]:
    return [[tensor] for tensor in tensors]


def one_chunk(tensors: Sequence[TensorMetadata]) -> list[Chunk]:
    """Return all tensors as one chunk, which SGLang calls a flattened bucket."""
    return [tensors]


def packed_chunks(tensors: Sequence[TensorMetadata], buffer_size_bytes: int) -> list[Chunk]:
    """Return the chunks of vLLM's packed broadcasts. A chunk ends with the tensor that makes it
    larger than `buffer_size_bytes`."""
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
    """Return the (name, tensor) pairs in `bytes_N`, which holds the tensors in order. Tensors are
    views of `bytes_N`, but an unaligned tensor is a copy."""
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
    """Return the error of a failed broadcast. `error` is the receiver's encoded error, or {} if the
    receiver has ended."""
    reason = str(decode_error(error)) if error else "its receiver has ended"
    return WeightUpdateError(
        f"the broadcasts in the group {name!r} did not arrive ({reason}); the trainer has to make "
        "another group"
    )


def _log_error(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.warning("%s", error)
