"""RequestDesk: takes requests in and hands them out; between the two they are the scheduler's."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engine.intake import Entry, RequestIntake
from rollout.engine.request_book import RequestBook
from rollout.errors import InvalidRequestError
from rollout.kv.cache import KVCache
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.scheduling.scheduler import Scheduler
from rollout.version_spans import VersionSpans

Group = tuple[str | Sequence[int], Sequence[SamplingParams]]


class RequestDesk:
    """Keeps book and scheduler in agreement about which requests there are."""

    def __init__(
        self, intake: RequestIntake, book: RequestBook, scheduler: Scheduler, kv: KVCache
    ) -> None:
        self._intake, self._book, self._scheduler, self._kv = intake, book, scheduler, kv
        # Not a request id: those may be used again while members of an old group still wait.
        self._num_groups = 0

    def add_groups(
        self,
        groups: Sequence[Group],
        request_ids: Sequence[int] | None,
        priority: int,
        version: int,
    ) -> list[list[int]]:
        """Queue all groups, or none. `request_ids` are those of all samples, group after group.

        Raises InvalidRequestError, before anything is changed.
        """
        if not isinstance(priority, int):
            raise InvalidRequestError(f"priority={priority!r} must be an integer")
        checked = [self._intake.validate(prompt, params_list) for prompt, params_list in groups]
        ids = self._intake.ids(sum(len(group.params_list) for group in checked), request_ids)
        for request_id in ids:
            if request_id in self._book:
                raise InvalidRequestError(f"request id {request_id} is in use; choose another")
        added = []
        for group in checked:
            group_ids, ids = ids[: len(group.params_list)], ids[len(group.params_list) :]
            self._num_groups += 1
            for entry in self._intake.enter(group, group_ids, priority, version):
                self._queue(entry, self._num_groups if len(group_ids) > 1 else None, version)
            added.append(group_ids)
        return added

    def add_record(self, record: DynamicInferenceRequestRecord, version: int) -> int:
        """Queue the rest of a request that began elsewhere; the record is ours from here on.

        Raises InvalidRequestError, before anything is changed.
        """
        request_id = record.request_id
        if request_id in self._book:
            raise InvalidRequestError(f"request id {request_id} is in use")
        if record.current.completed_at_version is not None:
            raise InvalidRequestError(f"request {request_id} has ended; nothing is left to do")
        unfinished = DynamicInferenceRequestRecord([*record.requests], record.latency)
        if record.current.generated_tokens:
            unfinished.checkpoint()
        entry = self._intake.reenter(unfinished)
        self._book.reopen(unfinished)
        self._schedule(entry, None, version)
        return request_id

    def _queue(self, entry: Entry, group_id: int | None, version: int) -> None:
        self._book.open(entry.request)
        self._schedule(entry, group_id, version)

    def _schedule(self, entry: Entry, group_id: int | None, version: int) -> None:
        request, admission = entry.request, entry.admission
        if admission.error is not None:
            spans = VersionSpans()
            self._book.fail(request.request_id, admission.error, "error", spans, version)
            return
        if admission.clamped is not None:
            request.add_event_error_transient(admission.clamped)
        self._scheduler.add_request(
            request.request_id,
            entry.tokens,
            num_prompt=entry.num_prompt,
            priority=request.priority,
            group_id=group_id,
            sampling_params=entry.sampling_params,
            seed=entry.seed,
            stop_rule=entry.stop_rule,
            wants_prompt_logprobs=entry.wants_prompt_logprobs,
        )

    def abort(self, request_id: int, version: int) -> None:
        """End a request, unless it has ended; its KV, wherever it is, is freed."""
        if self._book.has_ended(request_id):
            return
        blocks = self._scheduler.blocks_of(request_id)
        kv_spans = self._scheduler.finish_request(request_id)
        if self._kv.num_offloaded_bytes:
            # No block may be found later whose bytes are given up now.
            kv_cache_manager = self._scheduler.kv_cache_manager
            kv_cache_manager.free_unused_blocks()
            self._kv.discard([b for b in blocks if not kv_cache_manager.num_users(b)])
        self._book.abort(request_id, kv_spans, version)

    def record(self, request_id: int, version: int) -> DynamicInferenceRequestRecord:
        """A copy of the record as of now, under weights `version`."""
        if self._book.has_ended(request_id):
            return self._book[request_id].copy()
        return self._book.copy_running(request_id, self._scheduler.kv_spans(request_id), version)
