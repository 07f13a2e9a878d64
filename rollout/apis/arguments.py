"""Checks and converts the arguments of LLMs, and keeps the groups that an LLM has submitted.

Used by `rollout.apis.llm`, `rollout.apis.async_llm`, `rollout.apis.streaming` and
`rollout.testing`. `as_groups` and `config_with` change nothing. Only the LLM that owns a `Groups`
or `OneThread` changes it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout.config import CONFIG_HINTS, InferenceConfig
from rollout.errors import ConfigError, EngineStateError, InvalidRequestError
from rollout.keyword_hints import hint_of, remedy_of_unknown
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import params_of_sample
from rollout.text import Prompt

SamplingArgument = SamplingParams | Sequence[SamplingParams] | None

# Keyword parameters that LLM passes to AsyncLLM, and their defaults.
FLEET_DEFAULTS: Mapping[str, Any] = {
    "data_parallel_size": 1,
    "spawn": None,
    "coordinator_host": None,
    "coordinator_port": None,
    "coordinator_options": None,
    "max_engine_restarts": 3,
    "start_timeout_s": 1800.0,
    "launcher": None,
    "weight_transport": None,
}

# Iterable types that are not lists of token ids.
_NO_LISTS = (bytes, bytearray, memoryview, Mapping, Set)


def as_groups(
    prompts: Prompt | Sequence[Prompt], sampling_params: SamplingArgument, n: int
) -> tuple[list[tuple[Prompt, list[SamplingParams]]], bool]:
    """Return (each prompt with the parameters of its n samples, whether a single prompt was given).
    Raises InvalidRequestError for malformed prompts or parameters, and unless `n` is at least 1."""
    batch, is_single = as_batch(prompts)
    return list(zip(batch, _per_sample(sampling_params, len(batch), n), strict=True)), is_single


def as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return (list of prompts, whether a single prompt was given). A text or a flat list of ids is
    one prompt. Tensors, arrays and iterators count as lists. Raises InvalidRequestError for
    anything else. The ids themselves are not checked."""
    if isinstance(prompts, str):
        return [prompts], True
    if not _is_list(prompts):
        raise InvalidRequestError(f"prompts={prompts!r} must be text, token ids or a list of those")
    items: list[Any] = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if items and _is_id(items[0]):
        return [items], True
    for index, item in enumerate(items):
        if not isinstance(item, str) and not (_is_list(item) and isinstance(item, Sized)):
            raise InvalidRequestError(f"prompts[{index}]={item!r} must be text or token ids")
    return items, False


def _is_list(value: object) -> bool:
    is_scalar = getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not isinstance(value, _NO_LISTS) and not is_scalar


def _is_id(item: object) -> bool:
    return not isinstance(item, str) and not hasattr(item, "__len__")


def _per_sample(
    sampling_params: SamplingArgument, num_prompts: int, n: int
) -> list[list[SamplingParams]]:
    """Return the parameters of n samples for each prompt. A given seed is mixed into one seed per
    sample. Raises InvalidRequestError unless `sampling_params` is one SamplingParams for all
    prompts or a list with one for each, and unless `n` is an integer of at least 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidRequestError(f"n={n!r} must be an integer of at least 1")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        each = [sampling_params or SamplingParams()] * num_prompts
    else:
        is_list = isinstance(sampling_params, Iterable) and not isinstance(
            sampling_params, str | Mapping
        )
        given: Any = sampling_params
        each = list(given) if is_list else [given]
        for params in each:
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(
                    f"sampling_params={sampling_params!r:.200} must be SamplingParams, one for all "
                    "prompts or a list with one for each: SamplingParams(temperature=0), not a "
                    "dictionary"
                )
        if len(each) != num_prompts:
            raise InvalidRequestError(
                f"{len(each)} sampling_params for {num_prompts} prompts; give one for each, or one "
                "for all"
            )
    return [
        [params_of_sample(params, prompt_index, sample_index) for sample_index in range(n)]
        for prompt_index, params in enumerate(each)
    ]


def config_with(
    config: InferenceConfig | None, fields: Mapping[str, Any], *more_names: str
) -> InferenceConfig:
    """Return `config` with `fields` replaced. If `config` is None, the default config is used.
    `more_names` are other keywords that a user may have meant by an unknown one. Raises ConfigError
    for an unknown field, naming the most similar one, and for an invalid value."""
    if not isinstance(config, InferenceConfig | None):
        raise ConfigError(
            f"inference_config={config!r:.200} must be an InferenceConfig; fields of a dictionary "
            "may be given as keywords, **fields"
        )
    known = [field.name for field in dataclasses.fields(InferenceConfig)]
    for name, value in fields.items():
        if name in CONFIG_HINTS:
            raise ConfigError(hint_of(name, value, CONFIG_HINTS))
        if name not in known:
            remedy = remedy_of_unknown(
                name, [*known, *more_names], "see rollout.InferenceConfig", cutoff=0.6
            )
            raise ConfigError(f"{name}={value!r} is unknown; {remedy}")
    return (config or InferenceConfig()).replace(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All samples of one submitted prompt, in sample order, including failed samples."""

    group_id: int
    requests: list[DynamicInferenceRequest]


