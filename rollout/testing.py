"""FakeLLM and FakeAsyncLLM: LLMs without a model, for tests of a training loop.

    llm = FakeLLM(lambda prompt, seed: [seed % 7, 2])
    request = llm.generate([5, 6], SamplingParams(return_log_probs=True))

It returns real requests, with a weights version for each token, keeps the weights that it is given
by name, and refuses a call in the wrong state with the errors of LLM. It serves no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from rollout.apis.arguments import RolloutGroup, SamplingArgument, as_groups
from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.reports import EngineStats, ResumeReport, SuspendReport, WeightUpdateReport
from rollout.control.state import (
    PAUSE,
    RESUME,
    SET_GENERATION_EPOCH,
    SUSPEND,
    UNPAUSE,
    EngineState,
    StateMachine,
    Transition,
)
from rollout.engine.suspension import KV_CACHE, OWNERS, WEIGHTS
from rollout.errors import (
    ConfigError,
    EngineStateError,
    InvalidRequestError,
    RequestAbortedError,
    RolloutError,
    WeightUpdateError,
)
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.request import Status
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from rollout.text import Prompt, Tokenizer, encode_prompt, tokenizer_of
from rollout.version_spans import VersionSpans
from rollout.weights.update import NamedTensors, by_name, next_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a script answers to a prompt.

    tokens: generated ids; `num_tokens_to_generate` cuts them. logprobs: one per token; -1.0 each by
    default. error: the request fails with this message after its tokens.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    error: str | None = None


# Called with the prompt's ids and the request's seed; ids alone are a Completion of them.
Script = Callable[[list[int], int], Completion | Sequence[int]]


def echo(prompt: list[int], seed: int) -> list[int]:
    """Return the prompt: the default script."""
    return prompt


def _mode_of(value: KVCacheManagementMode | str) -> KVCacheManagementMode:
    return as_enum("mode", KVCacheManagementMode, value)


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A request in generation. `kv`: the version that wrote the KV of each position so far."""

    request: DynamicInferenceRequest
    completion: Completion
    num_wanted: int
    kv: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.request.num_generated_tokens >= self.num_wanted

    def add_token(self, version: int) -> None:
        """Generate one token under `version`, which also writes the KV that is missing."""
        request = self.request
        self.kv += [version] * (request.num_tokens - len(self.kv))
        request.generated_tokens.append(self.completion.tokens[request.num_generated_tokens])
        request.policy_spans.append(1, version)
        request.context_kv_version_min.append(min(self.kv))
        request.context_kv_version_mean.append(fmean(self.kv))

    def end(self, version: int, error: RolloutError | None, tokenizer: Tokenizer | None) -> None:
        """Complete the request; `error`: fail it."""
        request, count = self.request, self.request.num_generated_tokens
        if self.completion.error is not None and error is None:
            error = RolloutError(self.completion.error)
        logprobs = self.completion.logprobs
        if request.sampling_params is not None and request.sampling_params.return_log_probs:
            values = [-1.0] * count if logprobs is None else list(logprobs[:count])
            request.generated_log_probs = torch.tensor(values, dtype=torch.float32)
        if tokenizer is not None:
            request.generated_text = tokenizer.decode(request.generated_tokens)
        request.kv_spans = VersionSpans((1, version) for version in self.kv)
        request.freeze_versions(version)
        if error is None:
            is_cut = count < len(self.completion.tokens)
            request.status, request.finish_reason = Status.COMPLETED, "length" if is_cut else "stop"
            return
        is_abort = isinstance(error, RequestAbortedError)
        request.status, request.finish_reason = Status.FAILED, "abort" if is_abort else "error"
        request.add_event_error_nontransient(error)
        request.add_event_fail()


