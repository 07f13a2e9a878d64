"""msgpack in bounded time and memory: what a hostile frame claims is checked before it is built."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgpack

from rollout.errors import ProtocolError

DEFAULT_MAX_FRAME_BYTES = 64 * 2**20
# An item costs at most about 100 bytes once built, beside the bytes of its own string or binary.
DEFAULT_MAX_ITEMS = 2**18
# Below this a claim is worth at most 32 MiB for a moment (1024 levels of lists of this length).
_NO_WALK_BYTES = 4096
_LONG_RUN = 64
# A packer that has written more is not kept.
_MAX_KEPT_BYTES = 2**20

_FIXED = 0  # the size is known: (_FIXED, bytes after the first)
_PAYLOAD = 1  # a length of so many bytes, then as many bytes: (_PAYLOAD, bytes of the length)
_EXTENSION = 2  # the same and one byte for the type
_CHILDREN = 3  # the number is in the first byte: (_CHILDREN, items)
_ARRAY, _MAP = 4, 5  # a number of so many bytes, then as many items (or pairs)


class _Packer(threading.local):
    """One per thread, and kept: each new one begins by taking 256 KiB for what it will write."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Free what was taken for a long value."""
        self.pack = msgpack.Packer(use_bin_type=True).pack


_packer = _Packer()


def pack(value: Any) -> bytes:
    """Return `value` as msgpack. Raises ProtocolError if it cannot carry it."""
    try:
        packed: bytes = _packer.pack(value)
    except (TypeError, ValueError, OverflowError) as fault:
        raise ProtocolError(f"cannot be sent: {fault}") from fault
    if len(packed) > _MAX_KEPT_BYTES:
        _packer.renew()
    return packed


def unpack(
    packed: bytes | memoryview,
    *,
    max_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    max_items: int = DEFAULT_MAX_ITEMS,
) -> Any:
    """Return the one msgpack value in `packed`.

    Raises ProtocolError if it is larger than `max_bytes`, holds or claims more than `max_items`
    items, is cut short, followed by more, nested too deep, or not msgpack.
    """
    num_bytes = len(packed)
    if num_bytes > max_bytes:
        raise ProtocolError(f"{num_bytes} bytes, at most {max_bytes} are allowed")
    if num_bytes > _NO_WALK_BYTES:
        _walk(packed, max_items)
    try:
        return msgpack.unpackb(packed, raw=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as fault:
        # msgpack's own exceptions are ValueErrors, some without a text.
        reason = str(fault) or type(fault).__name__
        raise ProtocolError(f"not a msgpack value: {reason[:200]}") from fault


def check_num_items(packed: bytes, max_items: int = DEFAULT_MAX_ITEMS) -> None:
    """Raise ProtocolError if `packed`, which `pack` returned, has more items than are read."""
    # No item is smaller than a byte: what is shorter need not be looked at.
    if len(packed) > max_items:
        _walk(packed, max_items)


def _walk(packed: bytes | memoryview, max_items: int) -> None:
    """Raise ProtocolError unless `packed` is one complete value of at most `max_items` items.

    Builds nothing. Of all containers together it keeps the number of items still to come, so that
    neither depth nor a claimed length costs memory.
    """
    position, end = 0, len(packed)
    num_left, num_items = 1, 1
    while num_left:
        if position >= end:
            break
        kind, number = _FIRST_BYTES[packed[position]]
        position += 1
        num_left -= 1
        if kind == _FIXED:
            position += number
            continue
        if kind != _CHILDREN:
            width = number
            number = int.from_bytes(packed[position : position + width], "big")
            position += width
            if kind <= _EXTENSION:
                position += number + (kind == _EXTENSION)
                continue
            number *= 2 if kind == _MAP else 1
        num_items += number
        if num_items > max_items:
            raise ProtocolError(f"claims {num_items} items or more, at most {max_items} are read")
        run = _num_bytes_of_run(packed, position, number) if number >= _LONG_RUN else 0
        if run:
            position += run
        else:
            num_left += number
    if num_left or position > end:
        raise ProtocolError(f"cut short after {end} bytes")
    if position < end:
        raise ProtocolError(f"a value of {position} bytes and {end - position} bytes more")


def _num_bytes_of_run(packed: bytes | memoryview, start: int, count: int) -> int:
    """The bytes of `count` floats, or of as many small integers, if that is what is at `start`;
    else 0. Both fill most of a long record, and a look at all of them together costs nothing.
    """
    for width in (1, 9):
        end = start + width * count
        if end <= len(packed):
            heads = bytes(packed[start:end:width])
            if heads.isascii() if width == 1 else heads == b"\xcb" * count:
                return width * count
    return 0


def _first_bytes() -> Sequence[tuple[int, int]]:
    """Return (kind, number) for each of the 256 first bytes of an item. Source: msgpack spec.md."""
    table = [(_FIXED, 0)] * 256
    for code in range(16):
        table[0x80 + code] = (_CHILDREN, 2 * code)
        table[0x90 + code] = (_CHILDREN, code)
    for code in range(32):
        table[0xA0 + code] = (_FIXED, code)
    for power in range(3):
        table[0xC4 + power] = table[0xD9 + power] = (_PAYLOAD, 1 << power)
        table[0xC7 + power] = (_EXTENSION, 1 << power)
    for power in range(2):
        table[0xCA + power] = (_FIXED, 4 << power)
        table[0xDC + power] = (_ARRAY, 2 << power)
        table[0xDE + power] = (_MAP, 2 << power)
    for power in range(4):
        table[0xCC + power] = table[0xD0 + power] = (_FIXED, 1 << power)
    for power in range(5):
        table[0xD4 + power] = (_FIXED, 1 + (1 << power))
    return tuple(table)


_FIRST_BYTES = _first_bytes()
