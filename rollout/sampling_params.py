"""SamplingParams: how the tokens of one request are sampled, stopped and reported.

Users, `rollout.cli`, `trainer_hooks` and `rollout_verl.settings` create them, and
`rollout.serve.sampling` creates them from HTTP requests. The engine reads them from each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from rollout.errors import InvalidRequestError
from rollout.keyword_hints import refuses_with_hints
from rollout.ranges import (
    Choices,
    Fraction,
    Interval,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Refused,
    Seed,
    check_fields,
    range_of,
)

LOGPROBS_MODES = ("raw", "temperature", "processed")
# A float32 logit divided by a lower temperature may overflow. Sampling at 1e-5 is already greedy: a
# logit 1e-3 below the highest has a probability under e^-100.
MIN_TEMPERATURE = 1e-5
# A float32 holds it and, in full precision, its inverse. Sampling at 1e37 is already uniform.
MAX_TEMPERATURE = 1e37
# Far above any vocabulary; fits the int32 arrays of token ids.
_MAX_TOP_K = _MAX_TOKEN_ID = 2**31 - 1
_MAX_BIAS = 100.0
_MAX_STOP_TOKEN_IDS = 1024  # each sampled token is compared with them
_TUPLES = ("stop_words", "stop_token_ids", "logit_bias", "allowed_token_ids")


class _Temperatures:
    """The range of `temperature`: 0 for greedy sampling, or the divisor of float32 logits."""

    def take(self, value: Any, /) -> Any:
        value = range_of(NonNegativeFloat).take(value)
        if 0 < value < MIN_TEMPERATURE or value > MAX_TEMPERATURE:
            raise Refused
        return value

    def text(self) -> str:
        return (
            f"0 for greedy sampling, or finite and at least {MIN_TEMPERATURE:g} and at most "
            f"{MAX_TEMPERATURE:g}: beyond them float32 numbers may overflow"
        )


Temperature = Annotated[float, _Temperatures()]
# Temperatures above 0: training needs the probabilities of sampled tokens.
TrainedTemperature = Annotated[float, Interval(MIN_TEMPERATURE, MAX_TEMPERATURE)]


class _StopWords:
    """The range of `stop_words`: a string or several strings, which become a tuple."""

    def take(self, value: Any, /) -> Any:
        words = (value,) if isinstance(value, str) else value
        if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) and w for w in words):
            raise Refused
        return tuple(words)

    def text(self) -> str:
        return "a non-empty string or a list of them"


@dataclass(frozen=True, slots=True)
class _TokenIds:
    """The range of a list of token ids: `least` to `most` different ids, which become a sorted
    tuple."""

    least: int
    most: int

    def take(self, value: Any, /) -> Any:
        if not isinstance(value, (list, tuple)) or not all(map(_is_token_id, value)):
            raise Refused
        ids = tuple(sorted(set(value)))
        if not self.least <= len(ids) <= self.most:
            raise Refused
        return ids

    def text(self) -> str:
        ids = f"ids in [0, {_MAX_TOKEN_ID}]"
        if self.least:
            return f"a list of {ids}, not empty: no token would be allowed"
        return f"a list of {ids}, at most {self.most}"


class _Biases:
    """The range of `logit_bias`: a mapping or pairs, which become pairs sorted by id."""

    def take(self, value: Any, /) -> Any:
        pairs: Any = list(value.items()) if isinstance(value, Mapping) else value
        is_legal = isinstance(pairs, (list, tuple)) and all(map(_is_bias, pairs))
        if not is_legal or len({token_id for token_id, _ in pairs}) < len(pairs):
            raise Refused
        return tuple(sorted((token_id, float(bias)) for token_id, bias in pairs))

    def text(self) -> str:
        return (
            f"a map from ids in [0, {_MAX_TOKEN_ID}] to numbers in [{-_MAX_BIAS:g}, {_MAX_BIAS:g}]"
        )


# Names in vLLM, SGLang and TRL -> the name here, for the error message of an unknown keyword.
SAMPLING_HINTS = {
    "max_tokens": "num_tokens_to_generate",
    "max_new_tokens": "num_tokens_to_generate",
    "max_completion_length": "num_tokens_to_generate",
    "max_completion_tokens": "num_tokens_to_generate",
    "max_output_tokens": "num_tokens_to_generate",
    "max_length": "num_tokens_total",
    "min_new_tokens": "min_tokens",
    "eos_token_id": "termination_id",
    "do_sample": "temperature (0 is greedy)",
    "stop": "stop_words",
    "logprobs": "return_log_probs=True, with top_n_logprobs for alternatives,",
    "prompt_logprobs": "skip_prompt_log_probs=False",
    "n": "the n of generate and submit",
    "num_return_sequences": "the n of generate and submit",
}


@refuses_with_hints(SAMPLING_HINTS, InvalidRequestError)
@dataclass(frozen=True)
class SamplingParams:
    """Immutable sampling settings of one request.

    Raises InvalidRequestError (a ValueError) for a value outside of its range, for two token
    limits, and for min_tokens above num_tokens_to_generate.

    temperature: 0 is greedy; otherwise in [MIN_TEMPERATURE, MAX_TEMPERATURE].
    top_k: only the k most likely tokens can be sampled; 0 switches it off.
    top_p: only the most likely tokens that together have this probability can be sampled; 0
        switches it off.
    min_p: only tokens with at least this fraction of the highest probability can be sampled; 0
        switches it off.
    num_tokens_to_generate: limit on new tokens, at least 1. To score a prompt only, generate one
        token and ignore it.
    num_tokens_total: limit on prompt and new tokens. Without any limit, a request ends at the
        engine's max_sequence_length.
    termination_id: the end token. None means the end tokens of tokenizer and model, -1 means no end
        token.
    stop_words: a string or several strings, which end the request when they occur in the generated
        text or among its tokens. They need a tokenizer, and are kept as a tuple.
    ignore_eos: True lets the request continue after an end token.
    seed: the request's seed. None lets the engine derive one.
    return_log_probs: whether the log-prob of each generated token is reported.
    skip_prompt_log_probs: False also reports the log-probs of the prompt.
    top_n_logprobs: number of most likely tokens reported with each token.
    logprobs_mode: `raw` = log_softmax(logits); `temperature` = log_softmax(logits / temperature);
        `processed` = after biases, penalties, temperature and truncation.
    add_BOS: puts the BOS token before a text prompt even if the tokenizer does not add it.
    detokenize_stop_sequence: whether the text keeps the stop word that ended it.
    return_prompt_tokens: False leaves the prompt out of the finished request.
    streaming: whether tokens are reported while the request runs.
    streaming_interval: tokens between two such reports.
    stop_token_ids: further ids that end the request, at most 1024, even with `ignore_eos`. The
        request's `stop_reason` is the stop token id or stop word that ended it.
    min_tokens: number of generated tokens before which only the length limit ends the request.
    logit_bias: {token id: number added to its logit}, kept as pairs sorted by id.
    allowed_token_ids: the only ids that can be sampled.
    repetition_penalty: divides positive logits of tokens in prompt or output, and multiplies
        negative ones; 1 is off. The three penalties are defined as in vLLM.
    presence_penalty: subtracted once from the logits of tokens in the output; 0 is off.
    frequency_penalty: subtracted from the logits of tokens in the output, once per occurrence; 0 is
        off.
    return_ranks: whether the rank of each generated token is reported, and of each prompt token
        whose log-prob is reported. The rank is 1 + the number of tokens to which the model gave a
        larger logit. Biases, penalties and truncation do not change it.
    cache_salt: a request finds cached prefixes only of requests with the same salt. Samples of one
        prompt share their prefill in any case.
    """

    temperature: Temperature = 1.0
    top_k: Annotated[int, Interval(0, _MAX_TOP_K)] = 0
    top_p: Fraction = 0.0
    min_p: Fraction = 0.0
    num_tokens_to_generate: PositiveInt | None = None
    num_tokens_total: PositiveInt | None = None
    termination_id: Annotated[int, Interval(-1)] | None = None
    stop_words: Annotated[str | list[str] | tuple[str, ...], _StopWords()] | None = None
    ignore_eos: bool = False
    seed: Seed | None = None
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = True
    top_n_logprobs: NonNegativeInt = 0
    logprobs_mode: Annotated[str, Choices(LOGPROBS_MODES)] = "raw"
    add_BOS: bool = False
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = True
    streaming: bool = False
    streaming_interval: PositiveInt = 1
    stop_token_ids: (
        Annotated[list[int] | tuple[int, ...], _TokenIds(0, _MAX_STOP_TOKEN_IDS)] | None
    ) = None
    min_tokens: Annotated[int, Interval(0, _MAX_TOKEN_ID)] = 0
    logit_bias: Annotated[Mapping[int, float] | tuple[tuple[int, float], ...], _Biases()] | None = (
        None
    )
    allowed_token_ids: (
        Annotated[list[int] | tuple[int, ...], _TokenIds(1, _MAX_TOKEN_ID)] | None
    ) = None
    repetition_penalty: Annotated[float, Interval(0.01, 100.0)] = 1.0
    presence_penalty: Annotated[float, Interval(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Interval(-2.0, 2.0)] = 0.0
    return_ranks: bool = False
    cache_salt: Name | None = None

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError)
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise InvalidRequestError(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and "
                f"num_tokens_total={self.num_tokens_total} contradict each other; give only one"
            )
        limit = self.num_tokens_to_generate
        if limit is not None and self.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than num_tokens_to_generate={limit}"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    def serialize(self) -> dict[str, Any]:
        """Return the fields as a dictionary for msgpack."""
        encoded = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _TUPLES:
            if encoded[name] is not None:
                encoded[name] = list(encoded[name])
        return encoded

    @classmethod
    def deserialize(cls, encoded: Mapping[str, Any]) -> SamplingParams:
        """Return the params that `serialize` encoded. Raises InvalidRequestError for unknown
        fields."""
        unknown = sorted(set(encoded) - {field.name for field in fields(cls)})
        if unknown:
            raise InvalidRequestError(f"unknown sampling parameters: {', '.join(unknown)}")
        return cls(**encoded)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKEN_ID


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not _is_token_id(pair[0]):
        return False
    is_number = isinstance(pair[1], (int, float)) and not isinstance(pair[1], bool)
    return is_number and -_MAX_BIAS <= pair[1] <= _MAX_BIAS
