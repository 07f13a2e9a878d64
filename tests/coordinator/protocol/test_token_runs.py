"""TokenRuns are cut and joined without losing their versions and log-probs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollout import ProtocolError
from rollout.coordinator.protocol.codec import decode, encode
from rollout.coordinator.protocol.messages import Progress
from rollout.requests.token_runs import TokenRun, TopNRun, join_runs
from tests.coordinator.message_strategies import assert_same, joined, run_of, token_runs, top_n_runs

EXAMPLES = 100


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ProtocolError, match="TokenRun: 2 policy_versions for 3 token ids"):
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


@settings(max_examples=EXAMPLES)
@given(st.lists(token_runs(), max_size=4))
def test_token_runs_apart_returns_the_joined_runs(runs):
    received = decode(encode(Progress(runs=joined(runs))))
    apart = list(received.runs.apart())
    assert [names for *names, _ in apart] == [[7 + i, i] for i in range(len(runs))]
    for (*_, arrived), run in zip(apart, runs, strict=True):
        assert_same(arrived, run)


@settings(max_examples=EXAMPLES)
@given(st.lists(token_runs(), max_size=5), st.integers(0, 5))
def test_the_runs_of_some_requests_are_those_rows(runs, middle):
    both = joined(runs)
    halves = [both.rows(0, middle), both.rows(middle, len(both))]
    parts = [part for half in halves for part in decode(encode(Progress(runs=half))).runs.apart()]
    for part, whole in zip(parts, both.apart(), strict=True):
        assert part[:2] == whole[:2]
        assert_same(part[2], whole[2])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attempts", np.zeros(1, np.int64), "a column has another length than the 2 requests"),
        ("counts", np.array([2, 2], np.int32), "token_ids needs 4 values"),
        ("counts", np.array([2**31 - 1] * 2, np.int32), "token_ids needs 4294967294 values"),
        ("token_ids", np.zeros(4, np.int32), "token_ids needs 3 values"),
        ("log_probs", np.zeros(2, np.float32), "log_probs needs 3 values"),
        ("has_log_probs", np.zeros(2, np.uint8), "log_probs needs 0 values"),
        ("ranks", np.ones(1, np.int32), "ranks needs 0 values"),
        ("has_ranks", np.ones(2, np.uint8), "ranks needs 3 values"),
        ("top_n", TopNRun.from_rows([{1: -1.0}]), "top_n needs 0 values"),
    ],
)
def test_columns_that_do_not_fit_the_counts_are_refused(name, value, message):
    runs = joined(
        [run_of(2, log_probs=np.zeros(2, np.float32)), run_of(1, log_probs=np.zeros(1, np.float32))]
    )
    with pytest.raises(ProtocolError, match=message):
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
        ranks=None if run.ranks is None else run.ranks[:num_tokens],
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


@pytest.mark.parametrize(
    ("name", "column"), [("log_probs", np.zeros(1, np.float32)), ("ranks", np.ones(1, np.int32))]
)
def test_runs_with_and_without_a_column_do_not_join(name, column):
    with pytest.raises(ProtocolError, match=f"only 1 of 2 runs have {name}"):
        join_runs([run_of(2), run_of(1, offset=2, **{name: column})])
