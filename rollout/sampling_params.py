"""How one request wants its tokens sampled, stopped and reported."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from rollout.errors import InvalidRequestError
from rollout.keyword_hints import refuses_with_hints

LOGPROBS_MODES = ("raw", "temperature", "processed")
# Below it a float32 logit divided by the temperature may overflow. Far lower than any that tells
# two draws apart: at 1e-5 a logit 1e-3 below the highest has a probability under e^-100.
MIN_TEMPERATURE = 1e-5
# Far above any vocabulary, and what all arrays of it can hold.
_MAX_TOP_K = _MAX_TOKEN_ID = 2**31 - 1
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1  # what a fleet can send
_MAX_BIAS = 100.0
_MAX_STOP_TOKEN_IDS = 1024  # each drawn token is looked up among them
_TUPLES = ("stop_words", "stop_token_ids", "logit_bias", "allowed_token_ids")
_SWITCHES = (
    "ignore_eos",
    "return_log_probs",
    "return_ranks",
    "skip_prompt_log_probs",
    "add_BOS",
    "detokenize_stop_sequence",
    "return_prompt_tokens",
    "streaming",
)


# Names of vLLM, SGLang and TRL.
SAMPLING_HINTS = {
    "max_tokens": "num_tokens_to_generate",
    "max_new_tokens": "num_tokens_to_generate",
    "max_completion_length": "num_tokens_to_generate",
    "stop": "stop_words",
    "logprobs": "return_log_probs=True, with top_n_logprobs for alternatives,",
    "prompt_logprobs": "skip_prompt_log_probs=False",
    "n": "the n of generate and submit",
}


@refuses_with_hints(SAMPLING_HINTS, InvalidRequestError)
@dataclass(frozen=True)
class SamplingParams:
    """Immutable sampling settings of one request. Raises InvalidRequestError (a ValueError) on a
    value outside its range, and when both token limits are given.

    temperature: 0 is greedy; otherwise at least MIN_TEMPERATURE.
    top_k: only the k most likely tokens are drawn; 0 switches it off.
    top_p: only the most likely tokens that make up this probability are drawn; 0 switches it off.
    min_p: only tokens of this share of the highest probability are drawn; 0 switches it off.
    num_tokens_to_generate: limit on new tokens, at least 1. A caller that only scores a prompt
        generates one token and drops it.
    num_tokens_total: limit on prompt and new tokens. Neither: up to the engine's longest sequence.
    termination_id: the end token. None takes the tokenizer's, -1 matches none.
    stop_words: a string or strings, which are looked for in the generated text and among its
        tokens; they are kept as a tuple and need a tokenizer.
    ignore_eos: the request runs on past `termination_id`.
    seed: the request's seed. None lets the engine derive one.
    return_log_probs: each generated token brings its log-prob.
    skip_prompt_log_probs: False brings log-probs of the prompt as well.
    top_n_logprobs: so many of the most likely tokens are reported with each token.
    logprobs_mode: `raw` = log_softmax(logits); `temperature` = log_softmax(logits / temperature);
        `processed` = after biases, penalties, temperature and truncation.
    add_BOS: a text prompt begins with the tokenizer's first token.
    detokenize_stop_sequence: the text keeps the stop word that ended it.
    return_prompt_tokens: False leaves the prompt out of the finished request.
    streaming: tokens are reported while the request runs.
    streaming_interval: tokens between two such reports.
    stop_token_ids: further ids that end the request, at most 1024, also with `ignore_eos`. The
        request's `stop_reason` says which one did, or which stop word.
    min_tokens: so many tokens are generated before anything but the length may end the request.
    logit_bias: {token id: what is added to its logit}; it is kept as pairs, by id.
    allowed_token_ids: no other ids are drawn.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, and
        multiplied otherwise; 1 is off. As vLLM defines it, like the next two.
    presence_penalty: taken once from the logits of tokens in the output; 0 is off.
    frequency_penalty: taken once per occurrence from the logits of tokens in the output; 0 is off.
    return_ranks: each generated token brings its rank, and each prompt token whose log-prob is
        asked for: 1 + the number of tokens to which the model gave a larger logit. What is done to
        the logits before the draw does not change it.
    cache_salt: requests find cached prefixes only of requests with the same salt. Samples of one
        prompt share their prefill in any case.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    termination_id: int | None = None
    stop_words: str | list[str] | tuple[str, ...] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = True
    top_n_logprobs: int = 0
    logprobs_mode: str = "raw"
    add_BOS: bool = False
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = True
    streaming: bool = False
    streaming_interval: int = 1
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    return_ranks: bool = False
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self._check_float("temperature", 0.0, math.inf)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidRequestError(
                f"temperature={self.temperature!r} must be 0 for greedy sampling, or at least "
                f"{MIN_TEMPERATURE:g}: below it logits / temperature may overflow"
            )
        self._check_float("top_p", 0.0, 1.0)
        self._check_float("min_p", 0.0, 1.0)
        self._check_float("repetition_penalty", 0.01, 100.0)
        self._check_float("presence_penalty", -2.0, 2.0)
        self._check_float("frequency_penalty", -2.0, 2.0)
        self._check_int("top_k", 0, _MAX_TOP_K)
        self._check_int("top_n_logprobs", 0, MAX_INT64)
        self._check_int("streaming_interval", 1, MAX_INT64)
        self._check_int("min_tokens", 0, _MAX_TOKEN_ID)
        self._check_int("num_tokens_to_generate", 1, MAX_INT64, optional=True)
        self._check_int("num_tokens_total", 1, MAX_INT64, optional=True)
        self._check_int("termination_id", -1, MAX_INT64, optional=True)
        # The widest integers msgpack can carry.
        self._check_int("seed", MIN_INT64, 2**64 - 1, optional=True)
        for name in _SWITCHES:
            self._check_bool(name)
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise InvalidRequestError(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and "
                f"num_tokens_total={self.num_tokens_total} contradict each other; give only one"
            )
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise InvalidRequestError(
                f"logprobs_mode={self.logprobs_mode!r} must be one of {', '.join(LOGPROBS_MODES)}"
            )
        if self.cache_salt is not None and not (
            isinstance(self.cache_salt, str) and self.cache_salt
        ):
            raise InvalidRequestError(
                f"cache_salt={self.cache_salt!r} must be a non-empty string, or None"
            )
        limit = self.num_tokens_to_generate
        if limit is not None and self.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than num_tokens_to_generate={limit}"
            )
        object.__setattr__(self, "stop_words", _stop_words_as_tuple(self.stop_words))
        for name in ("stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _ids_as_tuple(name, getattr(self, name)))
        if len(self.stop_token_ids or ()) > _MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids names {len(self.stop_token_ids or ())} ids; at most "
                f"{_MAX_STOP_TOKEN_IDS} are allowed"
            )
        if self.allowed_token_ids == ():
            raise InvalidRequestError("allowed_token_ids=[] allows no token; None allows all")
        object.__setattr__(self, "logit_bias", _bias_as_pairs(self.logit_bias))

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    def serialize(self) -> dict[str, Any]:
        """Return the fields as a dictionary that msgpack can carry."""
        encoded = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _TUPLES:
            if encoded[name] is not None:
                encoded[name] = list(encoded[name])
        return encoded

    @classmethod
    def deserialize(cls, encoded: Mapping[str, Any]) -> SamplingParams:
        """Return what `serialize` wrote. Raises InvalidRequestError on unknown fields."""
        unknown = sorted(set(encoded) - {field.name for field in fields(cls)})
        if unknown:
            raise InvalidRequestError(f"unknown sampling parameters: {', '.join(unknown)}")
        return cls(**encoded)

    def _check_bool(self, name: str) -> None:
        """Raise InvalidRequestError unless `name` is True or False."""
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name}={value!r} must be True or False")

    def _check_float(self, name: str, low: float, high: float) -> None:
        """Raise InvalidRequestError unless `name` is a finite number in [low, high]."""
        value = getattr(self, name)
        if isinstance(value, Real) and not isinstance(value, int | float):  # of numpy
            value = float(value)
            object.__setattr__(self, name, value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            interval = f"in [{low:g}, {high:g}]" if high < math.inf else f"finite and >= {low:g}"
            raise InvalidRequestError(f"{name}={value!r} must be {interval}")

    def _check_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        """Raise InvalidRequestError unless `name` is an integer in range, or a legal None."""
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, Integral) and not isinstance(value, int):  # of numpy
            value = operator.index(value)
            object.__setattr__(self, name, value)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or not low <= value <= high:
            interval = f">= {low} and <= {high}" if high == MAX_INT64 else f"in [{low}, {high}]"
            suffix = ", or None" if optional else ""
            raise InvalidRequestError(f"{name}={value!r} must be an integer {interval}{suffix}")