class Groups:
    """The submitted groups of one LLM. A group's id is the id of its first request."""

    def __init__(self) -> None:
        # Unfinished groups: group id -> samples by request id, in order. A running sample is None.
        self._open: dict[int, dict[int, DynamicInferenceRequest | None]] = {}
        self._group_of: dict[int, int] = {}  # request id of a running sample -> group id
        self._finished: dict[int, RolloutGroup] = {}  # in order of completion

    @property
    def num_submitted(self) -> int:
        """Number of groups that were submitted and not returned yet."""
        return len(self._open) + len(self._finished)

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def open(self, request_ids: Sequence[int]) -> int:
        """Register a group by the ids of its requests. Returns the group's id."""
        group_id = request_ids[0]
        self._open[group_id] = dict.fromkeys(request_ids)
        self._group_of.update(dict.fromkeys(request_ids, group_id))
        return group_id

    def add_finished(self, request: DynamicInferenceRequest) -> None:
        """Add a finished sample to its group. A request without a registered group is ignored."""
        group_id = self._group_of.pop(request.request_id, None)
        if group_id is None:  # added to the engine directly, or its group was dropped
            return
        samples = self._open[group_id]
        samples[request.request_id] = request
        requests = [sample for sample in samples.values() if sample is not None]
        if len(requests) == len(samples):
            self._finished[group_id] = RolloutGroup(group_id=group_id, requests=requests)
            del self._open[group_id]

    def num_wanted(self, num_groups: int | None) -> int:
        """Return the number of groups for which `collect(num_groups)` waits. Raises
        InvalidRequestError for a negative `num_groups`."""
        if num_groups is not None and num_groups < 0:
            raise InvalidRequestError(f"num_groups={num_groups} must be 0 or more, or None for all")
        return self.num_submitted if num_groups is None else min(num_groups, self.num_submitted)

    def has_unfinished(self, group_ids: Sequence[int]) -> bool:
        """Return whether any of these groups is unfinished."""
        return any(group_id in self._open for group_id in group_ids)

    def unfinished_requests(self, group_ids: Sequence[int]) -> list[int]:
        """Return the ids of the groups' samples that still run. Raises EngineStateError for a group
        that is unknown or was already returned."""
        for group_id in group_ids:
            if group_id not in self._open and group_id not in self._finished:
                raise EngineStateError(f"group {group_id} is unknown, or was returned already")
        return [
            request_id
            for group_id in group_ids
            for request_id, sample in self._open.get(group_id, {}).items()
            if sample is None
        ]

    def drop(self, group_id: int) -> list[int]:
        """Drop a group, if it is known. Returns the ids of its samples that still run."""
        if self._finished.pop(group_id, None) is not None or group_id not in self._open:
            return []
        left = self.unfinished_requests([group_id])
        for request_id in left:
            del self._group_of[request_id]
        del self._open[group_id]
        return left

    def take(self, group_id: int) -> RolloutGroup:
        return self._finished.pop(group_id)

    def take_finished(self, count: int) -> list[RolloutGroup]:
        """Remove up to `count` finished groups and return them, in order of completion."""
        return [self.take(group_id) for group_id in list(self._finished)[:count]]


class OneThread:
    """A lock for the thread that generates. Other threads get an error instead of waiting. Without
    it, another thread's steps end requests for which this thread waits."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def calling(self, method: str) -> Iterator[None]:
        """Hold the lock during the block. `method` names the caller in the message. Raises
        EngineStateError if another thread holds the lock."""
        if not self._lock.acquire(blocking=False):
            raise EngineStateError(
                f"cannot {method} while another thread is in generate, submit or collect of this "
                "LLM, or a ThreadedLLM steps it: one thread generates; AsyncLLM takes requests of "
                "many tasks at once"
            )
        try:
            yield
        finally:
            self._lock.release()
