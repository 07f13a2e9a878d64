"""InputProcessor: validates submitted requests and fills in defaults. It queues nothing.

`rollout.engine.build` creates it, and `rollout_vllm.engine` derives a class from it.
Engine.add_groups and Engine.add_record call it. It keeps the next free request id and the number of
new requests.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout.engine.output_processor import needs_prompt_scores
from rollout.errors import InvalidRequestError
from rollout.generated_text import StopStrings
from rollout.ranges import MAX_INT64, MIN_INT64
from rollout.requests.columns import TOKEN_COLUMNS
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import VLMInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.scheduling.admission import Admission, AdmissionLimits, admit, check_well_formed
from rollout.scheduling.stopping import StopRule, StopWord
from rollout.step.seeds import mix_seed
from rollout.text import Prompt, Tokenizer, encode_prompt

Group = tuple[Prompt, Sequence[SamplingParams]]
StopWordIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A valid request, ready to be queued.

    tokens: all tokens of the request; the first `num_prompt` are the original prompt. The samples
        of a prompt share this list.
    group_id: equal for the samples of one prompt; None for a single request.
    admission: whether the request can run here, and its maximum length.
    sampling_params, seed: the original values, even if another engine began the request.
    wants_prompt_logprobs: whether this engine must score the prompt.
    """

    record: DynamicInferenceRequestRecord
    tokens: list[int]
    num_prompt: int
    group_id: int | None
    admission: Admission
    sampling_params: SamplingParams
    seed: int
    stop_rule: StopRule
    wants_prompt_logprobs: bool


