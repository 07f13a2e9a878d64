"""EngineRequests: the requests that one engine holds for the coordinator, and their replies.

Used by `rollout.coordinator.agent.agent`. It adds requests to the engine and aborts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from rollout.coordinator.protocol.messages import (
    AssignRequest,
    Attempt,
    EngineReply,
    Progress,
    Sample,
    WireError,
)
from rollout.coordinator.protocol.packed import (
    pack_record,
    resumed_record,
    unpack_params,
)
from rollout.engine.engine import Engine
from rollout.errors import ProtocolError, RolloutError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from rollout.wire import Message

_logger = logging.getLogger(__name__)


class _ReportTimes:
    """Chooses after which steps each request is reported. A request is reported every `interval`
    steps. About equally many requests are reported after each step, so that no step is delayed
    much."""

    def __init__(self) -> None:
        self._num_steps = 0
        # By interval: for each remainder of the step number, the ids of the requests to report.
        self._slots: dict[int, list[dict[int, None]]] = {}

    def slot(self, interval: int) -> dict[int, None]:
        """Return the set of this interval with the fewest request ids. The caller adds a request id
        to the set, and removes it when the request ends."""
        slots = self._slots.setdefault(interval, [{} for _ in range(interval)])
        return min(slots, key=len)

    def after_step(self) -> list[int]:
        """Count a step, and return the ids of the requests to report now."""
        self._num_steps += 1
        slots = (each[self._num_steps % interval] for interval, each in self._slots.items())
        return [request_id for slot in slots for request_id in slot]


@dataclass(slots=True)
class _Running:
    attempt: int
    num_reported: int
    slot: dict[int, None]  # the set of _ReportTimes that has its id


class EngineRequests:
    """The requests that the coordinator has assigned to one engine, by request id.

    An attempt is one assignment of a request. The engine and the coordinator use the same request
    ids. A reply is kept until the coordinator acknowledges it. `num_received` counts the samples
    assigned since the engine registered. EngineAgent resets it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[int, _Running] = {}
        self._report_times = _ReportTimes()
        self.report_interval = 1  # most steps between two reports of a new request
        self._ended: dict[int, EngineReply] = {}
        self.num_received = 0

    @property
    def num_running(self) -> int:
        """Number of attempts that have not ended, whether they wait or run in the engine."""
        return len(self._running)

    def held(self) -> tuple[Attempt, ...]:
        """Return all attempts, including ended ones whose reply is not acknowledged. Any thread may
        call it."""
        # Copies of the dictionaries are atomic.
        running, ended = list(self._running.items()), list(self._ended.items())
        return tuple(Attempt(request_id=i, attempt=each.attempt) for i, each in running + ended)

    def attempts(self, request_ids: Iterable[int]) -> tuple[Attempt, ...]:
        """Return the attempts of these requests, without ended and unknown ones."""
        return tuple(
            Attempt(request_id=i, attempt=self._running[i].attempt)
            for i in request_ids
            if i in self._running
        )

    def unacknowledged(self) -> list[EngineReply]:
        """Return the replies that are not acknowledged."""
        return list(self._ended.values())

    # ---- assignments

    def assign(self, message: AssignRequest) -> list[EngineReply]:
        """Add samples with a new attempt to the engine, and return replies to send at once. The
        replies are failures of samples that cannot run here, and replies of repeated samples that
        have ended."""
        self.num_received += len(message.samples)
        replies: list[EngineReply] = []
        new: list[Sample] = []
        for sample in message.samples:
            known = self._known_attempt(sample.request_id)
            if known < sample.attempt:
                self.drop(sample.request_id)
                new.append(sample)
            elif known == sample.attempt and sample.request_id in self._ended:
                replies.append(self._ended[sample.request_id])
        fresh = [sample for sample in new if not _num_known(sample)]
        alone = [[sample] for sample in new if _num_known(sample)]
        for samples in (*([fresh] if fresh else []), *alone):
            try:
                self._add(message, samples)
            except Exception as error:
                # No fault of one prompt may affect other requests.
                if not isinstance(error, RolloutError):
                    _logger.exception("%d requests of one prompt could not be added", len(samples))
                replies += [self._keep(_refusal(sample, error)) for sample in samples]
        return replies

    def refuse(self, failure: EngineReply) -> EngineReply:
        """Keep and return the failure of an attempt whose assignment could not be read."""
        self.num_received += 1
        return self._keep(failure)

    def _known_attempt(self, request_id: int) -> int:
        running, ended = self._running.get(request_id), self._ended.get(request_id)
        if running is not None:
            return running.attempt
        return -1 if ended is None else ended.attempt

    def _add(self, message: AssignRequest, samples: Sequence[Sample]) -> None:
        """Add new samples of one prompt, or one resumed sample, to the engine."""
        tokens = message.prompt_tokens.tolist()
        params = [unpack_params(sample.sampling_params) for sample in samples]
        seeds = [self._seed_of(sample, own) for sample, own in zip(samples, params, strict=True)]
        if _num_known(samples[0]):
            sample = structs.replace(samples[0], seed=seeds[0])
            record = resumed_record(sample, params[0], tokens, priority=message.priority)
            self._engine.add_record(record)
        else:
            seeded = [replace(p, seed=seed) for p, seed in zip(params, seeds, strict=True)]
            ids = [sample.request_id for sample in samples]
            self._engine.add_group(tokens, seeded, ids, message.priority)
        for sample, own in zip(samples, params, strict=True):
            interval = self.report_interval
            if own.streaming:
                interval = min(interval, own.streaming_interval)
            slot = self._report_times.slot(interval)
            slot[sample.request_id] = None
            self._running[sample.request_id] = _Running(sample.attempt, _num_known(sample), slot)

    def _seed_of(self, sample: Sample, params: SamplingParams) -> int:
        """Return the sample's seed. Without one, mix the engine's seed and the request id."""
        for seed in (sample.seed, params.seed):
            if seed is not None:
                return seed
        # The id is unique in the fleet: requests draw differently, attempts of one request alike.
        return mix_seed(self._engine.seed, sample.request_id)

    # ---- ending

    def abort(self, named: Attempt) -> list[EngineReply]:
        """Abort an attempt, and return its reply. Returns [] if the engine does not hold the
        attempt. An attempt that had ended before also gets its reply."""
        if self._known_attempt(named.request_id) != named.attempt:
            return []
        if named.request_id in self._ended:
            return [self._ended[named.request_id]]
        return [self._end(self._engine.abort_request(named.request_id))]

    def instead_of(self, message: Message, error: ProtocolError) -> Sequence[Message]:
        """Return the messages to send in place of a message that no frame can carry. A Progress of
        several attempts is replaced by its halves. A message about one attempt is replaced by a
        failed reply with `error`. Raises `error` for any other message."""
        if isinstance(message, Progress) and (middle := len(message.runs) // 2):
            halves = message.runs.rows(0, middle), message.runs.rows(middle, len(message.runs))
            return [Progress(runs=runs) for runs in halves]
        if isinstance(message, Progress):
            (named,) = (Attempt(request_id=r, attempt=a) for r, a, _ in message.runs.apart())
        elif isinstance(message, EngineReply) and message.record is not None:
            named = Attempt(request_id=message.request_id, attempt=message.attempt)
        else:
            raise error
        _logger.warning("a message of request %d cannot be sent: %s", named.request_id, error)
        self.drop(named.request_id)
        return [self._keep(_refusal(named, error))]

    def drop(self, request_id: int) -> None:
        """End an outdated attempt without a reply."""
        self._ended.pop(request_id, None)
        running = self._running.pop(request_id, None)
        if running is not None:
            del running.slot[request_id]
            self._engine.abort_request(request_id)

    def keep_only(self, attempts: Iterable[Attempt]) -> None:
        """Drop all attempts except `attempts`."""
        kept = {attempt.request_id: attempt.attempt for attempt in attempts}
        for request_id in [*self._running, *self._ended]:
            if kept.get(request_id) != self._known_attempt(request_id):
                self.drop(request_id)

    def drop_reply(self, acknowledged: Attempt) -> None:
        """Drop the reply of an attempt, which has arrived at the coordinator."""
        ended = self._ended.get(acknowledged.request_id)
        if ended is not None and ended.attempt == acknowledged.attempt:
            del self._ended[acknowledged.request_id]

    # ---- results of a step

    def ended(self, records: Iterable[DynamicInferenceRequestRecord]) -> list[EngineReply]:
        """Return the replies with the records of ended requests. Dropped attempts are left out."""
        return [self._end(record) for record in records if record.request_id in self._running]

    def due_progress(self) -> list[Progress]:
        """Count a step, and return the new tokens of the requests to report now."""
        return self._report(self._report_times.after_step())

    def progress(self) -> list[Progress]:
        """Return all tokens that are not reported yet."""
        return self._report(self._running)

    def _report(self, request_ids: Iterable[int]) -> list[Progress]:
        running = self._running
        if not running:
            return []
        # The engine skips ended requests: their tokens come with the reply.
        new = self._engine.new_tokens([(i, running[i].num_reported) for i in request_ids])
        if not len(new):
            return []
        attempts = []
        for request_id, count in zip(new.request_ids.tolist(), new.counts.tolist(), strict=True):
            attempt = running[request_id]
            attempt.num_reported += count
            attempts.append(attempt.attempt)
        return [Progress(runs=new.with_attempts(attempts))]

    def _end(self, record: DynamicInferenceRequestRecord) -> EngineReply:
        running = self._running.pop(record.request_id)
        del running.slot[record.request_id]
        named = Attempt(request_id=record.request_id, attempt=running.attempt)
        try:
            packed = pack_record(record)
        except ProtocolError as error:
            _logger.warning("the record of request %d cannot be sent: %s", named.request_id, error)
            return self._keep(_refusal(named, error))
        return self._keep(
            EngineReply(
                request_id=named.request_id,
                attempt=named.attempt,
                record=packed,
                is_failed=record.current.failed(),
            )
        )

    def _keep(self, reply: EngineReply) -> EngineReply:
        self._ended[reply.request_id] = reply
        return reply


def _num_known(sample: Sample) -> int:
    """Return the number of tokens that earlier attempts generated."""
    return 0 if sample.resumed is None else len(sample.resumed)


def _refusal(named: Attempt | Sample | EngineReply, error: Exception) -> EngineReply:
    return EngineReply(
        request_id=named.request_id,
        attempt=named.attempt,
        error=WireError.of(error),
        is_failed=True,
    )
