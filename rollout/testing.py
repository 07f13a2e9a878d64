"""FakeLLM and FakeAsyncLLM: LLMs without a model, for tests of training loops.

    llm = FakeLLM(lambda prompt, seed: [seed % 7, 2])
    request = llm.generate([5, 6], SamplingParams(return_log_probs=True))

A script gives the tokens of each prompt. The result is a real request, with a weights version for
each token. A FakeLLM keeps the weights of the latest update by name. Like LLM, it refuses a call in
the wrong state. It serves no HTTP. Only tests import this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

import torch
from typing_extensions import Self

from rollout.apis.arguments import SamplingArgument, as_groups
from rollout.apis.llm import LLM
from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.commands import AsyncControlCalls, Command, R
from rollout.control.reports import (
    EngineStats,
    ResumeReport,
    SuspendReport,
    WeightChecksums,
    WeightUpdateReport,
)
from rollout.control.state import (
    PAUSE,
    QUIET,
    RESUME,
    SUSPEND,
    UNPAUSE,
    EngineState,
    StateMachine,
    Transition,
)
from rollout.engine.suspension import KV_CACHE, WEIGHTS, check_only, check_resources
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
from rollout.weights.update import NamedTensors, by_name
from rollout.weights.version import next_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A script's answer to a prompt.

    tokens: generated ids, of which at most `num_tokens_to_generate` are used.
    logprobs: one per token; None for -1.0 each.
    error: the message with which the request fails after its tokens; None if it completes.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    error: str | None = None


# A script gets the prompt's ids and the request's seed. It may return ids instead of
# Completion(tokens=ids).
Script = Callable[[list[int], int], Completion | Sequence[int]]


def echo(prompt: list[int], seed: int) -> list[int]:
    """Return the prompt. This is the default script."""
    return prompt


@dataclass(slots=True, kw_only=True)
class _Sample:
    """An unfinished request.

    num_wanted: number of tokens to generate.
    kv: the weights version that wrote the KV of each position so far.
    """

    request: DynamicInferenceRequest
    completion: Completion
    num_wanted: int
    kv: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.request.num_generated_tokens >= self.num_wanted

    def add_token(self, version: int) -> None:
        """Append one token under weights `version`, which also writes the missing KV."""
        request = self.request
        self.kv += [version] * (request.num_tokens - len(self.kv))
        request.generated_tokens.append(self.completion.tokens[request.num_generated_tokens])
        request.policy_spans.append(1, version)
        request.context_kv_version_min.append(min(self.kv))
        request.context_kv_version_mean.append(fmean(self.kv))

    def end(self, version: int, error: RolloutError | None, tokenizer: Tokenizer | None) -> None:
        """Complete the request, or fail it with `error` or the completion's own error. If there is
        a tokenizer, the text is decoded."""
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


class ScriptedRuntime:
    """The runtime of a FakeLLM, with the methods of InProcessRuntime that LLM calls.

    weights: the tensors of the latest update, by name; empty after they were discarded.
    calls: the names of the control calls that had an effect, in order.
    released: names of the resources whose memory is released.
    """

    def __init__(
        self,
        script: Script,
        tokenizer: Tokenizer | None,
        weights_version: int,
        seed: int,
        default_mode: KVCacheManagementMode | str,
    ) -> None:
        self._script, self.tokenizer, self.seed = script, tokenizer, seed
        self.weights_version = weights_version
        self.weights: dict[str, torch.Tensor] = {}
        self._lacks_weights = False  # True after they were discarded
        self.calls: list[str] = []
        self.released: set[str] = set()
        # The default KV mode of a suspend, and the KV mode of the latest suspend.
        self._default_mode = self._mode = as_enum("mode", KVCacheManagementMode, default_mode)
        self._machine = StateMachine()
        self._samples: dict[int, _Sample] = {}  # unfinished samples by request id
        self._ended: list[DynamicInferenceRequest] = []
        self._num_taken = 0  # entries of `_ended` that `take_ended` has returned
        self._num_submitted = 0

    @property
    def state(self) -> EngineState:
        return self._machine.state

    # ---- requests

    def submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[list[int]]:
        """Queue all groups or none. Returns the request ids of each group. Raises
        InvalidRequestError for a malformed prompt, and EngineStateError after `shutdown`."""
        self._machine.require(EngineState.RUNNING, *QUIET, to="add a request")
        encoded = [(self._ids_of(prompt), prompt, each) for prompt, each in groups]
        return [
            [self._add(ids, prompt, each) for each in params] for ids, prompt, params in encoded
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

    def _add(self, ids: list[int], prompt: Prompt, params: SamplingParams) -> int:
        request_id = self._num_submitted
        seed = mix_seed(self.seed, request_id) if params.seed is None else params.seed
        answer = self._script(ids, seed)
        completion = answer if isinstance(answer, Completion) else Completion(tokens=answer)
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_tokens=torch.tensor(ids, dtype=torch.int64),
            sampling_params=params,
            seed=seed,
            status=Status.ACTIVE_AND_GENERATING_TOKENS,
            weights_version=self.weights_version,
        )
        num_wanted = len(completion.tokens[: params.num_tokens_to_generate])
        self._samples[request_id] = _Sample(
            request=request, completion=completion, num_wanted=num_wanted
        )
        self._num_submitted += 1
        return request_id

    def advance(self, timeout_s: float | None) -> None:
        """Generate one token of each unfinished request. Raises EngineStateError unless RUNNING."""
        self._machine.require(EngineState.RUNNING, to="step")
        for request_id, sample in list(self._samples.items()):
            if not sample.is_complete:
                sample.add_token(self.weights_version)
            if sample.is_complete:
                self._end(request_id)

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Return the requests that ended since the last call."""
        ended = self._ended[self._num_taken :]
        self._num_taken = len(self._ended)
        return ended

    def abort(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequest]:
        """End requests now, in any state. Returns all requests that `take_ended` would return."""
        for request_id in request_ids:
            self._end(request_id, RequestAbortedError("aborted by its owner"))
        return self.take_ended()

    def drop(self, request_ids: Sequence[int]) -> None:
        """Remove unfinished requests without a result."""
        for request_id in request_ids:
            self._samples.pop(request_id, None)

    def _end(self, request_id: int, error: RolloutError | None = None) -> None:
        """Complete an unfinished request, or fail it with `error`."""
        sample = self._samples.pop(request_id)
        sample.end(self.weights_version, error, self.tokenizer)
        self._ended.append(sample.request)

    # ---- control calls: the methods that commands call

    def do(self, command: Command[R]) -> R:
        """Run a control call. Raises EngineStateError if the call is illegal now."""
        self._machine.require_legal(command.transition)
        return command.run(self)

    def pause(self) -> None:
        self._enter(PAUSE)

    def unpause(self) -> None:
        self._require_weights("unpause")
        self._enter(UNPAUSE)

    def _require_weights(self, what: str) -> None:
        if self._lacks_weights:
            raise EngineStateError(
                f"cannot {what}: the weights were discarded, or an update of them was cut off; "
                "commit a full update first"
            )

    def _enter(self, transition: Transition) -> None:
        with self._machine.command(transition) as must_run:
            if must_run:
                self.calls.append(transition.name)

    def suspend(
        self, mode: str | None, release: Sequence[str], discard_weights: bool
    ) -> SuspendReport:
        with self._machine.command(SUSPEND) as is_first:
            check_resources(release, discard=discard_weights)
            wanted = self._default_mode if mode is None else mode
            chosen = as_enum("mode", KVCacheManagementMode, wanted)
        if is_first:
            self._mode = chosen
            self.calls.append("suspend")
        drops_kv = KV_CACHE in release and self._mode is KVCacheManagementMode.RECOMPUTE
        if drops_kv:
            for sample in self._samples.values():
                sample.kv.clear()
        if discard_weights:
            self.weights, self._lacks_weights = {}, True
        released = [resource for resource in release if resource not in self.released]
        self.released.update(release)
        return SuspendReport(
            mode=self._mode.value,
            released_by_owner=dict.fromkeys(released, 1),
            bytes_released=len(released),
            num_requests_requeued=len(self._samples) if drops_kv else 0,
        )

    def resume(self, only: str | None) -> ResumeReport:
        check_only(only)
        restored = self.released if only is None else self.released & {only}
        if self.released - restored and self.state is EngineState.SUSPENDED:
            self.calls.append(f"resume {only}")
        else:
            self._enter(RESUME)
        self.released = self.released - restored
        return ResumeReport(
            mode=self._mode.value,
            bytes_restored=len(restored),
            restored_by_owner=dict.fromkeys(sorted(restored), 1),
        )

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None, in_flight: bool
    ) -> WeightUpdateReport:
        self._machine.require_update(in_flight=in_flight)
        if WEIGHTS in self.released:
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
        self._lacks_weights = False
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        return WeightUpdateReport(
            version=version, seconds=0.0, stall_seconds=0.0, num_bytes=num_bytes, checksum=""
        )

    def set_generation_epoch(self, version: int) -> None:
        self._require_weights("set the generation epoch")
        self.weights_version = next_version(self.weights_version, version)
        self.calls.append("set_generation_epoch")

    def weight_checksums(self, start: int) -> WeightChecksums:
        raise ConfigError("FakeLLM computes no checksums; they need an LLM with a model")

    def weights_checksum(self) -> str:
        raise ConfigError("FakeLLM computes no checksums; they need an LLM with a model")

    def stats(self) -> EngineStats:
        """Return counters of requests and control calls. Fields that a fake lacks are 0."""
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

    def use_weight_transport(self, transport: object) -> None:
        raise ConfigError(f"FakeLLM has no weight transport ({transport!r}): push with WeightSync")

    def serve(self, config: object) -> tuple[str, int]:
        raise ConfigError("FakeLLM serves no HTTP; serve an LLM with a model")

    def shutdown(self) -> None:
        for request_id in list(self._samples):
            self._end(request_id, RequestAbortedError("the engine was shut down"))
        self._machine.state = EngineState.STOPPED


