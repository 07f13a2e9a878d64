"""NativePagedAttention: shared prefixes, threads and bfloat16, against float64 and bit by bit.

Tolerances: 2e-5 for outputs in float32, 2e-2 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.cpu.attention import NativePagedAttention
from tests.contracts.attention_cases import (
    Row,
    attend,
    causal_attention,
    make_batch,
    make_cache,
    make_spec,
)
from tests.contracts.implementations import kernels
from tests.run_kind import scaled

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows over one prompt; each has its own further tokens, in its own blocks."""

    num_shared_blocks: int
    own_lengths: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Groups of decode rows, in some order, and the layout of their cache."""

    groups: list[Group]
    num_heads: tuple[int, int]
    head_dim: int
    block_size: int
    dtype: torch.dtype
    seed: int


forests = st.builds(
    Forest,
    groups=st.lists(
        st.builds(
            Group,
            num_shared_blocks=st.integers(0, 5),
            own_lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=3,
    ),
    num_heads=st.sampled_from([(1, 1), (4, 4), (8, 2), (14, 2), (3, 3), (7, 1)]),
    head_dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 8, 16, 24, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)


class Decoding:
    """A forest's cache, filled, and the last token of every row."""

    def __init__(self, forest: Forest, attention: NativePagedAttention) -> None:
        generator = torch.Generator().manual_seed(forest.seed)
        size = forest.block_size
        self.forest, self.rows = forest, list[Row]()
        num_blocks = sum(
            group.num_shared_blocks + sum(-(-own // size) for own in group.own_lengths)
            for group in forest.groups
        )
        ids = iter(torch.randperm(num_blocks, generator=generator).tolist())
        for group in forest.groups:
            shared = [next(ids) for _ in range(group.num_shared_blocks)]
            for own in group.own_lengths:
                blocks = (*shared, *(next(ids) for _ in range(-(-own // size))))
                self.rows.append(
                    Row(num_cached=len(shared) * size + own - 1, num_new=1, blocks=blocks)
                )
        order = torch.randperm(len(self.rows), generator=generator).tolist()
        self.rows = [self.rows[i] for i in order if self.rows[i].num_cached]
        spec = make_spec(
            block_size=size,
            num_kv_heads=forest.num_heads[1],
            head_dim=forest.head_dim,
            dtype=forest.dtype,
        )
        self.kv = make_cache(attention, spec, num_blocks)
        self.kv[0].copy_(torch.randn(self.kv[0].shape, generator=generator))
        heads, kv_heads = forest.num_heads
        fused = torch.randn(
            len(self.rows), heads + 2 * kv_heads, forest.head_dim, generator=generator
        )
        parts = fused.to(forest.dtype).split([heads, kv_heads, kv_heads], dim=1)
        self.q, self.k, self.v = parts

    def attend(
        self, attention: NativePagedAttention, rows: list[int], *, as_prompts: bool = False
    ) -> Tensor:
        batch = make_batch([self.rows[i] for i in rows], self.kv, self.forest.block_size)
        if as_prompts:
            batch = replace(batch, num_decode_rows=0)
        return attend(attention, self.q[rows], self.k[rows], self.v[rows], batch)

    def expected(self, index: int) -> Tensor:
        """After its K and V were written."""
        row = self.rows[index]
        context = self.kv[0][list(row.blocks)].flatten(0, 1)[: row.num_cached + 1]
        k, v = context.unbind(1)
        q = self.q[index].expand(len(k), -1, -1)
        return causal_attention(q, k, v)[-1]


@given(forest=forests)
@settings(max_examples=scaled(60), deadline=None)
def test_rows_that_share_blocks_attend_to_their_own_context(forest: Forest) -> None:
    attention = NativePagedAttention(kernels())
    decoding = Decoding(forest, attention)
    rows = list(range(len(decoding.rows)))
    if not rows:
        return
    out = decoding.attend(attention, rows)
    assert out.dtype == forest.dtype
    tolerance = TOLERANCE[forest.dtype]
    for row in rows:
        expected = decoding.expected(row)
        torch.testing.assert_close(out[row].double(), expected, rtol=tolerance, atol=tolerance)


@given(forest=forests)
@settings(max_examples=scaled(60), deadline=None)
def test_a_row_has_the_same_bits_whatever_rows_share_its_blocks(forest: Forest) -> None:
    attention = NativePagedAttention(kernels())
    decoding = Decoding(forest, attention)
    rows = list(range(len(decoding.rows)))
    if not rows:
        return
    together = decoding.attend(attention, rows)
    for row in rows:
        assert torch.equal(decoding.attend(attention, [row])[0], together[row])


@pytest.fixture
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_heads", [(8, 4), (3, 3), (7, 1)])
@pytest.mark.parametrize("num_threads", [2, 3, 5])
@pytest.mark.usefixtures("_threads_kept")
def test_threads_change_no_bit(num_heads: tuple[int, int], num_threads: int) -> None:
    """Contexts of 64 to 2,000 tokens: enough for several threads; then a prefill of 700 tokens."""
    attention = NativePagedAttention(kernels())
    heads, kv_heads = num_heads
    lengths = (2000, 64, 700, 1500, 700)
    spec = make_spec(block_size=64, num_kv_heads=kv_heads, head_dim=64)
    kv = make_cache(attention, spec, 200)
    kv[0].normal_(generator=torch.Generator().manual_seed(0))
    ids = iter(range(200))
    rows = [
        Row(num_cached=n - 1, num_new=1, blocks=tuple(next(ids) for _ in range(-(-n // 64))))
        for n in lengths
    ]
    rows.append(Row(num_cached=100, num_new=700, blocks=tuple(next(ids) for _ in range(13))))
    q, k, v = torch.randn(705, heads + 2 * kv_heads, 64).split([heads, kv_heads, kv_heads], 1)
    batch = make_batch(rows, kv, 64)
    torch.set_num_threads(1)
    alone = attend(attention, q, k, v, batch)
    torch.set_num_threads(num_threads)
    assert torch.equal(attend(attention, q, k, v, batch), alone)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_prefill_of_any_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    attention = NativePagedAttention(kernels())
    kv = make_cache(attention, make_spec(block_size=24, head_dim=head_dim, dtype=dtype), 8)
    generator = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(150, 10, head_dim, generator=generator).to(dtype)
    q, k, v = fused.split([6, 2, 2], dim=1)
    outs = []
    for start, end in ((0, 61), (61, 150)):
        row = Row(num_cached=start, num_new=end - start, blocks=(5, 2, 3, 7, 1, 6, 0))
        batch = make_batch([row], kv, 24)
        outs.append(attend(attention, q[start:end], k[start:end], v[start:end], batch))
    expected = causal_attention(q, k, v)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(torch.cat(outs).double(), expected, rtol=tolerance, atol=tolerance)


def test_float32_is_rounded_to_nearest_even_in_a_bfloat16_cache() -> None:
    attention = NativePagedAttention(kernels())
    kv = make_cache(attention, make_spec(dtype=torch.bfloat16), 2)
    bits = torch.arange(0x3F7F0000, 0x3F7F0000 + 32 * 0x4000, 0x4000, dtype=torch.int32)
    k = bits.view(torch.float32).view(1, 2, 16)
    v = torch.full((1, 2, 16), torch.nan)
    batch = make_batch([Row(num_cached=0, num_new=1, blocks=(1,))], kv, 16)
    attend(attention, torch.ones(1, 4, 16), k, v, batch)
    assert torch.equal(kv[0][1, 0, 0], k[0].bfloat16())
    assert kv[0][1, 0, 1].isnan().all()


@pytest.mark.parametrize(("deterministic", "tolerance"), [(True, 2e-5), (False, 0.02)])
def test_float32_queries_attend_over_a_bfloat16_cache(
    deterministic: bool, tolerance: float
) -> None:
    """DOT rounds queries and weights to bfloat16; deterministic attention does not."""
    attention = NativePagedAttention(kernels(), deterministic=deterministic)
    kv = make_cache(attention, make_spec(dtype=torch.bfloat16), 4)
    q, k, v = torch.randn(40, 8, 16).split([4, 2, 2], dim=1)
    batch = make_batch([Row(num_cached=0, num_new=40, blocks=(3, 1, 2))], kv, 16)
    out = attend(attention, q, k, v, batch)
    expected = causal_attention(q, k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@given(forest=forests)
@settings(max_examples=scaled(60), deadline=None)
def test_a_decoded_token_has_the_bits_of_the_last_token_of_a_prompt(forest: Forest) -> None:
    # Products of pairs, which prefill over bfloat16 may have, round what decoding does not.
    attention = NativePagedAttention(kernels(), deterministic=forest.dtype == torch.bfloat16)
    decoding = Decoding(forest, attention)
    rows = list(range(len(decoding.rows)))
    if not rows:
        return
    decoded = decoding.attend(attention, rows)
    prefilled = decoding.attend(attention, rows, as_prompts=True)
    assert torch.equal(decoded, prefilled)
