"""DynamicInferenceRequest: a request and its result, or one segment of the request.

`rollout.engine.input_processor` creates it, and only OutputProcessor writes it while an engine runs
it. DynamicInferenceRequestRecord merges a request's segments into one object, which users get.
`rollout.apis`, `rollout.coordinator`, `rollout.serve` and `trainer_hooks` read it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self

from rollout.errors import InvalidRequestError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.codec import SPANS, FieldCodec, encode_fields
from rollout.requests.columns import (
    ARRAY_FIELDS,
    TOP_N_FIELDS,
    Array,
    ColumnStore,
    as_array,
    lists_when_read,
)
from rollout.requests.event import DynamicInferenceEvent, EventLog
from rollout.requests.request import InferenceRequest, Status, VLMInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans

_METADATA_TYPES: tuple[tuple[str, torch.dtype, bool], ...] = (
    ("temperature", torch.float32, True),
    ("top_k", torch.int32, True),
    ("top_p", torch.float32, True),
    ("min_p", torch.float32, True),
    ("termination_id", torch.int64, True),
    ("return_log_probs", torch.bool, False),
    ("skip_prompt_log_probs", torch.bool, False),
    ("top_n_logprobs", torch.int32, False),
)


class _BlockHashes:
    """Descriptor of `precomputed_block_hashes`, which are computed at the first read. Hashes that
    were set are returned unchanged. Otherwise the hashes of the prompt's complete blocks are
    computed if prefix caching is on and the block size is known."""

    def __get__(self, request: DynamicInferenceRequest | None, owner: type) -> Any:
        if request is None:
            return None  # the field's default, for dataclasses
        stored, size = vars(request), request.block_size_tokens
        if not stored["precomputed_block_hashes"] and request.enable_prefix_caching and size:
            hashes = compute_block_hashes_batched(request.prompt_tokens, size)
            stored["precomputed_block_hashes"] = hashes
        return stored["precomputed_block_hashes"] or []

    def __set__(self, request: DynamicInferenceRequest, hashes: list[int] | None) -> None:
        vars(request)["precomputed_block_hashes"] = list(hashes) if hashes else None


@lists_when_read
@dataclass(kw_only=True, eq=False)
class DynamicInferenceRequest(EventLog, InferenceRequest, ColumnStore):
    """A segment of a request: a prompt, and the tokens generated until the end or a checkpoint.

    Positions count over prompt and generated tokens. Values per token may be given as NumPy arrays,
    which become lists when they are read. While an engine runs the request, these values are arrays
    that grow.

    prompt_tokens: int64 [num_prompt_tokens]; a list is converted. Raises InvalidRequestError unless
        it has one dimension.
    finish_reason: "stop", "length", "abort" or "error"; None while unfinished.
    stop_reason: the id of `stop_token_ids`, or the stop word, that ended the request; None if
        something else ended it, such as an end token or the length.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache; None before the
        prefill. Samples forked from another sample have that sample's number.
    weights_version: the weights version under which the request entered.
    policy_spans: the version that sampled each position. Positions of the original prompt have
        `weights_version`.
    kv_spans: the version that wrote each position's KV; later positions are not written yet.
    kv_versions_are_bounds: whether `kv_spans` has, for each position, the oldest version that may
        have written its KV. The true version may be later, up to the version of the policy.
    policy_clock, kv_clock: the current versions from which staleness is counted; None until a
        record sets them. `completed_at_version` replaces both once it is set.
    context_kv_version_min, context_kv_version_mean: for each generated token, the oldest and the
        mean KV version of the context that it attended to.
    latency, ttft: seconds from the request's entry to its end, and to its first token.
    routing_indices: the experts that computed each token, int16 [num_tokens - 1, layers with
        experts, experts per token]; None unless `record_routing` is set. Row p belongs to the
        forward pass of position p; the last token has no pass. Ids are the checkpoint's, without
        shared experts. Unknown rows are -1, and a segment may lack its last rows.
    """

    prompt_tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    generated_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    priority: int = 0
    seed: int | None = None
    stop_word_ids: list[list[int]] | None = None
    finished_chunk_token_count: int = 0
    num_cached_tokens: int | None = None
    latency: float | None = None
    ttft: float | None = None
    routing_indices: torch.Tensor | None = None
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    precomputed_block_hashes: _BlockHashes = _BlockHashes()
    weights_version: int = 0
    completed_at_version: int | None = None
    policy_clock: int | None = None
    kv_clock: int | None = None
    policy_spans: VersionSpans = field(default_factory=VersionSpans)
    kv_spans: VersionSpans = field(default_factory=VersionSpans)
    kv_versions_are_bounds: bool = False
    context_kv_version_min: list[int] = field(default_factory=list)
    context_kv_version_mean: list[float] = field(default_factory=list)

    _codecs: ClassVar[Mapping[str, FieldCodec]] = {
        **InferenceRequest._codecs,
        "policy_spans": SPANS,
        "kv_spans": SPANS,
        "events": FieldCodec(
            lambda events: [event.serialize() for event in events],
            lambda encoded: [DynamicInferenceEvent.deserialize(event) for event in encoded],
        ),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompt_tokens = torch.as_tensor(self.prompt_tokens, dtype=torch.int64)
        if self.prompt_tokens.dim() != 1:
            shape = list(self.prompt_tokens.shape)
            raise InvalidRequestError(f"prompt_tokens of shape {shape} must have one dimension")
        self.hold_arrays()
        if not len(self.policy_spans):
            self.policy_spans.append(len(self.prompt_tokens), self.weights_version)

    def __str__(self) -> str:
        status = None if self.status is None else self.status.name
        return (
            f"{type(self).__name__}(request_id={self.request_id}, status={status}, "
            f"prompt of {len(self.prompt_tokens)}, generated {self.num_generated_tokens} tokens)"
        )

    # ---- lengths and parameters

    @property
    def num_generated_tokens(self) -> int:
        """Number of generated tokens of this segment."""
        return len(self.column("generated_tokens"))

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens of this segment."""
        return len(self.prompt_tokens) + self.num_generated_tokens

    @property
    def remaining_prompt_tokens(self) -> torch.Tensor:
        """Prompt tokens that are not prefilled yet, int64, as a view of `prompt_tokens`."""
        return self.prompt_tokens[self.finished_chunk_token_count :]

    @property
    def remaining_prompt_length(self) -> int:
        """Number of prompt tokens that are not prefilled yet."""
        return len(self.prompt_tokens) - self.finished_chunk_token_count

    @property
    def tracked_metadata(self) -> list[Any]:
        """Sampling parameters in the order of `get_metadata_types`. A missing value is -1."""
        params = self.sampling_params or SamplingParams()
        values = (getattr(params, name) for name, _, _ in _METADATA_TYPES)
        return [-1 if value is None else value for value in values]

    @staticmethod
    def get_metadata_types() -> list[tuple[str, torch.dtype, bool]]:
        """Return (name, dtype, whether the device needs it) for each tracked sampling parameter."""
        return list(_METADATA_TYPES)

    def succeeded(self) -> bool:
        """Return whether the request completed without a non-transient error."""
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        """Return whether a non-transient error ended the request."""
        return self.status is Status.FAILED

    # ---- versions

    @property
    def policy_versions(self) -> torch.Tensor:
        """The version that sampled each generated token: int32 [num_generated_tokens]."""
        versions = self.stamped_policy_spans().to_array()
        return torch.from_numpy(versions[len(self.prompt_tokens) :])

    @property
    def policy_staleness(self) -> torch.Tensor | None:
        """Age of each position's policy: int32 [num_tokens]; None while no clock is set."""
        now = self.policy_clock if self.completed_at_version is None else self.completed_at_version
        return None if now is None else self.staleness_at(now)[0]

    @property
    def kv_cache_staleness(self) -> torch.Tensor | None:
        """Age of each position's KV: int32 [num_tokens]; None while no clock is set."""
        now = self.kv_clock if self.completed_at_version is None else self.completed_at_version
        return None if now is None else self.staleness_at(now)[1]

    def staleness_at(self, version: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (policy staleness, KV staleness): `version` minus the version of each position.
        Both are int32 [num_tokens] on the CPU. A position whose KV is not written has the age 0."""
        return (
            _ages(self.stamped_policy_spans(), version),
            _ages(self._padded(self.kv_spans, version), version),
        )

    def stamped_policy_spans(self) -> VersionSpans:
        """Return a copy of `policy_spans` that covers all positions. Positions without a version
        get the policy clock, or `weights_version` if no clock is set."""
        clock = self.weights_version if self.policy_clock is None else self.policy_clock
        return self._padded(self.policy_spans, clock)

    def freeze_versions(self, version: int, *, num_sampled_before: int = 0) -> None:
        """Fix the staleness of a request that ended at weights version `version`.

        Positions without KV get `version`. The last generated token, whose KV is never written,
        gets the version that sampled it. `num_sampled_before` is the number of tokens at the end of
        the prompt that were generated in earlier segments.
        """
        self.completed_at_version = version
        self.policy_spans = self.stamped_policy_spans()
        num_unwritten = self.num_tokens - len(self.kv_spans)
        if num_unwritten and (self.num_generated_tokens or num_sampled_before):
            self.kv_spans.append(num_unwritten - 1, version)
            self.kv_spans.append(1, self.policy_spans.version_at(self.num_tokens - 1))
        else:
            self.kv_spans.append(num_unwritten, version)

    def context_kv_versions(
        self, start: int = 0
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Return the oldest and the mean KV version of the contexts of generated tokens [start, n).
        The arrays are int32 and float64 [n - start]. A complete request stores them. Otherwise they
        are computed from `kv_spans`."""
        oldest, mean = self.column("context_kv_version_min"), self.column("context_kv_version_mean")
        num_generated = self.num_generated_tokens
        if len(oldest) == num_generated:
            return np.asarray(oldest[start:], np.int32), np.asarray(mean[start:], np.float64)
        # A token attends to all positions before it.
        return self.kv_spans.of_prefixes(len(self.prompt_tokens) + start, num_generated - start)

    def _padded(self, spans: VersionSpans, version: int) -> VersionSpans:
        """Return a copy of `spans` over all positions. Positions without a version get
        `version`."""
        padded = spans.copy()
        padded.append(self.num_tokens - len(spans), version)
        return padded

    # ---- copies

    def copy(self) -> Self:
        """Return a complete copy with its own lists and spans. The copy shares tensors, events, and
        arrays that were not read as lists."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (list, VersionSpans)):
                vars(copied)[name] = value.copy()
        for name in TOP_N_FIELDS:
            if (values := getattr(self, name)) is not None:
                setattr(copied, name, [value and dict(value) for value in values])
        copied.complete()
        return copied

    def complete(self) -> None:
        """Compute the context KV versions, and move arrays to the columns. The versions are
        computed from `kv_spans`. They are left out if `kv_spans` does not cover the contexts."""
        num_missing = self.num_generated_tokens - len(self.column("context_kv_version_min"))
        if num_missing and len(self.kv_spans) >= self.num_tokens - 1:
            oldest, mean = self.context_kv_versions()
            # As arrays, which `hold_arrays` moves to the columns.
            vars(self).update(context_kv_version_min=oldest, context_kv_version_mean=mean)
        self.hold_arrays()

    # ---- wire

    def serialize(self) -> dict[str, Any]:
        """Return all fields except `event_add_engine` as a dictionary for msgpack."""
        encoded = super().serialize()
        del encoded["event_add_engine"]
        return encoded

    def serialize_apart(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the dictionary of `serialize` in two parts: plain values, and arrays per token.
        Fields with their default values are left out. `deserialize` reads the union of both parts.
        """
        found = {name: as_array(self.column(name)) for name in ARRAY_FIELDS}
        columns = {name: column for name, column in found.items() if column is not None}
        encoded = encode_fields(
            self,
            self._codecs,
            without={*columns, "event_add_engine"},
            without_defaults=True,
        )
        return encoded, columns


def _ages(spans: VersionSpans, version: int) -> torch.Tensor:
    """Return `version` minus each entry: int32 [len(spans)]."""
    return torch.from_numpy(np.int32(version) - spans.to_array())


@dataclass(kw_only=True, eq=False)
class DynamicVLMInferenceRequest(DynamicInferenceRequest, VLMInferenceRequest):
    """A segment whose prompt has images."""
