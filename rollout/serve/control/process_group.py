"""BroadcastGroup: this server's place in a trainer's torch.distributed group.

The trainer is rank 0. It owns the TCPStore and broadcasts tensors, which come here as bytes. All
engines of the server get them through one copy in shared memory, so the server is one rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.serve.control.announcement import TensorMetadata
from rollout.serve.control.call_thread import CallThread

_logger = logging.getLogger(__name__)
# Tensors that travel as one broadcast, one after the other without gaps.
Chunk = Sequence[TensorMetadata]
# How the tensors of a call are split into broadcasts.
Packing = Callable[[Sequence[TensorMetadata]], Sequence[Chunk]]


class BroadcastGroup:
    """A gloo group that was joined. One thread makes all its calls, in order.

    packing: how the trainer splits tensors into broadcasts. announced: what it announced last.
    is_broken: a broadcast failed or took too long, so that the ranks are no longer in step. The
    trainer has to make another group.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroupGloo, thread: CallThread, packing: Packing
    ) -> None:
        self.name, self.packing = name, packing
        self._group, self._thread = group, thread
        self.announced: Sequence[TensorMetadata] = ()
        self.is_broken = False

    async def receive(self, chunks: Sequence[Chunk], timeout_s: float) -> list[tuple[str, Tensor]]:
        """Return the tensors of broadcasts that the trainer makes now. Other coroutines go on.

        Raises WeightUpdateError if they do not come within `timeout_s` seconds, or if the trainer
        is gone.
        """
        deadline = time.monotonic() + timeout_s
        return await self._thread.call(
            lambda: [pair for chunk in chunks for pair in self._receive(chunk, deadline)]
        )

    def discard(self, chunks: Sequence[Chunk], timeout_s: float) -> None:
        """Take broadcasts that were announced and are not wanted, so that later ones are in step.
        Returns at once.
        """

        def take() -> None:
            deadline = time.monotonic() + timeout_s
            for chunk in chunks:
                self._receive(chunk, deadline)

        self._thread.submit(take).add_done_callback(_log_error)

    def close(self) -> None:
        """Leave the group after the broadcasts that are awaited. The trainer's calls fail then."""
        self._thread.close()

    def _receive(self, chunk: Chunk, deadline: float) -> list[tuple[str, Tensor]]:
        if self.is_broken:
            raise WeightUpdateError(
                f"an earlier broadcast in the group {self.name!r} failed; make another group"
            )
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            bytes_N = torch.empty(sum(tensor.num_bytes for tensor in chunk), dtype=torch.uint8)
            self._group.broadcast([bytes_N], options).wait()
        except RuntimeError as error:
            self.is_broken = True
            raise WeightUpdateError(
                f"the trainer's broadcast of {chunk[0].name!r} did not arrive: {error}"
            ) from error
        return list(_split(bytes_N, chunk))


async def join_group(
    *,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    packing: Packing,
    timeout_s: float,
) -> BroadcastGroup:
    """Join a gloo group, once all its other ranks do. Raises WeightUpdateError if they do not in
    time.
    """
    thread, timeout = CallThread(f"weights of {name}"), timedelta(seconds=timeout_s)

    def connect() -> dist.ProcessGroupGloo:
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
        # The keys at which torch and SGLang's init_custom_process_group look for this group.
        places = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", places), rank, world_size, timeout)

    try:
        return BroadcastGroup(name, await thread.call(connect), thread, packing)
    except BaseException as error:
        thread.close()
        if not isinstance(error, RuntimeError):  # c10d's DistError is one
            raise
        raise WeightUpdateError(
            f"joining the group {name!r} at {host}:{port} as rank {rank} of {world_size} failed: "
            f"{error}"
        ) from error


def single_chunks(tensors: Sequence[TensorMetadata]) -> list[Chunk]:
    """Return the chunks of tensors that are broadcast one by one."""
    return [[tensor] for tensor in tensors]


def packed_chunks(tensors: Sequence[TensorMetadata], buffer_size_bytes: int) -> list[Chunk]:
    """Return the chunks of vLLM's packed broadcasts: each ends with the tensor that makes it larger
    than the buffer.
    """
    chunks: list[list[TensorMetadata]] = []
    num_bytes = buffer_size_bytes + 1
    for tensor in tensors:
        if num_bytes > buffer_size_bytes:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return list(chunks)


def _split(bytes_N: Tensor, chunk: Chunk) -> list[tuple[str, Tensor]]:
    """Return the tensors whose bytes these are, as views of them where the dtype allows it."""
    pairs, start = [], 0
    for tensor in chunk:
        end = start + tensor.num_bytes
        part_N = bytes_N[start:end]
        if start % tensor.dtype.itemsize:
            part_N = part_N.clone()
        pairs.append((tensor.name, part_N.view(tensor.dtype).view(tensor.shape)))
        start = end
    return pairs


def _log_error(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        _logger.warning("%s", error)
