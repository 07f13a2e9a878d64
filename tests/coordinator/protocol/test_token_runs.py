"""Runs of tokens are cut and joined without losing what was stamped on them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollout import ProtocolError
from rollout.coordinator.protocol.messages import (
    Progress,
    TokenRun,
    TokenRuns,
    TopNRun,
    decode,
    encode,
    join_runs,
)
from tests.coordinator.message_strategies import assert_same, run_of, token_runs, top_n_runs

EXAMPLES = 100


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ProtocolError, match="different lengths"):
        run_of(3, policy_versions=np.zeros(2, np.int32))


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 5).flatmap(top_n_runs))
def test_top_n_rows_survive_as_runs(run):
    assert_same(TopNRun.from_rows(run.rows()), run)


def test_top_n_rows_keep_order_and_absence():
    rows = [{5: -0.5, 3: -1.0}, None, {}]
    run = TopNRun.from_rows(rows)
    assert run.counts.tolist() == [2, -1, 0]
    assert run.rows() == rows
    assert list(run.rows()[0]) == [5, 3]


# ---- runs of many requests


def joined(runs: list[TokenRun]) -> TokenRuns:
    """Runs as columns, of request 7, 8, ... at attempt 0, 1, ..."""
    log_probs = [run.log_probs for run in runs if run.log_probs is not None]
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
        has_top_n=np.array([run.top_n is not None for run in runs], np.uint8),
        top_n=TopNRun.from_rows(top_n),
        **columns,
    )


@settings(max_examples=EXAMPLES)
@given(st.lists(token_runs(), max_size=4))
def test_the_runs_of_many_requests_come_apart_as_they_were(runs):
    received = decode(encode(Progress(runs=joined(runs))))
    partials = list(received.partials())
    assert [(p.request_id, p.attempt) for p in partials] == [(7 + i, i) for i in range(len(runs))]
    for partial, run in zip(partials, runs, strict=True):
        assert_same(partial.tokens, run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempts", np.zeros(1, np.int64)),
        ("counts", np.array([2, 2], np.int32)),
        ("counts", np.array([2**31 - 1, 2**31 - 1], np.int32)),
        ("token_ids", np.zeros(4, np.int32)),
        ("log_probs", np.zeros(2, np.float32)),
        ("has_log_probs", np.zeros(2, np.uint8)),
        ("top_n", TopNRun.from_rows([{1: -1.0}])),
    ],
)
def test_columns_that_do_not_fit_the_counts_are_refused(name, value):
    runs = joined(
        [run_of(2, log_probs=np.zeros(2, np.float32)), run_of(1, log_probs=np.zeros(1, np.float32))]
    )
    with pytest.raises(ProtocolError, match="TokenRuns: columns of other lengths"):
        structs.replace(runs, **{name: value})


# ---- runs are cut and joined


@settings(max_examples=EXAMPLES)
@given(token_runs(offset=st.integers(0, 9)), st.data())
def test_a_run_cut_anywhere_joins_to_itself(run, data):
    at = run.offset + data.draw(st.integers(0, len(run)))
    tail = run.from_offset(at)
    assert (tail.offset, tail.end) == (at, run.end)
    head = slice_by_hand(run, at - run.offset)
    assert_same(join_runs([head, tail]), run)


def slice_by_hand(run: TokenRun, num_tokens: int) -> TokenRun:
    """The first tokens of `run`, each field by itself."""
    top_n = run.top_n and TopNRun.from_rows(run.top_n.rows()[:num_tokens])
    return TokenRun(
        offset=run.offset,
        entry_version=run.entry_version,
        token_ids=run.token_ids[:num_tokens],
        policy_versions=run.policy_versions[:num_tokens],
        context_kv_version_min=run.context_kv_version_min[:num_tokens],
        context_kv_version_mean=run.context_kv_version_mean[:num_tokens],
        log_probs=None if run.log_probs is None else run.log_probs[:num_tokens],
        top_n=top_n,
    )


def test_tokens_already_known_leave_an_empty_run():
    tail = run_of(3, offset=4).from_offset(9)
    assert len(tail) == 0
    assert tail.offset == 9


def test_a_gap_between_runs_is_refused():
    with pytest.raises(ProtocolError, match=r"tokens \[2, 4\) are missing"):
        run_of(3, offset=4).from_offset(2)
    with pytest.raises(ProtocolError, match="from 5 does not follow one up to 4"):
        join_runs([run_of(3, offset=1), run_of(3, offset=5)])


def test_runs_with_and_without_log_probs_do_not_join():
    with pytest.raises(ProtocolError, match="only 1 of 2 runs have log_probs"):
        join_runs([run_of(2), run_of(1, offset=2, log_probs=np.zeros(1, np.float32))])