class FakeLLM:
    """An LLM whose completions a script gives. Has LLM's methods for a training loop.

    Each step generates a token of every unfinished request, under the version that is served then:
    `submit`, `step`, an update and `collect` make requests of several versions. One thread at a
    time may call it.

    weights: tensors of the latest update, by name. calls: names of the control calls that did
    something, in order.
    """

    def __init__(
        self,
        script: Script = echo,
        tokenizer: Tokenizer | Any | None = None,
        *,
        weights_version: int = 0,
        seed: int = 0,
        kv_cache_management_mode: KVCacheManagementMode | str = KVCacheManagementMode.PERSIST,
    ) -> None:
        """`script` answers prompts. The other arguments are those of LLM."""
        self.tokenizer = tokenizer_of(None, tokenizer)
        self.seed, self.weights_version = seed, weights_version
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self._script, self._machine = script, StateMachine()
        self._default_mode = self._mode = _mode_of(kv_cache_management_mode)
        self._released: set[str] = set()
        self._samples: dict[int, _Sample] = {}  # unfinished, by request id
        self._open: dict[int, list[DynamicInferenceRequest]] = {}  # groups, by id
        self._finished: dict[int, RolloutGroup] = {}  # in order of completion
        self._num_submitted = 0
        self._ended: list[DynamicInferenceRequest] = []

    @property
    def state(self) -> EngineState:
        """The state after the latest control call."""
        return self._machine.state

    @property
    def released(self) -> set[str]:
        """The resources whose memory is released: "kv_cache", "weights"."""
        return set(self._released)

    # ---- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        progress: bool = False,
        *,
        priority: int = 0,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Run prompts to their end, as LLM.generate does."""
        groups, is_single = as_groups(prompts, sampling_params, n)
        requests = [request for group in self._begin(groups) for request in group]
        try:
            while any(request.request_id in self._samples for request in requests):
                self.step()
        except BaseException:
            for request in requests:
                self._samples.pop(request.request_id, None)
            raise
        return requests[0] if is_single and n == 1 else requests

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        *,
        priority: int = 0,
    ) -> list[int]:
        """Queue n samples of each prompt. Returns one group id per prompt."""
        groups, _ = as_groups(prompts, sampling_params, n)
        begun = {group[0].request_id: group for group in self._begin(groups)}
        self._open |= begun
        return list(begun)

    def collect(
        self, num_groups: int | None = None, timeout_s: float | None = None
    ) -> list[RolloutGroup]:
        """Step until `num_groups` submitted groups are finished (None: all), and return those.

        A fake step takes no time: `timeout_s` of 0 returns what is finished, any other waits.
        """
        if num_groups is not None and num_groups < 0:
            raise InvalidRequestError(f"num_groups={num_groups} must be 0 or more, or None for all")
        wanted = len(self._open) + len(self._finished)
        wanted = wanted if num_groups is None else min(num_groups, wanted)
        while len(self._finished) < wanted and timeout_s != 0:
            self.step()
        return [self._finished.pop(group_id) for group_id in list(self._finished)[:wanted]]

    def abort(self, group_ids: Sequence[int]) -> list[RolloutGroup]:
        """End groups now, in any state. Their requests are FAILED and keep the tokens they have."""
        for group_id in group_ids:
            if group_id not in self._open and group_id not in self._finished:
                raise EngineStateError(f"group {group_id} is unknown, or was returned already")
        for group_id in group_ids:
            for request in self._open.get(group_id, ()):
                if request.request_id in self._samples:
                    self._end(request.request_id, RequestAbortedError("aborted by its owner"))
        self._close_groups()
        return [self._finished.pop(group_id) for group_id in dict.fromkeys(group_ids)]

    def has_unfinished(self, group_ids: Sequence[int]) -> bool:
        """Return whether one of these submitted groups is unfinished."""
        return any(group_id in self._open for group_id in group_ids)

    def step(self) -> None:
        """Generate one token of each unfinished request. Raises EngineStateError unless RUNNING."""
        self._machine.require(EngineState.RUNNING, to="step")
        for request_id, sample in list(self._samples.items()):
            if not sample.is_complete:
                sample.add_token(self.weights_version)
            if sample.is_complete:
                self._end(request_id)
        self._close_groups()

    # ---- control

    def pause(self) -> None:
        """RUNNING -> PAUSED."""
        self._run(PAUSE)

    def unpause(self) -> None:
        """PAUSED -> RUNNING."""
        self._run(UNPAUSE)

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = (KV_CACHE,),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """PAUSED -> SUSPENDED. Under "recompute" later steps write all KV anew."""
        with self._machine.command(SUSPEND) as is_first:
            if isinstance(release, str) or not set(release) <= set(OWNERS):
                raise ConfigError(f"release={release!r} must be a tuple of some of {list(OWNERS)}")
            if discard_weights and WEIGHTS not in release:
                raise ConfigError(f"discard_weights=True needs 'weights' in release={release!r}")
            chosen = self._default_mode if mode is None else _mode_of(mode)
        if is_first:
            self._mode = chosen
            self.calls.append("suspend")
        drops_kv = KV_CACHE in release and self._mode is KVCacheManagementMode.RECOMPUTE
        if drops_kv:
            for sample in self._samples.values():
                sample.kv.clear()
        if discard_weights:
            self.weights = {}
        released = [owner for owner in release if owner not in self._released]
        self._released.update(release)
        return SuspendReport(
            mode=self._mode.value,
            released_by_owner=dict.fromkeys(released, 1),
            bytes_released=len(released),
            num_requests_requeued=len(self._samples) if drops_kv else 0,
        )

    def resume(self, only: str | None = None) -> ResumeReport:
        """SUSPENDED -> PAUSED, once everything is restored."""
        if only is not None and only not in OWNERS:
            raise ConfigError(f"only={only!r} must be one of {list(OWNERS)}")
        restored = self._released if only is None else self._released & {only}
        if self._released - restored and self.state is EngineState.SUSPENDED:
            self.calls.append(f"resume {only}")
        else:
            self._run(RESUME)
        self._released = self._released - restored
        return ResumeReport(
            mode=self._mode.value,
            bytes_restored=len(restored),
            restored_by_owner=dict.fromkeys(sorted(restored), 1),
        )

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Keep the tensors in `weights`, and serve `version` (None: the next one)."""
        self._machine.require_update(in_flight=in_flight)
        if WEIGHTS in self._released:
            raise EngineStateError(
                "cannot update weights: the weights' memory is released; "
                "resume(only='weights') first"
            )
        version = next_version(self.weights_version, version)
        weights = by_name(named_tensors)
        for name, tensor in weights.items():
            if not bool(tensor.isfinite().all()):
                raise WeightUpdateError(f"{name!r} holds values that are not finite")
        self.calls.append("update_weights")
        self.weights, self.weights_version = weights, version
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        return WeightUpdateReport(
            version=version, seconds=0.0, stall_seconds=0.0, num_bytes=num_bytes, checksum=""
        )

    def set_generation_epoch(self, version: int) -> None:
        """Serve `version` without new weights."""
        self._machine.require_legal(SET_GENERATION_EPOCH)
        self.weights_version = next_version(self.weights_version, version)
        self.calls.append("set_generation_epoch")

    def stats(self) -> EngineStats:
        """Return counters of requests and control calls. Fields that a fake does not have are 0."""
        values: dict[str, Any] = {
            f.name: () if "tuple" in str(f.type) else 0 for f in fields(EngineStats)
        }
        values |= {
            "state": self.state,
            "weights_version": self.weights_version,
            "num_running": len(self._samples),
            "num_finished": sum(request.succeeded() for request in self._ended),
            "num_failed": sum(request.failed() for request in self._ended),
            "num_generated_tokens": sum(request.num_generated_tokens for request in self._ended),
            "num_suspends": self.calls.count("suspend"),
            "num_weight_updates": self.calls.count("update_weights"),
        }
        return EngineStats(**values)

    def shutdown(self) -> None:
        """End, from any state. Unfinished requests are FAILED, and later calls are refused."""
        for request_id in list(self._samples):
            self._end(request_id, RequestAbortedError("the engine was shut down"))
        self._close_groups()
        self._machine.state = EngineState.STOPPED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # ---- parts

    def _begin(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]]
    ) -> list[list[DynamicInferenceRequest]]:
        """Queue the samples of each group. Raises InvalidRequestError before any is queued."""
        encoded = [(self._ids_of(prompt), prompt, each) for prompt, each in groups]
        return [
            [self._one(ids, prompt, params) for params in each] for ids, prompt, each in encoded
        ]

    def _ids_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("a text prompt needs a tokenizer, and there is none")
            return encode_prompt(self.tokenizer, prompt)
        ids = [int(token) for token in prompt]
        if not ids:
            raise InvalidRequestError("the prompt is empty; give it at least one token")
        if min(ids) < 0:
            raise InvalidRequestError(f"token id {min(ids)} is not in [0, 2**31)")
        return ids

    def _one(
        self, ids: list[int], prompt: Prompt, params: SamplingParams
    ) -> DynamicInferenceRequest:
        request_id = self._num_submitted
        seed = mix_seed(self.seed, request_id) if params.seed is None else params.seed
        answer = self._script(ids, seed)
        completion = answer if isinstance(answer, Completion) else Completion(tokens=answer)
        limit = params.num_tokens_to_generate
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_tokens=torch.tensor(ids, dtype=torch.int64),
            sampling_params=params,
            seed=seed,
            status=Status.ACTIVE_AND_GENERATING_TOKENS,
            weights_version=self.weights_version,
        )
        self._samples[request_id] = _Sample(
            request=request,
            completion=completion,
            num_wanted=len(completion.tokens[:limit]),
        )
        self._num_submitted += 1
        return request

    def _end(self, request_id: int, error: RolloutError | None = None) -> None:
        sample = self._samples.pop(request_id)
        sample.end(self.weights_version, error, self.tokenizer)
        self._ended.append(sample.request)

    def _close_groups(self) -> None:
        for group_id, requests in list(self._open.items()):
            if not any(request.request_id in self._samples for request in requests):
                self._finished[group_id] = RolloutGroup(group_id=group_id, requests=requests)
                del self._open[group_id]

    def _run(self, transition: Transition) -> None:
        with self._machine.command(transition) as must_run:
            if must_run:
                self.calls.append(transition.name)


