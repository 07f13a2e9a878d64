"""Runs of tokens are cut and joined without losing what was stamped on them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import ProtocolError
from rollout.coordinator.protocol.messages import TokenRun, TopNRun, join_runs
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
