"""EngineRequests: the attempts that one engine holds, and what it has told of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rollout.coordinator.protocol.messages import (
    AssignRequest,
    Attempt,
    EngineReply,
    EngineReplyPartial,
    RunningAttempt,
    Sample,
    WireError,
)
from rollout.coordinator.protocol.packed import (
    pack_record,
    resumed_record,
    token_run,
    unpack_params,
)
from rollout.engine.engine import Engine
from rollout.errors import RolloutError
from rollout.requests.record import DynamicInferenceRequestRecord

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    attempt: int
    num_reported: int
    prompt: str | None
    interval: int | None  # steps between two reports, if the client streams
    num_steps_unreported: int = 0

    def is_due(self) -> bool:
        """After a step: whether a report is due to the client that streams it."""
        self.num_steps_unreported += 1
        return self.interval is not None and self.num_steps_unreported >= self.interval


class EngineRequests:
    """Engine and coordinator name a request by the same id. An end is kept until acknowledged."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[int, _Running] = {}
        self._ended: dict[int, EngineReply] = {}

    def held(self) -> list[RunningAttempt]:
        """All attempts with the tokens told of them; those ended and not acknowledged included.

        Another thread may ask: the dictionaries are copied in one go, and the engine is not asked.
        """
        running = [
            RunningAttempt(request_id=i, attempt=r.attempt, num_tokens=r.num_reported)
            for i, r in list(self._running.items())
        ]
        ended = [
            RunningAttempt(request_id=i, attempt=reply.attempt, num_tokens=0)
            for i, reply in list(self._ended.items())
        ]
        return running + ended

    def attempts(self, request_ids: Iterable[int]) -> tuple[Attempt, ...]:
        """Those of running requests, by their ids."""
        return tuple(
            Attempt(request_id=i, attempt=self._running[i].attempt)
            for i in request_ids
            if i in self._running
        )

    def unacknowledged(self) -> list[EngineReply]:
        return list(self._ended.values())

    # ---- coming

    def assign(self, message: AssignRequest) -> list[EngineReply]:
        """Queue the samples that are new; one known by this or a later attempt is not.

        Returns the ends there are already: of those that cannot run here, and of repeated ones.
        """
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
                # Whatever it is, it must not reach the requests of others.
                if not isinstance(error, RolloutError):
                    _logger.exception("%d requests of one prompt failed to enter", len(samples))
                replies += [self._keep(_refusal(sample, error)) for sample in samples]
        return replies

    def _known_attempt(self, request_id: int) -> int:
        running, ended = self._running.get(request_id), self._ended.get(request_id)
        if running is not None:
            return running.attempt
        return -1 if ended is None else ended.attempt

    def _add(self, message: AssignRequest, samples: Sequence[Sample]) -> None:
        """Fresh samples of one prompt, or a single one that goes on."""
        tokens = message.prompt_tokens.tolist()
        params = [unpack_params(sample.sampling_params) for sample in samples]
        if _num_known(samples[0]):
            record = resumed_record(
                *(samples[0], params[0], tokens), prompt=message.prompt, priority=message.priority
            )
            self._engine.add_record(record)
        else:
            seeded = [
                p if sample.seed is None else replace(p, seed=sample.seed)
                for p, sample in zip(params, samples, strict=True)
            ]
            ids = [sample.request_id for sample in samples]
            self._engine.add_group(tokens, seeded, ids, message.priority)
        for sample, own in zip(samples, params, strict=True):
            interval = own.streaming_interval if own.streaming else None
            self._running[sample.request_id] = _Running(
                sample.attempt, _num_known(sample), message.prompt, interval
            )

    # ---- going

    def abort(self, named: Attempt) -> list[EngineReply]:
        """End an attempt, if it is held; its end is returned, again if need be."""
        if self._known_attempt(named.request_id) != named.attempt:
            return []
        if named.request_id in self._ended:
            return [self._ended[named.request_id]]
        return [self._end(self._engine.abort_request(named.request_id))]

    def refuse(self, reply: EngineReply | EngineReplyPartial, error: RolloutError) -> EngineReply:
        """End the attempt that `reply` tells of, by what kept that from being sent."""
        _logger.warning("what request %d brought cannot be sent: %s", reply.request_id, error)
        self.drop(reply.request_id)
        return self._keep(_refusal(reply, error))

    def drop(self, request_id: int) -> None:
        """End an attempt that counts no more, without a word."""
        self._ended.pop(request_id, None)
        if self._running.pop(request_id, None) is not None:
            self._engine.abort_request(request_id)

    def keep_only(self, attempts: Iterable[Attempt]) -> None:
        """Drop all others."""
        kept = {attempt.request_id: attempt.attempt for attempt in attempts}
        for request_id in [*self._running, *self._ended]:
            if kept.get(request_id) != self._known_attempt(request_id):
                self.drop(request_id)

    def forget(self, acknowledged: Attempt) -> None:
        """The end of this attempt is safe elsewhere."""
        ended = self._ended.get(acknowledged.request_id)
        if ended is not None and ended.attempt == acknowledged.attempt:
            del self._ended[acknowledged.request_id]

    # ---- what a step brought

    def note_ended(self, records: Iterable[DynamicInferenceRequestRecord]) -> list[EngineReply]:
        """The ends of attempts; dropped ones have none."""
        return [self._end(record) for record in records if record.request_id in self._running]

    def due_progress(self) -> list[EngineReplyPartial]:
        """After a step: as `progress`, of attempts whose client wants to hear now."""
        due = [item for item in self._running.items() if item[1].is_due()]
        return self._reports(due)

    def progress(self) -> list[EngineReplyPartial]:
        """What running attempts have generated and was not told yet."""
        return self._reports(self._running.items())

    def _reports(self, running: Iterable[tuple[int, _Running]]) -> list[EngineReplyPartial]:
        partials: list[EngineReplyPartial] = []
        for request_id, attempt in running:
            attempt.num_steps_unreported = 0
            # Those of one that has ended come with its end: nobody could go on from them.
            tokens = self._engine.new_tokens(request_id, attempt.num_reported)
            if tokens is not None:
                run = token_run(tokens)
                attempt.num_reported += len(run)
                partials.append(
                    EngineReplyPartial(request_id=request_id, attempt=attempt.attempt, tokens=run)
                )
        return partials

    def _end(self, record: DynamicInferenceRequestRecord) -> EngineReply:
        running = self._running.pop(record.request_id)
        record[0].prompt = running.prompt
        return self._keep(
            EngineReply(
                request_id=record.request_id,
                attempt=running.attempt,
                record=pack_record(record),
                is_failed=record.current.failed(),
            )
        )

    def _keep(self, reply: EngineReply) -> EngineReply:
        self._ended[reply.request_id] = reply
        return reply


def _num_known(sample: Sample) -> int:
    """Tokens of earlier attempts."""
    return 0 if sample.resumed is None else len(sample.resumed)


def _refusal(named: Sample | EngineReply | EngineReplyPartial, error: Exception) -> EngineReply:
    return EngineReply(
        request_id=named.request_id,
        attempt=named.attempt,
        error=WireError.of(error),
        is_failed=True,
    )