class InputProcessor:
    """Checks requests, and assigns request ids, group ids and default seeds. `end_ids` are the end
    tokens of a request without a `termination_id`. A request without a seed derives one from `seed`
    and `num_submitted`, the number of new requests before it."""

    def __init__(
        self,
        *,
        limits: AdmissionLimits,
        tokenizer: Tokenizer | None,
        end_ids: tuple[int, ...],
        block_size: int,
        enable_prefix_caching: bool,
        seed: int,
    ) -> None:
        self._limits, self._tokenizer, self.end_ids = limits, tokenizer, end_ids
        self._block_size, self._enable_prefix_caching = block_size, enable_prefix_caching
        self.seed = seed
        self.num_submitted = 0
        self._next_id = 0
        # Group ids are not request ids: a caller may reuse an id while its old group still waits.
        self._num_groups = 0

    @property
    def max_sequence_length(self) -> int:
        """Largest number of tokens in prompt and output together."""
        return self._limits.max_sequence_length

    def process_groups(
        self,
        groups: Sequence[Group],
        request_ids: Sequence[int] | None,
        priority: int,
        weights_version: int,
        in_use: Container[int],
    ) -> list[list[ProcessedRequest]]:
        """Check groups of (prompt, parameters of each sample). Returns their requests, group by
        group.

        `request_ids` has an id for each sample, group after group; None takes the next free ids.
        Raises InvalidRequestError if any request is malformed or any id is `in_use`. No id and no
        seed is assigned in that case.
        """
        if not isinstance(priority, int) or not MIN_INT64 <= priority <= MAX_INT64:
            raise InvalidRequestError(
                f"priority={priority!r} must be an integer in [{MIN_INT64}, {MAX_INT64}]"
            )
        checked = [self._checked_group(prompt, params_list) for prompt, params_list in groups]
        num_samples = sum(len(params_list) for _, params_list in groups)
        ids = iter(self._checked_ids(num_samples, request_ids, in_use))
        processed = []
        for (prompt, params_list), (tokens, stop_words) in zip(groups, checked, strict=True):
            self._num_groups += 1
            group_id = self._num_groups if len(params_list) > 1 else None
            group = []
            for params, words in zip(params_list, stop_words, strict=True):
                record = self._new_record(
                    next(ids), prompt, tokens, params, words, priority, weights_version
                )
                group.append(self._processed(record, tokens, params, words, group_id))
            processed.append(group)
        return processed

    def _new_record(
        self,
        request_id: int,
        prompt: Prompt,
        tokens: list[int],
        params: SamplingParams,
        stop_words: StopWordIds,
        priority: int,
        weights_version: int,
    ) -> DynamicInferenceRequestRecord:
        seed = mix_seed(self.seed, self.num_submitted) if params.seed is None else params.seed
        self.num_submitted += 1
        columns: dict[str, Any] = {c.field: [] for c in TOKEN_COLUMNS if c.is_wanted(params)}
        return DynamicInferenceRequestRecord.from_request(
            DynamicInferenceRequest(
                request_id=request_id,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_tokens=torch.tensor(tokens, dtype=torch.int64),
                sampling_params=params,
                priority=priority,
                seed=seed,
                stop_word_ids=_id_lists(stop_words),
                weights_version=weights_version,
                block_size_tokens=self._block_size,
                enable_prefix_caching=self._enable_prefix_caching,
                **columns,
            )
        )

    def process_record(
        self, record: DynamicInferenceRequestRecord, in_use: Container[int]
    ) -> ProcessedRequest:
        """Check a request that another engine began. Returns a request that continues after its
        last token.

        Sets the stop word ids of `record`'s segments, encoded by this engine's tokenizer. Raises
        InvalidRequestError, before any change, if the record has ended, was never in an engine or
        does not fit, or if its id is `in_use`.
        """
        request_id, first, last = record.request_id, record[0], record.current
        if request_id in in_use:
            raise InvalidRequestError(f"request id {request_id} is in use")
        if last.completed_at_version is not None:
            raise InvalidRequestError(f"request {request_id} has ended; nothing is left to do")
        if any(isinstance(segment, VLMInferenceRequest) for segment in record.requests):
            raise InvalidRequestError(
                f"the record of request {request_id} has images, and this engine takes text only"
            )
        params = first.sampling_params
        if params is None or last.seed is None:
            raise InvalidRequestError(
                f"the record of request {request_id} has no sampling params or no seed: it "
                "was never in an engine; use add_request"
            )
        unfinished = DynamicInferenceRequestRecord([*record.requests], record.latency)
        if last.num_generated_tokens:
            unfinished.checkpoint()
        tokens: list[int] = unfinished.current.prompt_tokens.tolist()
        check_well_formed(tokens, unfinished.current.sampling_params or params, self._limits)
        self._check_token_ids(params)
        stop_words = self._stop_word_ids(params)
        processed = self._processed(unfinished, tokens, params, stop_words, group_id=None)
        num_tokens, admission = len(tokens), processed.admission
        if admission.error is None and num_tokens >= admission.max_length:
            raise InvalidRequestError(
                f"request {request_id} already has {num_tokens} tokens, and this engine allows at "
                f"most {admission.max_length}"
            )
        for segment in unfinished.requests:
            segment.stop_word_ids = _id_lists(stop_words)
        self._next_id = max(self._next_id, request_id + 1)
        return processed

    def _processed(
        self,
        record: DynamicInferenceRequestRecord,
        tokens: list[int],
        params: SamplingParams,
        stop_words: StopWordIds,
        group_id: int | None,
    ) -> ProcessedRequest:
        """Return a checked request, ready to be queued. `tokens` is the prompt of the record's
        current segment. `params` are the original parameters of the request."""
        num_prompt, seed = len(record[0].prompt_tokens), record.current.seed
        assert seed is not None
        admission = admit(record.request_id, num_prompt, params, self._limits)
        eos_ids, stop_token_ids = self._eos_ids(params), params.stop_token_ids or ()
        strings = None
        if params.stop_words and self._tokenizer is not None:
            strings = StopStrings(self._tokenizer, params.stop_words)
        return ProcessedRequest(
            record=record,
            tokens=tokens,
            num_prompt=num_prompt,
            group_id=group_id,
            admission=admission,
            sampling_params=params,
            seed=seed,
            stop_rule=StopRule(
                # A config may name an end token that the model cannot draw.
                end_ids=tuple(
                    i for i in (*eos_ids, *stop_token_ids) if 0 <= i < self._limits.vocab_size
                ),
                stop_token_ids=tuple(i for i in stop_token_ids if i not in eos_ids),
                stop_words=tuple(map(StopWord, params.stop_words or (), stop_words)),
                stop_strings=strings,
                min_tokens=params.min_tokens,
                max_length=admission.max_length,
            ),
            wants_prompt_logprobs=needs_prompt_scores(record),
        )

    def _checked_ids(
        self, count: int, request_ids: Sequence[int] | None, in_use: Container[int]
    ) -> list[int]:
        """Reserve and return the ids of `count` samples. Raises InvalidRequestError unless the ids
        are distinct 64-bit integers that are not `in_use`."""
        if request_ids is None:
            ids = list(range(self._next_id, self._next_id + count))
        else:
            ids = list(request_ids)
        for request_id in ids:
            if isinstance(request_id, bool) or not isinstance(request_id, int):
                raise InvalidRequestError(f"request_ids={ids} must be integers")
            if not MIN_INT64 <= request_id <= MAX_INT64:
                raise InvalidRequestError(
                    f"request id {request_id} must be in [{MIN_INT64}, {MAX_INT64}]"
                )
        if len(ids) != count or len(set(ids)) != count:
            raise InvalidRequestError(f"request_ids={ids} must be {count} different ids")
        for request_id in ids:
            if request_id in in_use:
                raise InvalidRequestError(f"request id {request_id} is in use; choose another")
        self._next_id = max(self._next_id, max(ids, default=-1) + 1)
        return ids

    # ---- checks of one group

    def _checked_group(
        self, prompt: Prompt, params_list: Sequence[SamplingParams]
    ) -> tuple[list[int], list[StopWordIds]]:
        """Return the prompt's tokens, and the token ids of each sample's stop words."""
        if not params_list:
            raise InvalidRequestError("a group needs at least one SamplingParams")
        for params in params_list:
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(f"expected SamplingParams, got {type(params).__name__}")
        tokens = self._prompt_tokens(prompt, params_list)
        for params in params_list:
            check_well_formed(tokens, params, self._limits)
            self._check_token_ids(params)
        return tokens, [self._stop_word_ids(params) for params in params_list]

    def _prompt_tokens(self, prompt: Prompt, params_list: Sequence[SamplingParams]) -> list[int]:
        add_bos = {params.add_BOS for params in params_list}
        if len(add_bos) > 1:
            raise InvalidRequestError("add_BOS must be the same for all samples of one prompt")
        if not isinstance(prompt, str):
            if add_bos == {True}:
                raise InvalidRequestError(
                    "add_BOS=True works on text prompts; put the token into the ids instead"
                )
            return _int_list(prompt)
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"the prompt is text ({prompt[:40]!r}) but the engine has no tokenizer; "
                "pass one, or token ids"
            )
        if add_bos == {True} and self._tokenizer.bos_id is None:
            raise InvalidRequestError("add_BOS=True, but the tokenizer has no BOS token")
        return encode_prompt(self._tokenizer, prompt, add_bos=add_bos == {True})

    def _check_token_ids(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError for token ids outside the vocabulary. Raises it, too, if
        `min_tokens` is set and every allowed token is an end token."""
        vocab_size = self._limits.vocab_size
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(token_id for token_id, _ in _bias_pairs(params))),
        ):
            if ids and max(ids) >= vocab_size:
                raise InvalidRequestError(
                    f"{name} names the id {max(ids)}, outside the model's vocabulary "
                    f"[0, {vocab_size})"
                )
        allowed = set(params.allowed_token_ids or ())
        end_ids = {*self._eos_ids(params), *(params.stop_token_ids or ())}
        if params.min_tokens and allowed and allowed <= end_ids:
            raise InvalidRequestError(
                f"allowed_token_ids={params.allowed_token_ids} are all end tokens, and "
                f"min_tokens={params.min_tokens} forbids end tokens at first; allow another token"
            )

    def _eos_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the end tokens of a request, except its own `stop_token_ids`."""
        if params.ignore_eos:
            return ()
        return self.end_ids if params.termination_id is None else (params.termination_id,)

    def _stop_word_ids(self, params: SamplingParams) -> StopWordIds:
        """Return the token ids of each stop word. Raises InvalidRequestError if there is no
        tokenizer, or if a word has no tokens."""
        if not params.stop_words:
            return ()
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"stop_words={params.stop_words!r} need a tokenizer, and the engine has none"
            )
        encoded = tuple(tuple(self._tokenizer.encode(word)) for word in params.stop_words)
        if not all(encoded):
            word = params.stop_words[encoded.index(())]
            raise InvalidRequestError(
                f"stop word {word!r} has no token in this tokenizer and would never match; drop it"
            )
        return encoded


def _id_lists(stop_words: StopWordIds) -> list[list[int]] | None:
    return [list(word) for word in stop_words] or None


def _bias_pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    bias = params.logit_bias or ()
    return tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)


def _int_list(prompt: Sequence[int]) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, Mapping | VLMInferenceRequest):
        raise InvalidRequestError(
            f"a prompt must be text or a flat list of token ids, not a {type(values).__name__}; "
            "images are not supported"
        )
    if not isinstance(values, Iterable):
        raise InvalidRequestError(
            f"a prompt must be text or a flat list of token ids, not {prompt!r}"
        )
    ids = [value.item() if isinstance(value, np.integer) else value for value in values]
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(
                f"a prompt must be text or a flat list of token ids; it has {value!r}"
            )
    return ids
