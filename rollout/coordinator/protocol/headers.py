"""The first element of every frame: the type of the message."""

from __future__ import annotations

from enum import IntEnum

# Raised by any change of a header or field. Peers of different versions refuse each other.
PROTOCOL_VERSION = 10


class Headers(IntEnum):
    """Numbers on the wire. Those below 70 are the ones of the public interface."""

    CONNECT = 0
    CONNECT_ACK = 1
    SUBMIT_REQUEST = 20
    ENGINE_REPLY = 21
    ENGINE_REPLY_PARTIAL = 22
    ABORT_REQUEST = 23
    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    SET_GENERATION_EPOCH = 44
    STOP = 45
    INCREMENT_STALENESS = 46
    DISCONNECT = 60
    SHUTDOWN = 61
    ACK = 70
    NACK = 71
    HEARTBEAT = 72
    REGISTER = 73
    REGISTER_ACK = 74
    ASSIGN_REQUEST = 75
    REPLY_ACK = 76
    UPDATE_WEIGHTS = 77
    PREPARE = 78
    COMMIT = 79
    ROLLBACK = 80
    STATS = 81
    CREDIT = 82
    PROGRESS = 83
    BATCH = 84
    CHECKSUMS = 85
