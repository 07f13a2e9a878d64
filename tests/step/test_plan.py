"""StepPlan: its digest tells two plans apart, whatever differs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rollout.step.plan import RowSampling, StepPlan


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def sampling(seed: int = 5) -> RowSampling:
    return RowSampling(
        seed=seed, temperature=0.5, top_k=0, top_p=0.0, min_p=0.0, logprobs_mode="raw", top_n=0
    )


def plan() -> StepPlan:
    return StepPlan(
        step_id=3,
        weights_version=1,
        num_decode_rows=1,
        rows=ints(2, 1),
        query_lens=ints(1, 2),
        context_lens=ints(9, 2),
        prefill_token_ids=ints(7, 8),
        new_rows=((1, sampling()),),
        counted_rows=ints(1),
        counted_lens=ints(3),
        counted_token_ids=ints(6, 7, 8),
        table_rows=ints(1),
        table_indices=ints(0),
        table_blocks=ints(4),
        copy_sources=ints(5),
        copy_targets=ints(6),
        sample_sources=ints(0, 2),
        sample_rows=ints(2, 1),
        sample_positions=ints(9, 2),
        score_sources=ints(1),
        score_targets=ints(8),
        score_top_n=2,
    )


PINNED_DIGEST = "50e036c369bbf1fa4c98e2c1f83ceea6"
FIELDS = [field.name for field in dataclasses.fields(StepPlan)]


def test_equal_plans_have_equal_digests() -> None:
    assert plan().digest() == plan().digest()


def test_the_digest_is_the_same_in_every_process() -> None:
    assert plan().digest() == PINNED_DIGEST


@pytest.mark.parametrize("name", FIELDS)
def test_the_digest_tells_of_a_change_in_any_field(name: str) -> None:
    value = getattr(plan(), name)
    if isinstance(value, np.ndarray):
        changed = [value + 1, value[:-1], np.append(value, value[-1:])]
    elif isinstance(value, tuple):
        changed = [(), ((1, sampling(seed=6)),), ((2, sampling()),)]
    else:
        changed = [value + 1]
    digests = [dataclasses.replace(plan(), **{name: each}).digest() for each in changed]
    assert len({plan().digest(), *digests}) == 1 + len(changed)


def test_entries_that_move_to_the_next_field_change_the_digest() -> None:
    moved = dataclasses.replace(plan(), rows=ints(2), query_lens=ints(1, 1, 2))
    assert moved.digest() != plan().digest()


def test_tokens_are_those_of_decode_rows_and_prefills() -> None:
    assert plan().num_tokens == 3
    assert StepPlan(step_id=0, weights_version=0).num_tokens == 0
