"""RequestIntake: from what a caller hands in to what the engine runs, with nothing queued on an
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.engine.generation_rules import GenerationRules, StopWordIds
from rollout.engine.request_book import needs_prompt_scores
from rollout.errors import InvalidRequestError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import VLMInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.scheduling.admission import Admission, AdmissionLimits, admit, check_well_formed
from rollout.scheduling.stopping import StopRule
from rollout.step.seeds import mix_seed
from rollout.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroup:
    """Samples of one prompt that are well formed; nothing is queued yet."""

    text: str | None
    tokens: list[int]
    params_list: list[SamplingParams]
    stop_words: list[StopWordIds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request to queue: its document, its own copy of the tokens, of which the first
    `num_prompt` are its prompt, whether and how long it may run, how it samples and stops.
    """

    request: DynamicInferenceRequest
    tokens: list[int]
    num_prompt: int
    admission: Admission
    sampling_params: SamplingParams
    seed: int
    stop_rule: StopRule
    wants_prompt_logprobs: bool


class RequestIntake:
    """Gives out request ids and default seeds. `end_ids` end a request that names no termination
    id.
    """

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
        self._limits = limits
        self._tokenizer = tokenizer
        self._rules = GenerationRules(
            tokenizer=tokenizer, end_ids=end_ids, vocab_size=limits.vocab_size
        )
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._seed = seed
        self._next_id = 0
        self._num_submitted = 0

    def validate(
        self, prompt: str | Sequence[int], params_list: Sequence[SamplingParams]
    ) -> CheckedGroup:
        """Check samples of one prompt. Raises InvalidRequestError; changes nothing."""
        if not params_list:
            raise InvalidRequestError("a group needs at least one SamplingParams")
        for params in params_list:
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(f"expected SamplingParams, got {type(params).__name__}")
        tokens = self._tokens(prompt, params_list)
        for params in params_list:
            check_well_formed(tokens, params, self._limits)
            self._rules.check(params)
        return CheckedGroup(
            text=prompt if isinstance(prompt, str) else None,
            tokens=tokens,
            params_list=list(params_list),
            stop_words=[self._rules.stop_word_ids(params) for params in params_list],
        )

    def ids(self, count: int, request_ids: Sequence[int] | None) -> list[int]:
        """The ids of `count` samples. Raises InvalidRequestError unless they are so many different
        integers; changes nothing.
        """
        if request_ids is None:
            return list(range(self._next_id, self._next_id + count))
        ids = list(request_ids)
        for request_id in ids:
            if isinstance(request_id, bool) or not isinstance(request_id, int):
                raise InvalidRequestError(f"request_ids={ids} must be integers")
        if len(ids) != count or len(set(ids)) != count:
            raise InvalidRequestError(f"request_ids={ids} must be {count} different ids")
        return ids

    def enter(
        self, group: CheckedGroup, ids: Sequence[int], priority: int, weights_version: int
    ) -> list[Entry]:
        """Give a checked group its ids, of which none is in use, and its seeds."""
        self._next_id = max(self._next_id, max(ids) + 1)
        samples = zip(ids, group.params_list, group.stop_words, strict=True)
        return [
            self._entry(group, request_id, params, words, priority, weights_version)
            for request_id, params, words in samples
        ]

    def reenter(self, record: DynamicInferenceRequestRecord) -> Entry:
        """An unfinished request that another engine began, to go on from the tokens it has.

        The record must end in a segment that has generated nothing. Its segments get the stop words
        as this engine's tokenizer writes them. Raises InvalidRequestError.
        """
        first, segment = record[0], record.current
        if any(isinstance(request, VLMInferenceRequest) for request in record.requests):
            raise InvalidRequestError(
                f"the record of request {record.request_id} has images, and this engine takes text "
                "alone: it has no image input"
            )
        params, seed = first.sampling_params, segment.seed
        if params is None or seed is None:
            raise InvalidRequestError(
                f"the record of request {record.request_id} has no sampling params or no seed: it "
                "was never in an engine; use add_request"
            )
        tokens = segment.prompt_tokens.tolist()
        check_well_formed(tokens, segment.sampling_params or params, self._limits)
        self._rules.check(params)
        num_prompt = len(first.prompt_tokens)
        admission = admit(record.request_id, num_prompt, params, self._limits)
        if admission.error is None and len(tokens) >= admission.max_length:
            raise InvalidRequestError(
                f"request {record.request_id} has {len(tokens)} tokens already, and this engine "
                f"gives it room for {admission.max_length}"
            )
        stop_words = self._rules.stop_word_ids(params)
        for request in record.requests:
            request.stop_word_ids = _id_lists(stop_words)
        self._next_id = max(self._next_id, record.request_id + 1)
        return Entry(
            request=segment,
            tokens=tokens,
            num_prompt=num_prompt,
            admission=admission,
            sampling_params=params,
            seed=seed,
            stop_rule=self._rules.stop_rule(params, stop_words, admission.max_length),
            wants_prompt_logprobs=needs_prompt_scores(record),
        )

    def _entry(
        self,
        group: CheckedGroup,
        request_id: int,
        params: SamplingParams,
        stop_words: StopWordIds,
        priority: int,
        weights_version: int,
    ) -> Entry:
        seed = mix_seed(self._seed, self._num_submitted) if params.seed is None else params.seed
        self._num_submitted += 1
        admission = admit(request_id, len(group.tokens), params, self._limits)
        return Entry(
            request=DynamicInferenceRequest(
                request_id=request_id,
                prompt=group.text,
                prompt_tokens=torch.tensor(group.tokens, dtype=torch.int64),
                sampling_params=params,
                priority=priority,
                seed=seed,
                stop_word_ids=_id_lists(stop_words),
                block_size_tokens=self._block_size,
                enable_prefix_caching=self._enable_prefix_caching,
                weights_version=weights_version,
                generated_log_probs=[] if params.return_log_probs else None,
                generated_top_n_logprobs=[] if params.top_n_logprobs else None,
                tpot=[],
            ),
            tokens=list(group.tokens),
            num_prompt=len(group.tokens),
            admission=admission,
            sampling_params=params,
            seed=seed,
            stop_rule=self._rules.stop_rule(params, stop_words, admission.max_length),
            wants_prompt_logprobs=not params.skip_prompt_log_probs,
        )

    def _tokens(
        self, prompt: str | Sequence[int], params_list: Sequence[SamplingParams]
    ) -> list[int]:
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
        tokens = list(self._tokenizer.encode(prompt))
        if add_bos == {False}:
            return tokens
        if self._tokenizer.bos_id is None:
            raise InvalidRequestError("add_BOS=True, but the tokenizer has no BOS token")
        return [self._tokenizer.bos_id, *tokens]


def _id_lists(stop_words: StopWordIds) -> list[list[int]] | None:
    """The stop words as a request's document has them."""
    return [list(word) for word in stop_words] or None


def _int_list(prompt: Sequence[int]) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, Mapping | VLMInferenceRequest):
        raise InvalidRequestError(
            f"a prompt is text or a flat list of ids, not a {type(values).__name__}: this engine "
            "has no image input"
        )
    if not isinstance(values, Iterable):
        raise InvalidRequestError(f"a prompt is text or a flat list of ids, not {prompt!r}")
    ids = [value.item() if isinstance(value, np.integer) else value for value in values]
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(f"a prompt is text or a flat list of ids, found {value!r}")
    return ids
