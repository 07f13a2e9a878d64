"""rollout.version_spans, against the plain list of versions it stands for."""

from __future__ import annotations

import itertools
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.version_spans import VersionSpans

runs_lists = st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 3)), max_size=12)


def expanded(runs: list[tuple[int, int]]) -> list[int]:
    """The oracle: one version per entry."""
    return [version for count, version in runs for _ in range(count)]


def spans_of(versions: list[int]) -> VersionSpans:
    """The spans of a plain list, appended one by one."""
    return VersionSpans((1, version) for version in versions)


@given(runs_lists)
def test_spans_stand_for_one_version_per_entry(runs):
    spans, versions = VersionSpans(runs), expanded(runs)
    assert len(spans) == len(versions)
    assert spans.to_array().tolist() == versions
    assert [spans.version_at(i) for i in range(len(spans))] == versions
    assert spans.sum() == sum(versions)
    if versions:
        assert spans.min() == min(versions)


@given(runs_lists)
def test_runs_are_gapless_and_neighbours_differ(runs):
    triples = list(VersionSpans(runs))
    assert [start for start, _, _ in triples] == [0, *(end for _, end, _ in triples)][:-1]
    assert all(start < end for start, end, _ in triples)
    assert all(left[2] != right[2] for left, right in itertools.pairwise(triples))


@given(runs_lists)
def test_equality_does_not_depend_on_how_entries_were_appended(runs):
    assert VersionSpans(runs) == spans_of(expanded(runs))


@given(runs_lists)
def test_serialized_spans_survive_msgpack(runs):
    spans = VersionSpans(runs)
    wire = msgpack.unpackb(msgpack.packb(spans.serialize()))
    assert VersionSpans.deserialize(wire) == spans


@given(runs_lists, st.integers(0, 70), st.integers(0, 70))
def test_slice_is_the_list_slice(runs, start, end):
    assert VersionSpans(runs).slice(start, end) == spans_of(expanded(runs)[start:end])


@given(runs_lists, st.integers(1, 70), st.integers(0, 70))
def test_prefixes_have_the_minimum_and_mean_of_the_list(runs, first, count):
    versions = expanded(runs)
    first = min(first, len(versions) + 1)
    count = min(count, len(versions) + 1 - first)
    oldest, mean = VersionSpans(runs).of_prefixes(first, count)
    prefixes = [versions[:length] for length in range(first, first + count)]
    assert oldest.tolist() == [min(prefix) for prefix in prefixes]
    assert mean.tolist() == [sum(prefix) / len(prefix) for prefix in prefixes]


@given(runs_lists)
def test_the_last_run_knows_the_oldest_version_and_the_sum_before_it(runs):
    spans, versions = VersionSpans(runs), expanded(runs)
    if versions:
        start, version, oldest, before = spans.last_run
        assert (start, version) == list(spans)[-1][0::2]
        assert (oldest, before) == (min(versions), sum(versions[:start]))
    assert spans.copy().last_run == spans.last_run


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 3), (4, 1)])
def test_prefixes_that_are_empty_or_too_long_raise(first, count):
    with pytest.raises(ValueError, match="of 3 entries"):
        VersionSpans([(3, 0)]).of_prefixes(first, count)


@given(runs_lists, runs_lists)
def test_extend_joins_the_entries(left, right):
    spans = VersionSpans(left)
    spans.extend(VersionSpans(right))
    assert spans == spans_of(expanded(left) + expanded(right))


def test_copy_is_independent():
    spans = VersionSpans([(2, 1)])
    other = spans.copy()
    other.append(1, 1)
    other.append(1, 2)
    assert spans == VersionSpans([(2, 1)])
    assert other == VersionSpans([(3, 1), (1, 2)])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), max_size=30))
def test_copies_of_copies_are_independent(actions):
    """What one appends never shows in another, however they came to share runs."""
    family = [(VersionSpans(), [])]
    for choice, version, count in actions:
        spans, versions = family[choice % len(family)]
        spans.append(count, version)
        versions += [version] * count
        family.append((spans.copy(), list(versions)))
    for spans, versions in family:
        assert spans == spans_of(versions)


def test_a_copy_takes_no_memory_of_its_own_for_the_runs():
    spans = VersionSpans((1, version) for version in range(1000))
    tracemalloc.start()
    copies = [spans.copy() for _ in range(10)]
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes / len(copies) < 500


def test_array_is_int32_even_when_empty():
    assert VersionSpans().to_array().dtype == np.int32
    assert VersionSpans([(2, 7)]).to_array().dtype == np.int32


def test_repr_shows_the_runs():
    assert repr(VersionSpans([(2, 0), (3, 1)])) == "VersionSpans([0,2) v0, [2,5) v1)"


def test_negative_count_raises():
    with pytest.raises(ValueError, match="count=-1"):
        VersionSpans().append(-1, 0)


@pytest.mark.parametrize("index", [-1, 3])
def test_version_outside_the_entries_raises(index):
    with pytest.raises(IndexError, match=r"outside \[0, 3\)"):
        VersionSpans([(3, 0)]).version_at(index)


def test_oldest_version_of_nothing_raises():
    with pytest.raises(ValueError, match="no entries"):
        VersionSpans().min()


def test_deserialize_refuses_half_a_run():
    with pytest.raises(ValueError, match="pairs"):
        VersionSpans.deserialize([3, 0, 1])


@given(
    runs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=6), cut=st.floats(0, 1)
)
def test_truncate_drops_the_last_entries_and_leaves_copies(
    runs: list[tuple[int, int]], cut: float
) -> None:
    spans = VersionSpans(runs)
    copy, length = spans.copy(), int(cut * len(spans))
    spans.truncate(length)
    assert spans == copy.slice(0, length)
    spans.append(2, 9)
    assert spans.to_array().tolist() == [*copy.to_array().tolist()[:length], 9, 9]
    assert copy == VersionSpans(runs)
    assert spans.last_run[:2] == (length, 9)
