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

from rollout.backends.forward_batch import PLAIN, AttentionTraits
from tests.backends.paged_mixes import Mix, as_in_a_graph, build, projection
from tests.contracts.reference_attention import ReferenceAttention
from tests.tiny_models import IS_LONG

pytest.importorskip("triton")

from rollout.backends.cuda import attention_kernels as triton_kernels
from rollout.backends.cuda import attention_plan as triton_plan
from rollout.backends.cuda.attention import TritonPagedAttention, launch_choice
from rollout.backends.cuda.attention_plan import (
    CUT_PARTS,
    MIN_TILES_PER_PROGRAM,
    SURPLUS_PARTS,
    PrefillPlan,
    TritonPlan,
)
from tests.run_kind import scaled

BALANCE = 1.3  # most work of a program over the mean
BLOCK_N = 32


def plan_of(rows: list[tuple[int, int]], num_decode_rows: int) -> TritonPlan:
    """Return the plan for rows of (context length, tokens)."""
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
    """Return the number of context tiles that positions [first, end) touch."""
    return max(0, -(-end // BLOCK_N) - first // BLOCK_N)


def shares_of(tiles_R: list[int], num_kv_heads: int, num_programs: int) -> list[int]:
    """Return the context tiles of each decode program, by the model."""
    total = sum(tiles_R) * num_kv_heads
    share = max(-(-total // num_programs), MIN_TILES_PER_PROGRAM)
    return [max(0, min(share, total - p * share)) for p in range(num_programs)]


lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=300)
windows = st.sampled_from([None, 1, 31, 32, 100, 5000])


@pytest.mark.device
@given(
    lengths=lengths,
    num_kv_heads=st.sampled_from([1, 2, 8]),
    num_programs=st.sampled_from([1, 5, 264, 300]),
    window=windows,
)
@example(lengths=[1], num_kv_heads=1, num_programs=264, window=None)
@example(lengths=[131_072] + 300 * [7], num_kv_heads=8, num_programs=264, window=None)
@settings(max_examples=scaled(12))
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


@pytest.mark.device
@given(
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)), min_size=1, max_size=20),
    num_decode_rows=st.integers(0, 3),
    block_q=st.sampled_from([1, 16, 128]),
    window=windows,
)
@settings(max_examples=scaled(12))
def test_query_tiles_are_all_there_the_longest_context_first(
    rows: list[tuple[int, int]], num_decode_rows: int, block_q: int, window: int | None
) -> None:
    """Rows of (cached, new) tokens, some of them without any."""
    spans = [(9, 1)] * num_decode_rows + [(cached + new, new) for cached, new in rows]
    plan = prefill_of(spans, num_decode_rows, block_q=block_q, window=window)
    expected = {}
    starts = np.cumsum([0, *(new for _, new in spans)])
    for row, (start, end) in list(enumerate(pairwise(starts.tolist())))[num_decode_rows:]:
        before = spans[row][0] - end
        for token in range(start, end, block_q):
            lowest = max(0, before + token + 1 - window) if window else 0
            expected[row, token] = tiles_of(lowest, before + min(token + block_q, end))
    tiles = list(zip(plan.rows_Q.tolist(), plan.tokens_Q.tolist(), strict=True))
    real, surplus = tiles[: len(expected)], tiles[len(expected) :]
    assert sorted(real) == sorted(expected)
    assert all(row == -1 for row, _ in surplus)
    found = [expected[tile] for tile in real]
    assert found == sorted(found, reverse=True)


@pytest.mark.device
def test_ragged_prompts_keep_all_multiprocessors_busy_to_the_end() -> None:
    """Programs start in order as others end, two on each of 132 multiprocessors. One prompt of
    2,000 tokens comes last: in the order of the batch its longest tiles would run alone.
    """
    generator = np.random.default_rng(0)
    news = [*generator.integers(20, 700, size=60).tolist(), 2000]
    block_q, num_kv_heads, num_slots = 16, 8, 264
    spans = [(new, new) for new in news]
    plan = prefill_of(spans, block_q=block_q, num_kv_heads=num_kv_heads, num_resident=num_slots)
    assert plan.num_cut.item() == 0
    costs = program_costs(spans, plan, block_q=block_q, num_kv_heads=num_kv_heads)
    assert makespan(costs, num_slots) <= BALANCE
    in_batch_order = [
        tiles_of(0, min(token + block_q, new))
        for new in news
        for token in range(0, new, block_q)
        for _ in range(num_kv_heads)
    ]
    assert makespan(in_batch_order, num_slots) > makespan(costs, num_slots)


def makespan(costs: list[int], num_slots: int) -> float:
    """Return the end of the last of `num_slots` over their mean; a free slot takes the next
    program.
    """
    ends = [0] * num_slots
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends) * num_slots / sum(costs)