class FakeAsyncLLM:
    """AsyncLLM's methods for a training loop, over a FakeLLM.

    `token_wait` is awaited before each step: by default other tasks run between two tokens. While
    `llm` is not RUNNING, requests wait.
    """

    def __init__(
        self, llm: FakeLLM, token_wait: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    ) -> None:
        self.llm, self.tokenizer = llm, llm.tokenizer
        self._token_wait, self._has_changed = token_wait, asyncio.Event()

    @property
    def state(self) -> EngineState:
        """The state of `llm`."""
        return self.llm.state

    @property
    def weights_version(self) -> int:
        """The version that `llm` serves."""
        return self.llm.weights_version

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        *,
        priority: int = 0,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Run prompts to their end, as AsyncLLM.generate does. Cancelling aborts them."""
        _, is_single = as_groups(prompts, sampling_params, n)
        group_ids = self.llm.submit(prompts, sampling_params, n)
        try:
            while self.llm.has_unfinished(group_ids):
                await self._token_wait()
                while self.state is not EngineState.RUNNING and self.llm.has_unfinished(group_ids):
                    self._has_changed.clear()
                    await self._has_changed.wait()
                if self.llm.has_unfinished(group_ids):
                    self.llm.step()
        finally:
            groups = self.llm.abort(group_ids)  # finished ones are returned as they are
        requests = [request for group in groups for request in group.requests]
        return requests[0] if is_single and n == 1 else requests

    async def pause(self) -> None:
        """RUNNING -> PAUSED."""
        self.llm.pause()

    async def unpause(self) -> None:
        """PAUSED -> RUNNING."""
        self.llm.unpause()
        self._has_changed.set()

    async def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = (KV_CACHE,),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """PAUSED -> SUSPENDED."""
        return self.llm.suspend(mode, release, discard_weights)

    async def resume(self, only: str | None = None) -> ResumeReport:
        """SUSPENDED -> PAUSED, once everything is restored."""
        return self.llm.resume(only)

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Keep the tensors in `llm.weights`, and serve `version`."""
        return self.llm.update_weights(named_tensors, version, in_flight)

    async def set_generation_epoch(self, version: int) -> None:
        """Serve `version` without new weights."""
        self.llm.set_generation_epoch(version)

    async def stats(self) -> EngineStats:
        """Return the counters of `llm`."""
        return self.llm.stats()

    async def shutdown(self) -> None:
        """End, from any state. Unfinished requests are FAILED."""
        self.llm.shutdown()
        self._has_changed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()
