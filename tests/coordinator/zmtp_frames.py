"""The frames in a stream of ZMTP 3 (rfc.zeromq.org/spec/23): what a connection's bytes are."""

from __future__ import annotations

from collections.abc import Sequence

_GREETING_BYTES, _IS_LONG = 64, 2


def frames_of(stream: bytes | bytearray) -> Sequence[bytes]:
    """The whole frames that follow the greeting, with their headers."""
    frames, start = [], _GREETING_BYTES
    while start + 2 <= len(stream):
        header = 9 if stream[start] & _IS_LONG else 2
        end = start + header + int.from_bytes(stream[start + 1 : start + header], "big")
        frames.append(bytes(stream[start:end]))
        start = end
    return frames
