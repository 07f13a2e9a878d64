"""GenerationRules: how a request's parameters become the scheduler's StopRule."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.errors import InvalidRequestError
from rollout.generated_text import StopStrings
from rollout.sampling_params import SamplingParams
from rollout.scheduling.stopping import StopRule
from rollout.text import Tokenizer

StopWordIds = tuple[tuple[int, ...], ...]


class GenerationRules:
    """`end_ids` end a request that names no termination id."""

    def __init__(
        self, *, tokenizer: Tokenizer | None, end_ids: tuple[int, ...], vocab_size: int
    ) -> None:
        self._tokenizer, self._end_ids, self._vocab_size = tokenizer, end_ids, vocab_size

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError for token ids that the model does not have, and for a choice of
        tokens that leaves none."""
        biased = tuple(token_id for token_id, _ in _bias_pairs(params))
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", biased),
        ):
            if ids and max(ids) >= self._vocab_size:
                raise InvalidRequestError(
                    f"{name} names the id {max(ids)}, outside the model's vocabulary "
                    f"[0, {self._vocab_size})"
                )
        allowed = set(params.allowed_token_ids or ())
        if params.min_tokens and allowed and allowed <= set(self._end_ids_of(params)):
            raise InvalidRequestError(
                f"allowed_token_ids={params.allowed_token_ids} are all end tokens, and "
                f"min_tokens={params.min_tokens} allows none of those at first"
            )

    def stop_word_ids(self, params: SamplingParams) -> StopWordIds:
        """The stop words as the tokenizer writes them. Raises InvalidRequestError."""
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

    def stop_rule(
        self, params: SamplingParams, stop_words: StopWordIds, max_length: int
    ) -> StopRule:
        """When a request of these parameters is done."""
        strings = None
        if params.stop_words and self._tokenizer is not None:
            strings = StopStrings(self._tokenizer, params.stop_words)
        ends = self._end_ids_of(params)
        return StopRule(
            # A config may name an end token that the model cannot draw.
            end_ids=tuple(i for i in ends if 0 <= i < self._vocab_size),
            stop_words=stop_words,
            stop_strings=strings,
            min_tokens=params.min_tokens,
            max_length=max_length,
        )

    def _end_ids_of(self, params: SamplingParams) -> tuple[int, ...]:
        stops = tuple(params.stop_token_ids or ())
        if params.ignore_eos:
            return stops
        ends = self._end_ids if params.termination_id is None else (params.termination_id,)
        return (*ends, *stops)


def _bias_pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    bias = params.logit_bias or ()
    return tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)
