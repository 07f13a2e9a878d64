"""Submissions: what clients ask for, until it is with an engine."""

from __future__ import annotations

import numpy as np

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.placement import Placement
from rollout.coordinator.core.request_desk import RequestDesk, failure
from rollout.coordinator.core.request_table import Group, Phase, Request
from rollout.coordinator.core.sessions import ClientPeer
from rollout.coordinator.core.text_jobs import Tokenize, Tokenized
from rollout.coordinator.core.token_log import TokenLog
from rollout.coordinator.protocol.messages import Sample, SubmitRequest, WireError
from rollout.errors import EngineStateError, InvalidRequestError, RolloutError


class Submissions:
    """The only maker of requests. A name that is known is never taken a second time."""

    def __init__(
        self, books: Books, placement: Placement, desk: RequestDesk, *, has_tokenizer: bool
    ) -> None:
        self._books, self._placement, self._desk = books, placement, desk
        self._has_tokenizer = has_tokenizer

    def submit(self, client: ClientPeer, message: SubmitRequest, now: float) -> None:
        """Take the samples that are new; tell again what is known of the others."""
        new: list[Sample] = []
        for sample in message.samples:
            server_id = client.server_ids.get(sample.request_id)
            if server_id is not None:
                self._books.counters.num_duplicates += 1
                self._desk.tell_again(self._books.requests.requests[server_id])
            elif sample.request_id in client.answered:
                self._books.counters.num_duplicates += 1
            else:
                new.append(sample)
        if not new:
            return
        refusal = self._refusal(client, message, len(new))
        if refusal is not None:
            self._books.counters.num_refused += len(new)
            for sample in new:
                self._books.send(client, failure(sample.request_id, WireError.of(refusal)))
            return
        self._take(client, message, new, now)

    def _refusal(
        self, client: ClientPeer, message: SubmitRequest, num_new: int
    ) -> RolloutError | None:
        """Why the samples cannot be taken now; None if they can."""
        limits, table = self._books.limits, self._books.requests
        if not self._desk.is_open:
            return EngineStateError("the engines are stopped; no request is taken any more")
        if message.prompt_tokens is None and not self._has_tokenizer:
            return InvalidRequestError("the coordinator has no tokenizer; send token ids")
        num_own = len(client.server_ids) + num_new
        if num_own > limits.max_client_requests or len(table) + num_new > limits.max_requests:
            return RolloutError(
                f"{len(client.server_ids)} requests of this client and {len(table)} in all are "
                f"unfinished or not acknowledged; at most {limits.max_client_requests} and "
                f"{limits.max_requests} are taken"
            )
        if client.request_bytes > limits.max_client_request_bytes:
            return RolloutError(
                f"{client.request_bytes} bytes of prompts are unanswered, more than "
                f"{limits.max_client_request_bytes}"
            )
        if client.kept_bytes > limits.max_kept_reply_bytes:
            return RolloutError(
                f"{client.kept_bytes} bytes of replies wait to be acknowledged, more than "
                f"{limits.max_kept_reply_bytes}"
            )
        return None

    def _take(
        self, client: ClientPeer, message: SubmitRequest, samples: list[Sample], now: float
    ) -> None:
        table = self._books.requests
        tokens, is_text = message.prompt_tokens, message.prompt_tokens is None
        group = Group(
            group_id=table.next_id(),
            prompt=message.prompt,
            prompt_tokens=np.empty(0, np.int32) if tokens is None else tokens,
            priority=message.priority,
            is_streaming=message.streaming,
            num_bytes=_size_of(message),
        )
        client.request_bytes += group.num_bytes
        for index, sample in enumerate(samples):
            request = Request(
                server_id=table.next_id() if index else group.group_id,
                client=client,
                client_request_id=sample.request_id,
                group=group,
                sampling_params=sample.sampling_params,
                seed=sample.seed,
                log=TokenLog(),
                phase=Phase.TOKENIZING if is_text else Phase.WAITING,
            )
            table.add(request)
        self._books.counters.num_requests += len(samples)
        if message.deadline_s is not None:
            self._books.timers.set(("deadline", group.group_id), now + message.deadline_s)
        if group.prompt is not None:
            params = {i: table.requests[i].sampling_params for i in group.request_ids}
            job = Tokenize(group.group_id, group.prompt, params)
            self._books.text_jobs.add(group.group_id, job)
            return
        group.hashes = self._placement.hash_prompt(group.prompt_tokens)
        self._placement.place(group, now)

    def tokenized(self, result: Tokenized, now: float) -> None:
        """The prompt of a group is there, if its requests still are."""
        table = self._books.requests
        group = table.groups.get(result.group_id)
        if group is None:
            return
        requests = table.members(group, Phase.TOKENIZING)
        if result.error is not None:
            for request in requests:
                self._desk.fail(request, result.error)
            return
        for request in requests:
            request.sampling_params = result.sampling_params[request.server_id]
            request.phase = Phase.WAITING
        group.prompt_tokens = result.prompt_tokens
        group.hashes = self._placement.hash_prompt(group.prompt_tokens)
        self._placement.place(group, now)


def _size_of(message: SubmitRequest) -> int:
    """Bytes of prompt and params. A character has up to 4, and 4 more as a token of its own."""
    num_bytes = 8 * len(message.prompt or "")
    if message.prompt_tokens is not None:
        num_bytes += message.prompt_tokens.nbytes
    for sample in message.samples:
        num_bytes += len(sample.sampling_params)
    return num_bytes
