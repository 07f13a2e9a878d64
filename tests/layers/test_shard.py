"""Shard and Cut: the ranks' parts make up the whole weight, and its fingerprint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.backends.ops.fingerprint import fingerprint
from rollout.layers.shard import Cut, Range, Shard, cut_to
from rollout.layers.weight_slot import AbsentSlot, CutSlot, TensorSlot, kept_of, write_rows


@given(num_items=st.integers(0, 40), size=st.integers(1, 9))
def test_ranges_of_all_ranks_are_the_items_once_and_differ_by_one(
    num_items: int, size: int
) -> None:
    ranges = [Shard(rank, size).range_of(num_items) for rank in range(size)]
    items = [item for start, length, _ in ranges for item in range(start, start + length)]
    assert items == list(range(num_items))
    lengths = [each.length for each in ranges]
    assert max(lengths) - min(lengths) <= 1


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_kv_heads_of_a_rank_serve_its_query_heads(num_kv_heads: int, size: int, group: int) -> None:
    num_heads = num_kv_heads * group * max(1, size // num_kv_heads)
    counted = []
    for rank in range(size):
        heads = Shard(rank, size).range_of(num_heads)
        kept = Shard(rank, size).kv_heads_of(num_kv_heads)
        of_whole = [head * num_kv_heads // num_heads for head in range(heads[0], sum(heads[:2]))]
        of_kept = [kept.start + n * kept.length // heads.length for n in range(heads.length)]
        assert of_whole == of_kept
        counted += [*range(kept.start, kept.start + kept.length)] * kept.is_counted
    assert counted == list(range(num_kv_heads))


@st.composite
def cuts(draw: st.DrawFn) -> list[Cut | None]:
    """Draw the cuts of all ranks of a matrix with one to three fused parts, none of them empty."""
    size, dim = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    parts = draw(st.lists(st.integers(size, 9), min_size=1, max_size=1 if dim else 3))
    shape = [draw(st.integers(1, 6))] * 2
    shape[dim] = sum(parts)
    starts = [sum(parts[:index]) for index in range(len(parts))]
    return [
        cut_to(
            [
                Shard(rank, size).range_of(length).of_width(1, after=start)
                for start, length in zip(starts, parts, strict=True)
            ],
            (shape[0], shape[1]),
            dim,
        )
        for rank in range(size)
    ]


@given(cuts())
def test_cuts_of_all_ranks_make_up_the_weight_and_its_fingerprint(
    all_cuts: list[Cut | None],
) -> None:
    if all_cuts[0] is None:
        return
    whole = torch.randn(*all_cuts[0].shape)
    total, numbers = torch.zeros(2, dtype=torch.int64), []
    for cut in all_cuts:
        assert cut is not None
        kept = cut.of(whole)
        assert kept.shape == cut.kept_shape
        numbers += kept.flatten().tolist()
        for part, places in cut.counted_parts(kept):
            total += fingerprint(part, torch.float32, places)
    assert sorted(numbers) == sorted(whole.flatten().tolist())
    assert torch.equal(total, fingerprint(whole, torch.float32))


@given(cuts(), st.integers(1, 4))
def test_write_rows_writes_the_kept_rows(all_cuts: list[Cut | None], rows_at_once: int) -> None:
    for cut in all_cuts:
        if cut is None:
            continue
        whole = torch.randn(*cut.shape)
        slot = CutSlot(TensorSlot(torch.zeros(cut.kept_shape)), cut)
        for row in range(0, len(whole), rows_at_once):
            write_rows(slot, whole[row : row + rows_at_once], row)
        assert torch.equal(slot.read(), kept_of(slot, whole))


def test_an_absent_slot_has_a_shape_an_address_of_its_own_and_no_values() -> None:
    slots = [AbsentSlot(torch.Size((4, 3)), torch.bfloat16) for _ in range(2)]
    assert len({slot.address for slot in slots}) == 2
    assert all(slot.address < 0 for slot in slots)
    slot = slots[0]
    assert (slot.shape, slot.dtype) == (torch.Size((4, 3)), torch.bfloat16)
    values = kept_of(slot, torch.ones(4, 3))
    assert values.numel() == slot.read().numel() == 0
    slot.write(values)
    write_rows(slot, torch.ones(2, 3), 1)
    with pytest.raises(AssertionError, match="another rank's"):
        slot.write(torch.ones(4, 3))


def test_cut_to_is_none_if_all_is_kept_and_counted_here() -> None:
    assert cut_to([Range(0, 4)], (4, 3)) is None
    shared = cut_to([Range(0, 4, is_counted=False)], (4, 3))
    assert shared is not None
    assert [*shared.counted_parts(torch.ones(4, 3))] == []
