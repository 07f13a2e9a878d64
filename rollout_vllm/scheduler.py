"""VllmScheduler: the requests of vLLM's scheduler under the Engine's ids and interface.

`rollout_vllm.engine` makes it; Engine, VllmPipeline and VllmSuspension use it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sized
from dataclasses import dataclass

from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from rollout.sampling_params import SamplingParams
from rollout.scheduling.stopping import StopRule
from rollout.telemetry import SchedulerCounts
from rollout.version_spans import VersionSpans
from rollout_vllm.options import sampling_arguments
from rollout_vllm.stamps import StampingScheduler


@dataclass(slots=True, kw_only=True)
class VllmRequest:
    """A request that vLLM has.

    tokens: all its tokens. num_prompt: tokens of the original prompt. num_entered: tokens that it
    had when it was added or lost its KV. rule: the conditions that end it. is_scored: whether its
    prompt's log-probs are still to come.
    """

    tokens: list[int]
    num_prompt: int
    num_entered: int
    rule: StopRule
    is_scored: bool


class VllmScheduler:
    """Implements `SchedulerInterface` and `KVPool` over vLLM's scheduler.

    reuse_across_versions: a prefix written under older weights may be used. shares_prefixes:
    requests share cached prefixes; otherwise only samples of one prompt do.
    """

    num_routing_bytes = 0

    def __init__(
        self, core: EngineCore, *, reuse_across_versions: bool, shares_prefixes: bool
    ) -> None:
        self._core = core
        self.vllm: StampingScheduler = core.scheduler
        self.vllm.isolates = not reuse_across_versions
        self._shares = shares_prefixes
        self.requests: dict[int, VllmRequest] = {}
        self.max_tokens: int = self.vllm.max_num_scheduled_tokens
        self.block_size: int = self.vllm.block_size

    # ---- the pool of KV blocks

    @property
    def kv_cache_manager(self) -> VllmScheduler:
        return self

    def begin_weights_version(self) -> None:
        if self.vllm.isolates:
            self.vllm.hide_older_than(self.vllm.version)

    def distrust(self, version: int) -> None:
        self.vllm.hide_older_than(version + 1)

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
        self.requests[request_id] = VllmRequest(
            tokens=list(tokens),
            num_prompt=num_prompt,
            num_entered=len(tokens),
            rule=stop_rule,
            is_scored=wants_prompt_logprobs,
        )
        num_new = max(1, stop_rule.max_length - len(tokens))
        arguments = sampling_arguments(
            sampling_params, num_new, stop_rule, wants_prompt_logprobs=wants_prompt_logprobs
        )
        salt = sampling_params.cache_salt
        if not self._shares:
            salt = f"group {group_id}" if group_id is not None else f"request {request_id}"
        request = EngineCoreRequest(
            request_id=str(request_id),
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=VllmSamplingParams(**arguments),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
            priority=-priority,  # vLLM runs the lowest first
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def finish_request(self, request_id: int) -> VersionSpans:
        spans = self.kv_spans(request_id)
        # Accepted draft tokens behind the end are not tokens of the request.
        spans.truncate(min(len(spans), len(self.requests[request_id].tokens)))
        del self.requests[request_id]
        self._core.abort_requests([str(request_id)])
        self.vllm.drop(str(request_id))
        return spans

    def request_ids(self) -> Collection[int]:
        return self.requests.keys()

    def running_ids(self) -> list[int]:
        return [int(request.request_id) for request in self.vllm.running]

    def kv_spans(self, request_id: int) -> VersionSpans:
        return self.vllm.spans.get(str(request_id), VersionSpans()).copy()

    def routing(self, request_id: int) -> None:
        return None

    def requeue_older_than(self, version: int) -> list[int]:
        self.vllm.preempt_older_than(version)
        return self.take_preempted()

    def take_preempted(self) -> list[int]:
        """Return the ids of requests that lost their KV since the last call. They are queued again
        with all their tokens."""
        preempted = [int(i) for i in self.vllm.take_preempted() if int(i) in self.requests]
        for request_id in preempted:
            request = self.requests[request_id]
            request.num_entered = len(request.tokens)
        return preempted

    # ---- counts

    @property
    def waiting(self) -> Sized:
        return self.vllm.waiting  # type: ignore[no-any-return]

    def counts(self) -> SchedulerCounts:
        pool = self.vllm.kv_cache_manager.block_pool
        num_blocks = pool.num_gpu_blocks - 1  # without the null block
        num_waiting = sum(self.vllm.get_request_counts()) - len(self.vllm.running)
        return SchedulerCounts(
            num_waiting=num_waiting,
            num_without_room=num_waiting,
            num_running=len(self.vllm.running),
            num_paused=0,
            num_blocks_used=num_blocks - pool.get_num_free_blocks(),
            num_blocks_indexed=len(pool.cached_block_hash_to_block),
            num_blocks_total=num_blocks,
        )

    def violations(self) -> list[str]:
        found = []
        unknown = {int(i) for i in self.vllm.requests} ^ self.requests.keys()
        if unknown:
            found.append(f"requests {sorted(unknown)} are in one of vLLM and this engine")
        for request in self.vllm.running:
            spans = self.vllm.spans.get(request.request_id)
            if spans is None or len(spans) != request.num_computed_tokens:
                found.append(
                    f"request {request.request_id} has {request.num_computed_tokens} computed "
                    f"tokens, and versions of {0 if spans is None else len(spans)}"
                )
        return found
