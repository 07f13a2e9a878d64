"""How Triton's attention cuts ragged batches: every context tile once, no program with much more
than the others. Counted in a model of the cut, and in the interpreter while kernels run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.backends.attention.reference import ReferenceAttention
from tests.backends.paged_mixes import Mix, as_in_a_graph, build, projection

pytest.importorskip("triton")

from rollout.backends.attention import triton_kernels
from rollout.backends.attention.triton_paged import TritonPagedAttention, launch_choice
from rollout.backends.attention.triton_plan import MIN_TILES_PER_PROGRAM, TritonPlan

BALANCE = 1.3  # most work of a program over the mean
BLOCK_N = 32
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter")


def plan_of(rows: list[tuple[int, int]], num_decode_rows: int) -> TritonPlan:
    """Of rows of (context length, tokens)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = build(Mix(decode=(2,)))
    starts = np.cumsum([0, *(new for _, new in rows)], dtype=np.int32)
    return TritonPlan(
        replace(
            batch,
            query_starts_E=torch.from_numpy(starts).to(device),
            context_lens_R=torch.tensor([n for n, _ in rows], dtype=torch.int32, device=device),
            num_decode_rows=num_decode_rows,
        )
    )


def tiles_of(first: int, end: int) -> int:
    """Context tiles that positions [first, end) touch."""
    return max(0, -(-end // BLOCK_N) - first // BLOCK_N)


def shares_of(tiles_R: list[int], num_kv_heads: int, num_programs: int) -> list[int]:
    """The model of decode: context tiles of each program."""
    total = sum(tiles_R) * num_kv_heads
    share = max(-(-total // num_programs), MIN_TILES_PER_PROGRAM)
    return [max(0, min(share, total - p * share)) for p in range(num_programs)]


lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=300)
windows = st.sampled_from([None, 1, 31, 32, 100, 5000])


@given(
    lengths=lengths,
    num_kv_heads=st.sampled_from([1, 2, 8]),
    num_programs=st.sampled_from([1, 5, 264, 300]),
    window=windows,
)
@example(lengths=[1], num_kv_heads=1, num_programs=264, window=None)
@example(lengths=[131_072] + 300 * [7], num_kv_heads=8, num_programs=264, window=None)
@settings(max_examples=12)
def test_decode_is_cut_into_equal_shares(
    lengths: list[int], num_kv_heads: int, num_programs: int, window: int | None
) -> None:
    tiles_R = [tiles_of(max(0, n - (window or n)), n) for n in lengths]
    starts_E, first_rows_P = plan_of([(n, 1) for n in lengths], len(lengths)).decode(
        window=window, block_n=BLOCK_N, num_kv_heads=num_kv_heads, num_programs=num_programs
    )
    assert starts_E.tolist() == np.cumsum([0, *tiles_R]).tolist()
    shares = shares_of(tiles_R, num_kv_heads, num_programs)
    begins = np.cumsum([0, *shares])[:-1] // num_kv_heads
    first_rows = np.searchsorted(starts_E.numpy(force=True), begins, side="right") - 1
    busy = [p for p, share in enumerate(shares) if share]
    assert first_rows_P.cpu()[busy].tolist() == first_rows[busy].tolist()
    assert sum(shares) == sum(tiles_R) * num_kv_heads
    if sum(shares) >= 4 * num_programs:
        assert max(shares) <= BALANCE * sum(shares) / num_programs


@given(
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)), min_size=1, max_size=20),
    num_decode_rows=st.integers(0, 3),
    block_q=st.sampled_from([1, 16, 128]),
    window=windows,
)
@settings(max_examples=12)
def test_query_tiles_are_all_there_the_longest_context_first(
    rows: list[tuple[int, int]], num_decode_rows: int, block_q: int, window: int | None
) -> None:
    """Rows of (cached, new) tokens, some of them without any."""
    spans = [(9, 1)] * num_decode_rows + [(cached + new, new) for cached, new in rows]
    num_tokens = sum(new for _, new in rows)
    tile_rows_Q, tile_tokens_Q = plan_of(spans, num_decode_rows).prefill(
        window=window, block_n=BLOCK_N, block_q=block_q, num_tokens=num_tokens
    )
    expected = {}
    starts = np.cumsum([0, *(new for _, new in spans)])
    for row, (start, end) in list(enumerate(pairwise(starts.tolist())))[num_decode_rows:]:
        before = spans[row][0] - end
        for token in range(start, end, block_q):
            lowest = max(0, before + token + 1 - window) if window else 0
            expected[row, token] = tiles_of(lowest, before + min(token + block_q, end))
    tiles = list(zip(tile_rows_Q.tolist(), tile_tokens_Q.tolist(), strict=True))
    real, surplus = tiles[: len(expected)], tiles[len(expected) :]
    assert sorted(real) == sorted(expected)
    assert all(row == -1 for row, _ in surplus)
    found = [expected[tile] for tile in real]
    assert found == sorted(found, reverse=True)