def prefill_of(
    spans: list[tuple[int, int]],
    num_decode_rows: int = 0,
    *,
    block_q: int,
    window: int | None = None,
    num_kv_heads: int = 1,
    num_resident: int = 132,
    block_n: int = BLOCK_N,
) -> PrefillPlan:
    return plan_of(spans, num_decode_rows).prefill(
        window=window,
        block_n=block_n,
        block_q=block_q,
        num_tokens=sum(new for _, new in spans[num_decode_rows:]),
        num_kv_heads=num_kv_heads,
        num_resident=num_resident,
        table_tokens=max(length for length, _ in spans),
    )


def tile_lengths(
    spans: list[tuple[int, int]], plan: PrefillPlan, block_q: int, window: int | None = None
) -> list[int]:
    """Return the context tiles of each query tile of the plan, 0 for surplus tiles."""
    starts = np.cumsum([0, *(new for _, new in spans)]).tolist()
    lengths = []
    for row, token in zip(plan.rows_Q.tolist(), plan.tokens_Q.tolist(), strict=True):
        before = spans[row][0] - starts[row + 1]
        end = before + min(token + block_q, starts[row + 1])
        lowest = max(0, before + token + 1 - window) if window else 0
        lengths.append(tiles_of(lowest, end) if row >= 0 else 0)
    return lengths