def _stop_words_as_tuple(stop_words: object) -> tuple[str, ...] | None:
    """Return the stop words as a tuple. Raises InvalidRequestError unless they are strings."""
    if stop_words is None:
        return None
    words = (stop_words,) if isinstance(stop_words, str) else stop_words
    if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) and w for w in words):
        raise InvalidRequestError(
            f"stop_words={stop_words!r} must be a non-empty string or a list of them"
        )
    return tuple(words)


def _ids_as_tuple(name: str, ids: object) -> tuple[int, ...] | None:
    """Return the ids ascending, each once. Raises InvalidRequestError unless they are token ids."""
    if ids is None:
        return None
    if not isinstance(ids, (list, tuple)) or not all(map(_is_token_id, ids)):
        raise InvalidRequestError(f"{name}={ids!r} must be a list of ids in [0, {_MAX_TOKEN_ID}]")
    return tuple(sorted(set(ids)))


def _bias_as_pairs(bias: object) -> tuple[tuple[int, float], ...] | None:
    """Return (id, bias) pairs by id. Raises InvalidRequestError for anything else than a bias."""
    if bias is None:
        return None
    pairs: Any = list(bias.items()) if isinstance(bias, Mapping) else bias
    is_legal = isinstance(pairs, (list, tuple)) and all(map(_is_bias, pairs))
    if not is_legal or len({token_id for token_id, _ in pairs}) < len(pairs):
        raise InvalidRequestError(
            f"logit_bias={bias!r} must map ids in [0, {_MAX_TOKEN_ID}] to numbers in "
            f"[{-_MAX_BIAS:g}, {_MAX_BIAS:g}]"
        )
    return tuple(sorted((token_id, float(value)) for token_id, value in pairs))


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKEN_ID


def _is_bias(pair: object) -> bool:
    """Whether `pair` is a token id and a bias within the limits, which NaN is not."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not _is_token_id(pair[0]):
        return False
    is_number = isinstance(pair[1], (int, float)) and not isinstance(pair[1], bool)
    return is_number and -_MAX_BIAS <= pair[1] <= _MAX_BIAS
