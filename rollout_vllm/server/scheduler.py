"""ServerScheduler: the requests that a vLLM server computes, and bounds on the age of their KV.

`rollout_vllm.server.engine` makes it; Engine, ServerPipeline and ServerSuspension use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.sampling_params import SamplingParams
from rollout.scheduling.stopping import Stop, StopRule
from rollout.step.seeds import mix_seed
from rollout.telemetry import SchedulerCounts
from rollout.version_spans import VersionSpans
from rollout_vllm.options import sampling_arguments
from rollout_vllm.server.client import VllmServer


@dataclass(slots=True, kw_only=True)
class ServerRequest:
    """A request, which waits here or runs in the server.

    tokens: all its tokens. num_prompt: tokens of the original prompt. rank: its place in the queue.
    salt: the part of its cache salt that is its own. oldest: the oldest version that may have
    written any of its KV. spans: `oldest` for each position with KV. is_new: whether its record
    does not hold `spans` yet. attempt: the id of its stream; None while it waits. num_before:
    tokens at the start of the stream. stop: its end, once a token has ended it.
    """

    tokens: list[int]
    num_prompt: int
    rule: StopRule
    params: SamplingParams
    rank: tuple[int, int]
    salt: str
    oldest: int = 0
    spans: VersionSpans = field(default_factory=VersionSpans)
    is_new: bool = True
    attempt: str | None = None
    num_before: int = 0
    stop: Stop | None = None


class ServerScheduler:
    """Implements `SchedulerInterface` and `KVPool` over a vLLM server.

    At most `max_running` requests run in the server, which decides about its steps and KV blocks.
    Their KV cannot be read, so its versions are bounded by the server's prefix cache: vLLM shares
    blocks among requests of equal cache salt alone. A request that starts without KV gets the salt
    of the version that is served then. So no block that it finds was written before that version.
    It keeps the salt when it continues under later versions, over its older KV.
    """

    num_routing_bytes = 0

    def __init__(
        self,
        server: VllmServer,
        *,
        name: str,
        version: Callable[[], int],
        max_running: int,
        max_tokens: int,
        block_size: int,
        shares_prefixes: bool,
    ) -> None:
        """`name`: the first part of all ids and salts, which no other client of the server uses.
        `version`: returns the served version. `shares_prefixes`: requests share cached prefixes;
        otherwise only samples of one prompt do."""
        self._server, self._name, self.version = server, name, version
        self._max_running, self._shares = max_running, shares_prefixes
        self.max_tokens, self.block_size = max_tokens, block_size
        self.requests: dict[int, ServerRequest] = {}
        self.waiting_ids: list[int] = []
        self.running: dict[str, int] = {}  # stream -> request
        self._num_added = self._num_started = 0

    # ---- the pool of KV blocks

    @property
    def kv_cache_manager(self) -> ServerScheduler:
        return self

    def begin_weights_version(self) -> None:
        pass  # requests that start now have another salt

    def distrust(self, version: int) -> None:
        pass  # as above

    # ---- requests

    def add_request(
        self,
        request_id: int,
        tokens: list[int],
        *,
        num_prompt: int,
        priority: int,
        group_id: int | None,
        sampling_params: SamplingParams,
        seed: int,
        stop_rule: StopRule,
        wants_prompt_logprobs: bool,
    ) -> None:
        salt = sampling_params.cache_salt or ""
        if not self._shares:
            salt = f"group {group_id}" if group_id is not None else f"request {request_id}"
        self._num_added += 1
        self.requests[request_id] = ServerRequest(
            tokens=list(tokens),
            num_prompt=num_prompt,
            rule=stop_rule,
            params=sampling_params,
            rank=(-priority, self._num_added),
            salt=salt,
        )
        self._queue(request_id)

    def _queue(self, request_id: int) -> None:
        self.waiting_ids.append(request_id)
        self.waiting_ids.sort(key=lambda each: self.requests[each].rank)

    def start_waiting(self) -> list[int]:
        """Send waiting requests to the server while there is room. Returns their ids."""
        room = max(0, self._max_running - len(self.running))
        started, self.waiting_ids = self.waiting_ids[:room], self.waiting_ids[room:]
        for request_id in started:
            request = self.requests[request_id]
            if not len(request.spans):
                request.oldest = self.version()
            self._num_started += 1
            request.attempt = f"{self._name}-{self._num_started}"
            request.num_before = len(request.tokens)
            self.running[request.attempt] = request_id
            self._server.generate(request.attempt, self._body(request))
        return started

    def _body(self, request: ServerRequest) -> Mapping[str, Any]:
        """Return the body for /inference/v1/generate."""
        num_generated = len(request.tokens) - request.num_prompt
        params, rule = request.params, request.rule
        seed = params.seed
        if seed is not None and num_generated:
            seed = mix_seed(seed, num_generated)  # vLLM would draw the first numbers again
        params = replace(params, seed=seed, min_tokens=max(0, params.min_tokens - num_generated))
        num_new = max(1, rule.max_length - len(request.tokens))
        given = sampling_arguments(params, num_new, rule, wants_prompt_logprobs=False)
        arguments = {name: value for name, value in given.items() if value is not None}
        if arguments.get("logprobs"):
            arguments["logprobs"] += 1  # the server counts the sampled token among the likely ones
        if rule.end_ids:
            arguments["stop_token_ids"] = list(rule.end_ids)
        return {
            "request_id": request.attempt,
            "token_ids": request.tokens,
            "sampling_params": arguments,
            "cache_salt": self._salt(request),
            "stream": True,
        }

    def _salt(self, request: ServerRequest) -> str:
        """Return the cache salt. vLLM takes 128 characters of some kinds."""
        text = f"{self._name} {request.oldest} {request.salt}"
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    def append_token(self, request: ServerRequest, token_id: int) -> None:
        """Append a sampled token. All positions before it have KV then."""
        request.spans.append(len(request.tokens) - len(request.spans), request.oldest)
        request.tokens.append(token_id)

    def end_stream(self, attempt: str) -> int | None:
        """Forget a stream that has ended. Returns the id of its request, None if that has ended."""
        request_id = self.running.pop(attempt, None)
        if request_id is not None:
            self.requests[request_id].attempt = None
        return request_id

    def requeue(self, request_id: int) -> None:
        """Queue a request whose stream has ended before the request, at its old place."""
        self._queue(request_id)

    def finish_request(self, request_id: int) -> VersionSpans:
        request = self.requests.pop(request_id)
        if request.attempt is not None:
            del self.running[request.attempt]
            self._server.abort(request.attempt)
        elif request_id in self.waiting_ids:
            self.waiting_ids.remove(request_id)
        return request.spans.copy()

    def request_ids(self) -> Collection[int]:
        return self.requests.keys()

    def running_ids(self) -> list[int]:
        return list(self.running.values())

    def kv_spans(self, request_id: int) -> VersionSpans:
        return self.requests[request_id].spans.copy()

    def routing(self, request_id: int) -> None:
        return None

    def requeue_older_than(self, version: int) -> Sequence[int]:
        """Let requests whose KV may be older than `version` start without it. Their streams have
        ended. Returns the ids of those that had KV."""
        old = [i for i, r in self.requests.items() if len(r.spans) and r.oldest < version]
        self.drop_kv(old)
        return old

    def drop_kv(self, request_ids: Sequence[int]) -> None:
        """Let waiting requests start without their KV."""
        for request_id in request_ids:
            request = self.requests[request_id]
            request.spans, request.is_new = VersionSpans(), True

    # ---- counts

    @property
    def waiting(self) -> Sized:
        return self.waiting_ids

    def counts(self) -> SchedulerCounts:
        num_waiting = len(self.waiting_ids)
        return SchedulerCounts(
            num_waiting=num_waiting,
            num_without_room=num_waiting,
            num_running=len(self.running),
            num_paused=0,
            num_blocks_used=0,  # the server's blocks are not reported to its clients
            num_blocks_indexed=0,
            num_blocks_total=0,
        )

    def violations(self) -> list[str]:
        found = []
        known = [*self.waiting_ids, *self.running.values()]
        if sorted(known) != sorted(self.requests):
            found.append(f"requests {sorted(known)} wait or run, of {sorted(self.requests)}")
        for request_id, request in self.requests.items():
            if len(request.spans) not in (0, len(request.tokens) - 1):
                found.append(
                    f"request {request_id} has {len(request.tokens)} tokens, and versions of "
                    f"{len(request.spans)} entries"
                )
        return found
