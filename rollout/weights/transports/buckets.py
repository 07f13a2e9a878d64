"""Buckets: tensors as rows of equally large pieces of bytes, each announced by a header.

A sender fills its one buffer piece by piece and hands it on when it is full; a receiver puts the
pieces of each buffer into tensors that it makes when their first piece comes. Both sides hash all
headers, each of which has the hash of its bucket's bytes: one number stands for the whole push.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollout.backends.memory.shared_buffer import (
    DEVICE,
    HOST,
    SharedBuffer,
    close_shared_buffer,
    create_shared_buffer,
    open_shared_buffer,
)
from rollout.backends.process_groups import connected_group
from rollout.errors import WeightUpdateError
from rollout.weights.fingerprints import FingerprintOf, fingerprint_on

_ITEM = 8  # bytes that are hashed at once


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, start + num_bytes) of one tensor; the next piece in the bucket follows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class BucketHeader(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Announces a bucket of `num_bytes`, a multiple of 8, whose bytes have this hash."""

    pieces: tuple[Piece, ...]
    num_bytes: int
    hash: int


class PushEnd(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Follows the last bucket. checksum: of all headers. fault: why the push ended early."""

    num_buckets: int
    checksum: str
    fault: str = ""


class BucketWriter:
    """Packs tensors into one buffer; `send` gets each header and the bucket, uint8 [num_bytes]."""

    def __init__(self, buffer_N: Tensor, send: Callable[[bytes, Tensor], None]) -> None:
        """`buffer_N`: uint8, a multiple of 8 bytes."""
        self._buffer_N, self._send = buffer_N, send
        self._fingerprint = fingerprint_on(buffer_N.device)
        self._pieces: list[Piece] = []
        self._digest = hashlib.blake2b(digest_size=8)
        self._end = self._num_buckets = 0

    def write(self, name: str, values: Tensor) -> None:
        """Append a contiguous tensor. Raises what `send` raises."""
        bytes_N = values.reshape(-1).view(torch.uint8)
        dtype, shape = str(values.dtype).removeprefix("torch."), tuple(values.shape)
        start = 0
        while start < values.nbytes or not start:
            size = min(values.nbytes - start, len(self._buffer_N) - self._end)
            self._buffer_N[self._end : self._end + size].copy_(bytes_N[start : start + size])
            self._pieces.append(Piece(name, dtype, shape, start, size))
            self._end, start = self._end + size, start + size
            if self._end == len(self._buffer_N):
                self._flush()
            if not values.nbytes:
                return

    def end(self) -> PushEnd:
        """Send what is left. Returns the end of the push."""
        if self._pieces:
            self._flush()
        return PushEnd(self._num_buckets, self._digest.hexdigest())

    def _flush(self) -> None:
        num_bytes = -(-self._end // _ITEM) * _ITEM
        self._buffer_N[self._end : num_bytes].zero_()
        bucket_N = self._buffer_N[:num_bytes]
        header = BucketHeader(tuple(self._pieces), num_bytes, _hash(self._fingerprint, bucket_N))
        encoded = msgspec.msgpack.encode(header)
        self._digest.update(encoded)
        self._pieces, self._end = [], 0
        self._num_buckets += 1
        self._send(encoded, bucket_N)


class BucketReader:
    """Makes tensors of buckets as they come. After a fault it takes the rest and uses none of it,
    so that sender and receivers stay in step; `finish` raises it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._fingerprint = device, fingerprint_on(device)
        self._tensors: dict[str, tuple[Piece, Tensor]] = {}
        self._num_read: dict[str, int] = {}
        self._digest = hashlib.blake2b(digest_size=8)
        self._num_buckets = 0
        self._fault: str = ""

    def read(self, encoded: bytes, header: BucketHeader, bucket_N: Tensor) -> None:
        """Take a bucket, uint8 [num_bytes]. `encoded`: its header as it came."""
        self._digest.update(encoded)
        self._num_buckets += 1
        if not self._fault and _hash(self._fingerprint, bucket_N) != header.hash:
            names = f"{header.pieces[0].name!r} to {header.pieces[-1].name!r}"
            self._fault = f"bucket {self._num_buckets}, of {names}, came with other bytes"
        start = 0
        for piece in header.pieces:
            end = start + piece.num_bytes
            self._fault = self._fault or self._put(piece, bucket_N[start:end])
            start = end

    def _put(self, piece: Piece, bytes_N: Tensor) -> str:
        """Returns what is wrong with the piece, "" if nothing is."""
        first, tensor = self._tensors.get(piece.name) or (piece, None)
        if tensor is None:
            dtype = getattr(torch, piece.dtype, None)
            if not isinstance(dtype, torch.dtype):
                return f"{piece.name!r} is announced as {piece.dtype!r}"
            tensor = torch.empty(piece.shape, dtype=dtype, device=self._device)
            self._tensors[piece.name] = piece, tensor
        has_come = self._num_read.get(piece.name, 0)
        is_next = piece.start == has_come and len(bytes_N) == piece.num_bytes
        if not is_next or (piece.dtype, piece.shape) != (first.dtype, first.shape):
            return f"a piece of {piece.name!r} is not the one that follows"
        if has_come + piece.num_bytes > tensor.nbytes:
            return f"{piece.name!r} has more bytes than {math.prod(piece.shape)} {piece.dtype}"
        whole_N = tensor.reshape(-1).view(torch.uint8)
        whole_N[has_come : has_come + piece.num_bytes].copy_(bytes_N)
        self._num_read[piece.name] = has_come + piece.num_bytes
        return ""

    def finish(self, end: PushEnd) -> dict[str, Tensor]:
        """The tensors. Raises WeightUpdateError unless the push has come whole."""
        if end.fault:
            raise WeightUpdateError(f"the sender ended the push: {end.fault}")
        fault = self._fault
        if not fault and (self._num_buckets, self._digest.hexdigest()) != (
            end.num_buckets,
            end.checksum,
        ):
            fault = (
                f"{self._num_buckets} buckets with the checksum {self._digest.hexdigest()} came, "
                f"not {end.num_buckets} with {end.checksum}"
            )
        if not fault:
            short = [n for n, (_, t) in self._tensors.items() if self._num_read[n] != t.nbytes]
            fault = f"of {short[0]!r} only a part came" if short else ""
        if fault:
            raise WeightUpdateError(f"{fault}; the serving weights are kept")
        return {name: tensor for name, (_, tensor) in self._tensors.items()}


def _hash(fingerprint: FingerprintOf, bucket_N: Tensor) -> int:
    """The hash of uint8 [a multiple of 8]. Floats are hashed by their bits, and the fastest."""
    return int(fingerprint(bucket_N.view(torch.float32), torch.float32)[0])


SHARED_PLACES = (HOST, DEVICE)
_POLL_S = 0.001
_MEET_S = 60.0  # all are there already, and connect


class BucketPath(Protocol):
    """The sender's end, or a member's. What it raises, RuntimeError or OSError, ends the group."""

    @property
    def device(self) -> torch.device: ...

    @property
    def address(self) -> str:
        """What members need to open their end, "" if nothing."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """The sender fills it, uint8 [num_bytes]; the same one for each bucket."""
        ...

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Return when the buffer may be filled again. `key`: of the bucket, in the store. `check`
        is called while it waits, and may raise."""
        ...

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """The bucket, uint8 [num_bytes], valid until `taken`."""
        ...

    def taken(self, key: str) -> None:
        """The member has read the bucket."""
        ...

    def close(self) -> None: ...


class Broadcasts:
    """A group of torch.distributed, of which the sender is rank 0."""

    address = ""

    def __init__(
        self,
        store: Any,
        name: str,
        backend: str,
        rank: int,
        size: int,
        own_host: str,
    ) -> None:
        """`own_host`: where the others reach this rank. Returns when all have come."""
        distributed: Any = dist
        places, timeout = distributed.PrefixStore(f"{name}/", store), timedelta(seconds=_MEET_S)
        self._group, self.device = connected_group(backend, places, rank, size, timeout, own_host)
        self._buffer_N: Tensor | None = None

    def buffer(self, num_bytes: int) -> Tensor:
        """It grows where it has to, and stays."""
        if self._buffer_N is None or len(self._buffer_N) < num_bytes:
            self._buffer_N = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer_N[:num_bytes]

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Broadcast it."""
        self._broadcast(bucket_N, timeout_s)

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """Take part in the broadcast."""
        bucket_N = self.buffer(num_bytes)
        self._broadcast(bucket_N, timeout_s)
        return bucket_N

    def taken(self, key: str) -> None:
        """Nothing: the bucket has been copied here."""

    def close(self) -> None:
        """Nothing: the group ends with its last reference."""

    def _broadcast(self, bytes_N: Tensor, timeout_s: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([bytes_N], options).wait()


class SharedBucket:
    """One buffer of the sender, which all members map; each says when it has read a bucket."""

    def __init__(self, store: Any, place: str, num_bytes: int, num_members: int) -> None:
        """The sender's end."""
        self._store, self._num_members = store, num_members
        self._shared: SharedBuffer | None = create_shared_buffer(place, num_bytes)
        self._bytes_N = self._shared.bytes_N
        self.address = self._shared.address

    @classmethod
    def opened(cls, store: Any, place: str, address: str, num_bytes: int) -> SharedBucket:
        """A member's end."""
        bucket = cls.__new__(cls)
        bucket._store, bucket._num_members, bucket._shared = store, 0, None
        bucket._bytes_N = open_shared_buffer(place, address, num_bytes)
        bucket.address = address
        return bucket

    @property
    def device(self) -> torch.device:
        return self._bytes_N.device

    def buffer(self, num_bytes: int) -> Tensor:
        """All of it, which has that size."""
        return self._bytes_N[:num_bytes]

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Wait until all members have read it."""
        deadline = time.monotonic() + timeout_s
        while (num_taken := int(self._store.add(f"{key}/taken", 0))) < self._num_members:
            check()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._num_members - num_taken} of {self._num_members} engines have not "
                    f"read it within {timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """Where it lies."""
        return self._bytes_N[:num_bytes]

    def taken(self, key: str) -> None:
        """Tell the sender, once the copies out of the buffer are done."""
        if self.device.type != "cpu":
            # Not for the device: a step that is being captured beside this would be lost.
            torch.accelerator.current_stream(self.device).synchronize()
        self._store.add(f"{key}/taken", 1)

    def close(self) -> None:
        """The sender's end: let nobody open it any more."""
        if self._shared is not None:
            close_shared_buffer(self._shared)
            self._shared = None