class FakeLLM(LLM):
    """An LLM that takes its completions from a script.

    Each step generates one token of every unfinished request, under the current weights version. So
    an update between `submit` and `collect` gives requests with several versions. After a suspend
    with mode "recompute", the next step writes all KV again.
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
        """`script` gives the tokens of each prompt. The other arguments are as in LLM."""
        own = tokenizer_of(None, tokenizer)
        mode = kv_cache_management_mode
        self._scripted = ScriptedRuntime(script, own, weights_version, seed, mode)
        self._set_up(self._scripted)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the latest update, by name."""
        return self._scripted.weights

    @property
    def calls(self) -> list[str]:
        """The names of the control calls that had an effect, in order."""
        return self._scripted.calls

    @property
    def released(self) -> set[str]:
        """The resources whose memory is released: "kv_cache", "weights"."""
        return set(self._scripted.released)

    def step(self) -> None:
        """Generate one token of each unfinished request. Raises EngineStateError unless RUNNING."""
        self._scripted.advance(None)
        self._take_ended()


class FakeAsyncLLM(AsyncControlCalls):
    """The methods of AsyncLLM that a training loop needs, over a FakeLLM. `token_wait` is awaited
    before each step. By default it lets other tasks run between two tokens. While `llm` is not
    RUNNING, requests wait."""

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
        """The weights version that `llm` serves."""
        return self.llm.weights_version

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        *,
        priority: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Generate until all samples have ended, and return the requests as AsyncLLM.generate does.
        `on_finished` is called at the end of each sample. Cancelling the task aborts the samples.
        """
        groups, is_single = as_groups(prompts, sampling_params, n)
        with self.llm._submitted(groups, priority) as group_ids:
            num_unfinished = len(groups) * n
            while num_unfinished:
                await self._token_wait()
                while self.state is not EngineState.RUNNING and self._num_unfinished(group_ids):
                    self._has_changed.clear()
                    await self._has_changed.wait()
                if self._num_unfinished(group_ids):
                    self.llm.step()
                num_before, num_unfinished = num_unfinished, self._num_unfinished(group_ids)
                if on_finished is not None:
                    for _ in range(num_before - num_unfinished):
                        on_finished()
        ended = self.llm.abort(group_ids)  # finished ones are returned as they are
        requests = [request for group in ended for request in group.requests]
        return requests[0] if is_single and n == 1 else requests

    def _num_unfinished(self, group_ids: Sequence[int]) -> int:
        self.llm._take_ended()
        return len(self.llm._groups.unfinished_requests(group_ids))

    async def do(self, command: Command[R]) -> R:
        """Run a control call. Raises EngineStateError if the call is illegal now."""
        try:
            return self.llm.do(command)
        finally:
            self._has_changed.set()

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Keep the tensors in `llm.weights`, and serve them as `version` (None: the next
        version)."""
        return self.llm.update_weights(named_tensors, version, in_flight)

    async def shutdown(self) -> None:
        """Stop `llm` for good, from any state. Unfinished requests are FAILED."""
        self.llm.shutdown()
        self._has_changed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()