def program_costs(
    spans: list[tuple[int, int]],
    plan: PrefillPlan,
    *,
    block_q: int,
    num_kv_heads: int,
    window: int | None = None,
) -> list[int]:
    """The model of prefill: context tiles of each program. All of a tile and head are in one."""
    tiles = plan.tiles_P.tolist()
    costs = []
    for tile, length in enumerate(tile_lengths(spans, plan, block_q, window)):
        first, end = plan.first_programs_F[tile : tile + 2].tolist()
        assert tiles[first:end] == [tile] * (end - first)
        num_parts, rest = divmod(end - first, num_kv_heads)
        assert rest == 0
        assert min(length, 1) <= num_parts <= length
        bounds = [length * part // max(1, num_parts) for part in range(num_parts + 1)]
        costs += num_kv_heads * [end - start for start, end in pairwise(bounds)]
        assert (num_parts > 1) == (tile < plan.num_cut.item())
        assert num_parts <= 1 or end <= plan.num_partials
    assert set(tiles[len(costs) :]) <= {-1}
    return costs


contexts = st.tuples(st.integers(0, 100_000), st.integers(1, 300))


@pytest.mark.device
@given(
    rows=st.lists(st.one_of(contexts, contexts.map(lambda c: (c[0] % 50, c[1]))), max_size=12),
    long_row=st.tuples(st.integers(3_000, 100_000), st.integers(1, 300)),
    block_q=st.sampled_from([2, 16, 32, 128]),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    num_resident=st.sampled_from([8, 132, 264]),
    window=st.sampled_from([None, None, 2000, 5000]),
)
@example(rows=[], long_row=(32_768, 128), block_q=32, num_kv_heads=8, num_resident=132, window=None)
@example(
    rows=4 * [(32_768, 128)], long_row=(32_768, 128), block_q=32, num_kv_heads=8, num_resident=132,
    window=None,
)  # fmt: skip
@settings(max_examples=400 if IS_LONG else 12)
def test_prefill_behind_long_contexts_is_cut_into_even_work(
    rows: list[tuple[int, int]],
    long_row: tuple[int, int],
    block_q: int,
    num_kv_heads: int,
    num_resident: int,
    window: int | None,
) -> None:
    """Rows of (cached, new) tokens. Every context tile once, programs and partials as many as the
    shapes have room for, all of them at work to the end.
    """
    spans = [(cached + new, new) for cached, new in (*rows, long_row)]
    plan = prefill_of(
        spans, block_q=block_q, window=window, num_kv_heads=num_kv_heads, num_resident=num_resident
    )
    costs = program_costs(spans, plan, block_q=block_q, num_kv_heads=num_kv_heads, window=window)
    num_tiles = len(plan.rows_Q) * num_kv_heads
    assert len(plan.tiles_P) == num_tiles + SURPLUS_PARTS * num_resident
    assert plan.num_partials <= CUT_PARTS * num_resident
    mean = sum(costs) / num_resident
    if mean >= 4:  # a part is a whole number of tiles, which matters below 20
        assert makespan(costs, num_resident) <= max(BALANCE, 1.25 + 1 / mean)


@pytest.mark.device
def test_whole_prefill_behind_long_contexts_would_leave_multiprocessors_idle() -> None:
    """128 tokens behind 32k of cache: 32 tiles and heads for 132 multiprocessors."""
    spans = [(32_896, 128)]
    plan = prefill_of(spans, block_q=32, num_kv_heads=8)
    whole = [length for length in tile_lengths(spans, plan, 32) for _ in range(8)]
    costs = program_costs(spans, plan, block_q=32, num_kv_heads=8)
    assert makespan(whole, 132) > 4
    assert makespan(costs, 132) < 1.1


@pytest.mark.drawn(10)
@pytest.mark.device
@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("prompt_len", [300, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("window", [None, 1024])
def test_whole_prompts_are_not_cut(
    prompt_len: int, num_prompts: int, group_size: int, window: int | None
) -> None:
    """Models of 8 KV heads on 132 multiprocessors, with context tiles of 64 tokens."""
    spans = num_prompts * [(prompt_len, prompt_len)]
    plan = prefill_of(spans, block_q=128 // group_size, window=window, num_kv_heads=8, block_n=64)
    assert plan.num_cut.item() == 0


def counted_work(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the context tiles that each interpreted program processes from now on."""
    from triton.runtime.interpreter import interpreter_builder

    work: Counter[int] = Counter()
    attend_tile = triton_kernels._attend_tile

    def counted(*args: Any) -> Any:
        work[interpreter_builder.grid_idx[0]] += 1
        return attend_tile(*args)

    monkeypatch.setattr(triton_kernels, "_attend_tile", counted)
    return work


def attended(mix: Mix, num_programs: int, traits: AttentionTraits = PLAIN) -> torch.Tensor:
    attention = TritonPagedAttention(num_programs=num_programs)
    batch = attention.begin(as_in_a_graph(build(mix), mix))
    return attention.attend(*projection(mix, mix.num_tokens), 0, batch, None, traits)


def expected_of(mix: Mix, traits: AttentionTraits) -> torch.Tensor:
    parts = projection(mix, mix.num_tokens)
    return ReferenceAttention().attend(*parts, 0, build(mix), None, traits)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 300])
def test_interpreted_programs_do_the_work_that_the_model_counts(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long row among short ones; results equal the reference's."""
    mix = Mix(decode=(1100, 40, 17, 300, 5, 70), group_size=2, num_kv_heads=2)
    traits, num_programs = AttentionTraits(window=window), 12
    block_n = launch_choice(torch.float32, mix.head_dim, mix.group_size, True).block_n
    assert block_n == BLOCK_N
    work = counted_work(monkeypatch)
    torch.testing.assert_close(
        attended(mix, num_programs, traits), expected_of(mix, traits), rtol=2e-5, atol=2e-5
    )
    tiles_R = [tiles_of(max(0, n - (window or n)), n) for n in mix.decode]
    shares = shares_of(tiles_R, mix.num_kv_heads, num_programs)
    assert [work[p] for p in range(num_programs)] == shares
    assert max(shares) <= BALANCE * sum(shares) / num_programs


@pytest.mark.drawn(1)
@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 1300])
def test_interpreted_parts_of_prefill_do_the_work_that_the_model_counts(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few new tokens behind a long context, beside a whole prompt; twice the same bits."""
    mix = Mix(prefill=((1500, 20), (0, 33)), group_size=2, num_kv_heads=2)
    traits, num_programs = AttentionTraits(window=window), 12
    choice = launch_choice(torch.float32, mix.head_dim, mix.group_size, False)
    assert choice.block_n == BLOCK_N
    work = counted_work(monkeypatch)
    out = attended(mix, num_programs, traits)
    torch.testing.assert_close(out, expected_of(mix, traits), rtol=2e-5, atol=2e-5)
    block_q = choice.block_m // mix.group_size
    sizes = {"block_q": block_q, "window": window, "num_kv_heads": mix.num_kv_heads}
    plan = prefill_of(mix.rows, num_resident=num_programs, **sizes)
    costs = program_costs(mix.rows, plan, **sizes)
    assert [work[program] for program in range(len(plan.tiles_P))] == costs + [0] * (
        len(plan.tiles_P) - len(costs)
    )
    assert plan.num_cut.item() > 0
    assert makespan(costs, num_programs) <= BALANCE
    assert torch.equal(out, attended(mix, num_programs, traits))


@pytest.mark.interpreted
def test_a_query_tile_that_is_not_cut_has_the_same_bits_as_if_none_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mix = Mix(decode=(40,), prefill=((1100, 9), (0, 33), (90, 5)), group_size=2, num_kv_heads=2)
    out = attended(mix, 12)
    monkeypatch.setattr(triton_plan, "WORTH_CUTTING", 10**6)
    whole = attended(mix, 12)
    is_same_T = (out == whole).flatten(1).all(1)
    assert is_same_T.tolist() == [True] + 9 * [False] + 38 * [True]
    torch.testing.assert_close(out, whole, rtol=2e-5, atol=2e-5)
