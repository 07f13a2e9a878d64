"""Requests, replies and pipe messages for the processes of `benchmarks.coordinator`.

Used by `benchmarks.coordinator`, `benchmarks.coordinator_bare`, `benchmarks.coordinator_real` and
`benchmarks.coordinator_fleet`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch

from rollout.coordinator.core.context import num_ahead
from rollout.coordinator.protocol.messages import Credit, Register
from rollout.coordinator.protocol.packed import pack_record
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.sampling_params import SamplingParams

PROMPT_TOKENS = 128
MAX_REQUESTS = 4096
PARAMS = SamplingParams(num_tokens_to_generate=16, return_log_probs=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load for the clients of one process.

    num_requests: requests of each client.
    window: unfinished requests of each client. With 0, the clients take turns, and only one request
        of the process is unfinished.
    """

    num_requests: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Result of a Load.

    start, end: time.monotonic() at the first request and at the last reply.
    latencies: seconds of each request.
    """

    start: float
    end: float
    latencies: Sequence[float]


def prompt() -> npt.NDArray[np.int32]:
    return np.arange(PROMPT_TOKENS, dtype=np.int32)


def reply_record(num_tokens: int) -> bytes:
    """Return the packed record of a finished request with `num_tokens` tokens and log-probs."""
    request = DynamicInferenceRequest(
        request_id=0,
        prompt_tokens=torch.arange(PROMPT_TOKENS),
        sampling_params=SamplingParams(num_tokens_to_generate=num_tokens, return_log_probs=True),
        status=Status.COMPLETED,
        finish_reason="length",
        generated_tokens=[(7919 * i) % 50_000 for i in range(num_tokens)],
        generated_log_probs=[-1.0 - i / num_tokens for i in range(num_tokens)],
        tpot=[0.01 + i * 1e-7 for i in range(num_tokens)],
        context_kv_version_min=[0] * num_tokens,
        context_kv_version_mean=[0.0] * num_tokens,
    )
    request.policy_spans.append(num_tokens, 0)
    request.freeze_versions(0)
    return pack_record(DynamicInferenceRequestRecord.from_request(request))


def registration(engine_id: bytes) -> Register:
    """Return the registration of an engine that accepts up to MAX_REQUESTS requests."""
    return Register(
        engine_id=engine_id,
        state="RUNNING",
        weights_version=0,
        weights_checksum="",
        block_size_tokens=16,
        max_requests=MAX_REQUESTS,
    )


class Grants:
    """Credit that an engine grants the coordinator: how many requests it may send.

    More credit is granted when half of it is used.
    """

    def __init__(self, session: int = 0) -> None:
        """`session` is the session id of the RegisterAck."""
        self._session, self._ahead = session, num_ahead(MAX_REQUESTS)
        self._num_received = self._num_granted = 0

    def take(self, num_received: int) -> Credit | None:
        """Count `num_received` more requests. Returns the Credit to send, or None if none is
        due."""
        self._num_received += num_received
        if self._num_received + self._ahead // 2 < self._num_granted:
            return None
        self._num_granted = self._num_received + self._ahead
        return Credit(num_granted=self._num_granted, session=self._session)


def next_load(pipe: Connection) -> Load | None:
    """Return the next Load from the pipe, or None once the pipe is closed."""
    try:
        load: Load | None = pipe.recv()
    except EOFError:
        return None
    gc.collect()
    return load
