"""Hypothesis strategies for messages: `messages()` for any, `messages(Register)` for one type.

Built from the annotations, and by hand where fields depend on each other. `assert_same` compares
field by field, arrays by dtype and bits, without the code under test.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollout import SamplingParams
from rollout.control.commands import COMMANDS
from rollout.coordinator.protocol.messages import (
    MESSAGE_TYPES,
    PROTOCOL_VERSION,
    AbortRequest,
    Ack,
    AssignRequest,
    Commit,
    Connect,
    ConnectAck,
    Credit,
    Disconnect,
    EngineReply,
    EngineReplyPartial,
    Heartbeat,
    Nack,
    Prepare,
    Progress,
    Register,
    RegisterAck,
    ReplyAck,
    Rollback,
    Sample,
    SubmitRequest,
    UpdateWeights,
    WireError,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
)
from rollout.requests.token_runs import TokenRun, TokenRuns, TopNRun
from rollout.wire import Message, PlainMap

TYPES = list(MESSAGE_TYPES.values())
_COMMANDS = set(COMMANDS)
_PRESENCE = {Heartbeat, Disconnect}
_ANSWERS = {EngineReply, Ack, Nack}
# Who may send what. An unknown peer may only shake hands.
FROM_UNKNOWN_PEERS = {Connect, Register}
FROM_CLIENTS = _COMMANDS | _PRESENCE | {Connect, SubmitRequest, AbortRequest, ReplyAck}
FROM_CLIENTS |= {UpdateWeights}
FROM_ENGINES = _ANSWERS | _PRESENCE | {Register, Credit, Progress}
FROM_COORDINATORS = _COMMANDS | _ANSWERS | _PRESENCE | {ConnectAck, RegisterAck}
FROM_COORDINATORS |= {EngineReplyPartial}
FROM_COORDINATORS |= {AssignRequest, ReplyAck, AbortRequest, Prepare, Commit, Rollback}
MAX_TOKENS = 6

text = st.text(max_size=8)  # no lone surrogates: UTF-8 has none
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | text
plain = st.recursive(
    scalars | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
plain_maps = st.dictionaries(text, plain, max_size=3)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(0.01, 2),
    num_tokens_to_generate=st.none() | st.integers(1, 9),
    return_log_probs=st.booleans(),
    return_ranks=st.booleans(),
    stop_words=st.none() | st.lists(st.text(min_size=1, max_size=3), max_size=2),
    stop_token_ids=st.none() | st.lists(st.integers(0, 9), max_size=2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=2),
    frequency_penalty=st.floats(-2, 2),
    cache_salt=st.none() | st.text(min_size=1, max_size=3),
)


def messages(message_type: type | None = None) -> st.SearchStrategy[Message]:
    """Messages of one type or of any."""
    if message_type is not None:
        return of(message_type)
    return st.sampled_from(TYPES).flatmap(of)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated(args[0], args[1])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if arg is types.NoneType else of(arg) for arg in args])
    if origin is tuple:
        return st.lists(of(args[0]), max_size=3).map(tuple)
    if origin is Sequence:
        return st.lists(of(args[0]), max_size=3)
    if hint == PlainMap:
        return plain_maps
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(text, of(args[1]), max_size=3)
    if hint in _BY_HAND:
        return _BY_HAND[hint]()
    if issubclass(hint, msgspec.Struct):
        return built(hint)
    return {bool: st.booleans(), str: text, bytes: st.binary(max_size=16)}[hint]


def built(cls: type, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a struct, fields by their annotations save those given."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {name: of(hints[name]) for name in cls.__struct_fields__ if name not in given}
    return st.builds(cls, **{**fields, **given})


def array(dtype: str, size: int, low: int | None = None) -> st.SearchStrategy[np.ndarray]:
    elements = None
    if dtype == "<i4":
        elements = st.integers(-(2**31) if low is None else low, 2**31 - 1)
    if dtype == "<i8":
        elements = st.integers(0, 2**63 - 1)
    return arrays.arrays(np.dtype(dtype), size, elements=elements)


token_ids = st.integers(0, MAX_TOKENS).flatmap(lambda n: array("<i4", n, low=0))


def _annotated(hint: Any, rule: msgspec.Meta) -> st.SearchStrategy[Any]:
    if hint is int:
        return st.integers(rule.ge, 2**64 - 1 if rule.le is None else rule.le)
    if hint is float:
        return st.floats(rule.ge, rule.le)
    low = rule.min_length or 0
    high = min(rule.max_length, max(low, 4))
    if hint is str:
        return st.text(min_size=low, max_size=high)
    if hint is bytes:
        return st.binary(min_size=low, max_size=high)
    if typing.get_origin(hint) is tuple:
        return st.lists(of(typing.get_args(hint)[0]), min_size=low, max_size=high).map(tuple)
    return of(hint)


def top_n_runs(size: int) -> st.SearchStrategy[TopNRun]:
    """Of `size` positions, some without a value."""
    ids = st.integers(0, 2**31 - 1)
    row = st.dictionaries(ids, st.floats(max_value=0, allow_nan=False, width=32), max_size=3)
    return st.lists(st.none() | row, min_size=size, max_size=size).map(TopNRun.from_rows)


def token_runs(offset: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[TokenRun]:
    def of_size(size: int) -> st.SearchStrategy[TokenRun]:
        given = {
            "token_ids": array("<i4", size, low=0),
            "policy_versions": array("<i4", size),
            "context_kv_version_min": array("<i4", size),
            "context_kv_version_mean": array("<f8", size),
            "log_probs": st.none() | array("<f4", size),
            "ranks": st.none() | array("<i4", size, low=0),
            "top_n": st.none() | top_n_runs(size),
        }
        return built(TokenRun, **given, **({} if offset is None else {"offset": offset}))

    return st.integers(0, MAX_TOKENS).flatmap(of_size)


def samples(*, fresh: bool = False) -> st.SearchStrategy[Sample]:
    """Fresh ones are as a client sends them."""
    params = sampling_params.map(pack_params)
    if fresh:
        return built(Sample, sampling_params=params, attempt=st.just(0), resumed=st.none())
    resumed = st.none() | token_runs(offset=st.just(0))
    return built(Sample, sampling_params=params, resumed=resumed)


def groups(*, fresh: bool = False) -> st.SearchStrategy[tuple[Sample, ...]]:
    def name(sample: Sample) -> int:
        return sample.request_id

    return st.lists(samples(fresh=fresh), min_size=1, max_size=3, unique_by=name).map(tuple)


def submissions() -> st.SearchStrategy[SubmitRequest]:
    return built(SubmitRequest, samples=groups(fresh=True), prompt_tokens=token_ids)


def engine_replies() -> st.SearchStrategy[EngineReply]:
    return st.one_of(
        built(EngineReply, record=st.binary(max_size=64)),
        built(EngineReply, record=st.none(), error=of(WireError), is_failed=st.just(True)),
    )


def token_runs_of_many() -> st.SearchStrategy[TokenRuns]:
    def of_counts(shape: list[tuple[int, bool, bool, bool]]) -> st.SearchStrategy[TokenRuns]:
        counts, has_log_probs, has_ranks, has_top_n = ([row[i] for row in shape] for i in range(4))
        ids = array("<i8", len(shape), low=0)
        size = sum(counts)
        num_log_probs = sum(c for c, has in zip(counts, has_log_probs, strict=True) if has)
        num_ranks = sum(c for c, has in zip(counts, has_ranks, strict=True) if has)
        num_top_n = sum(c for c, has in zip(counts, has_top_n, strict=True) if has)
        given = {
            **dict.fromkeys(("request_ids", "attempts", "offsets"), ids),
            "counts": st.just(np.array(counts, np.int32)),
            "entry_versions": array("<i4", len(shape)),
            "token_ids": array("<i4", size, low=0),
            "policy_versions": array("<i4", size),
            "context_kv_version_min": array("<i4", size),
            "context_kv_version_mean": array("<f8", size),
            "has_log_probs": st.just(np.array(has_log_probs, np.uint8)),
            "log_probs": array("<f4", num_log_probs),
            "has_ranks": st.just(np.array(has_ranks, np.uint8)),
            "ranks": array("<i4", num_ranks, low=0),
            "has_top_n": st.just(np.array(has_top_n, np.uint8)),
            "top_n": top_n_runs(num_top_n),
        }
        return built(TokenRuns, **given)

    row = st.tuples(st.integers(0, 4), st.booleans(), st.booleans(), st.booleans())
    return st.lists(row, max_size=4).flatmap(of_counts)


_BY_HAND = types.MappingProxyType(
    {
        TopNRun: lambda: st.integers(0, MAX_TOKENS).flatmap(top_n_runs),
        TokenRun: token_runs,
        TokenRuns: token_runs_of_many,
        Sample: samples,
        SubmitRequest: submissions,
        AssignRequest: lambda: built(AssignRequest, samples=groups(), prompt_tokens=token_ids),
        EngineReply: engine_replies,
        Connect: lambda: built(Connect, protocol_version=st.just(PROTOCOL_VERSION)),
        Register: lambda: built(Register, protocol_version=st.just(PROTOCOL_VERSION)),
    }
)


def run_of(num_tokens: int, **changes: object) -> TokenRun:
    """Tokens 0, 1, ... of version 0, by hand."""
    fields = {
        "offset": 0,
        "entry_version": 0,
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "policy_versions": np.zeros(num_tokens, np.int32),
        "context_kv_version_min": np.zeros(num_tokens, np.int32),
        "context_kv_version_mean": np.zeros(num_tokens),
    }
    return TokenRun(**{**fields, **changes})


def joined(runs: list[TokenRun]) -> TokenRuns:
    """Runs as columns, of request 7, 8, ... at attempt 0, 1, ..."""
    log_probs = [run.log_probs for run in runs if run.log_probs is not None]
    ranks = [run.ranks for run in runs if run.ranks is not None]
    top_n = [row for run in runs if run.top_n is not None for row in run.top_n.rows()]
    columns = {
        name: np.concatenate(
            [np.zeros(0, getattr(run_of(0), name).dtype)] + [getattr(r, name) for r in runs]
        )
        for name in (
            *("token_ids", "policy_versions"),
            *("context_kv_version_min", "context_kv_version_mean"),
        )
    }
    return TokenRuns(
        request_ids=np.arange(7, 7 + len(runs)),
        attempts=np.arange(len(runs)),
        offsets=np.array([run.offset for run in runs], np.int64),
        counts=np.array([len(run) for run in runs], np.int32),
        entry_versions=np.array([run.entry_version for run in runs], np.int32),
        has_log_probs=np.array([run.log_probs is not None for run in runs], np.uint8),
        log_probs=np.concatenate([np.zeros(0, np.float32), *log_probs]),
        has_ranks=np.array([run.ranks is not None for run in runs], np.uint8),
        ranks=np.concatenate([np.zeros(0, np.int32), *ranks]),
        has_top_n=np.array([run.top_n is not None for run in runs], np.uint8),
        top_n=TopNRun.from_rows(top_n),
        **columns,
    )


def assert_same(one: Any, other: Any) -> None:
    """Equal in type and value, all the way down; NaNs by their bits."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, msgspec.Struct):
        for name in one.__struct_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, float):
        assert np.float64(one).tobytes() == np.float64(other).tobytes()
    else:
        assert one == other