def test_ragged_prompts_keep_all_multiprocessors_busy_to_the_end() -> None:
    """Programs start in order as others end, two on each of 132 multiprocessors. One prompt of
    2,000 tokens comes last: in the order of the batch its longest tiles would run alone.
    """
    generator = np.random.default_rng(0)
    news = [*generator.integers(20, 700, size=60).tolist(), 2000]
    block_q, num_kv_heads, num_slots = 16, 8, 264
    plan = plan_of([(new, new) for new in news], 0)
    tile_rows_Q, tile_tokens_Q = plan.prefill(
        window=None, block_n=BLOCK_N, block_q=block_q, num_tokens=sum(news)
    )
    starts = np.cumsum([0, *news])
    costs = [
        tiles_of(0, min(token - int(starts[row]) + block_q, news[row]))
        for row, token in zip(tile_rows_Q.tolist(), tile_tokens_Q.tolist(), strict=True)
        if row >= 0
    ]
    assert makespan(costs, num_kv_heads, num_slots) <= BALANCE
    in_batch_order = [tiles_of(0, min(t + block_q, n)) for n in news for t in range(0, n, block_q)]
    assert makespan(in_batch_order, num_kv_heads, num_slots) > makespan(
        costs, num_kv_heads, num_slots
    )


def makespan(costs: list[int], num_kv_heads: int, num_slots: int) -> float:
    """When the last of `num_slots` ends, over the mean; each takes the next program when free."""
    ends = [0] * num_slots
    for cost in costs:
        for _ in range(num_kv_heads):
            heapq.heapreplace(ends, ends[0] + cost)
    return max(ends) * num_slots / (sum(costs) * num_kv_heads)


@interpreted
@pytest.mark.parametrize("window", [None, 300])
def test_interpreted_programs_do_the_work_that_the_model_counts(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long row among short ones; results equal the reference's."""
    from triton.runtime.interpreter import interpreter_builder

    from rollout.backends.forward_batch import AttentionTraits

    mix = Mix(decode=(1100, 40, 17, 300, 5, 70), group_size=2, num_kv_heads=2)
    traits, num_programs = AttentionTraits(window=window), 12
    block_n = launch_choice(torch.float32, mix.head_dim, mix.group_size, True).block_n
    assert block_n == BLOCK_N
    work: Counter[int] = Counter()
    attend_tile = triton_kernels._attend_tile

    def counted(*args: Any) -> Any:
        work[interpreter_builder.grid_idx[0]] += 1
        return attend_tile(*args)

    monkeypatch.setattr(triton_kernels, "_attend_tile", counted)
    batch = build(mix)
    attention = TritonPagedAttention(num_programs=num_programs)
    in_graph = as_in_a_graph(batch, mix)
    q, k, v = projection(mix, mix.num_tokens)
    out = attention.attend(q, k, v, 0, attention.begin(in_graph), None, traits)
    expected = ReferenceAttention().attend(q, k, v, 0, batch, None, traits)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    tiles_R = [tiles_of(max(0, n - (window or n)), n) for n in mix.decode]
    shares = shares_of(tiles_R, mix.num_kv_heads, num_programs)
    assert [work[p] for p in range(num_programs)] == shares
    assert max(shares) <= BALANCE * sum(shares) / num_programs
