"""Contract of AttentionBackend against float64: 2e-5 in float32, 2e-2 in bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import AttentionBackend
from rollout.backends.forward_batch import Rotation
from rollout.backends.ops.reference import ReferenceOps
from tests.contracts.attention_cases import Row, causal_attention, make_batch, make_cache, make_spec
from tests.contracts.implementations import ATTENTION

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

all_backends = pytest.mark.parametrize("name", ATTENTION)
heads = st.sampled_from([(1, 1), (4, 4), (8, 4), (14, 2), (6, 1), (3, 3)])


@pytest.fixture(params=ATTENTION)
def attention(request: pytest.FixtureRequest) -> AttentionBackend:
    return ATTENTION[request.param]()


def qkv_of(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views cut out of one fused projection, as a model hands them over."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator) * 2
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


@all_backends
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    num_heads=heads,
    head_dim=st.sampled_from([8, 16, 64]),
    block_size=st.sampled_from([1, 2, 16, 32, 256]),
    order=st.sampled_from(["adjacent", "scattered", "reversed"]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_ragged_rows_attend_causally_to_their_own_context(
    name: str,
    lengths: list[tuple[int, int]],
    num_heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    order: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Each row's context is first written, then its last tokens attend; decode rows come first."""
    attention = ATTENTION[name]()
    lengths = sorted(lengths, key=lambda pair: pair[1] > 1 or pair[0] == 0)
    counts = [-(-(cached + new) // block_size) for cached, new in lengths]
    ids = iter(block_ids(sum(counts), order, seed))
    rows = [
        Row(num_cached=cached, num_new=new, blocks=tuple(next(ids) for _ in range(count)))
        for (cached, new), count in zip(lengths, counts, strict=True)
    ]
    spec = make_spec(
        block_size=block_size, num_kv_heads=num_heads[1], head_dim=head_dim, dtype=dtype
    )
    kv = make_cache(attention, spec, 2 * sum(counts) + 2)
    whole = [
        qkv_of(r.num_cached + r.num_new, *num_heads, head_dim, seed + i) for i, r in enumerate(rows)
    ]
    whole = [tuple(part.to(dtype) for part in parts) for parts in whole]
    past = [Row(num_cached=0, num_new=r.num_cached, blocks=r.blocks) for r in rows if r.num_cached]
    if past:
        tokens = [
            [p[: r.num_cached] for p in w] for r, w in zip(rows, whole, strict=True) if r.num_cached
        ]
        attention.attend(
            *map(torch.cat, zip(*tokens, strict=True)), 0, make_batch(past, kv, block_size)
        )
    tokens = [[p[r.num_cached :] for p in w] for r, w in zip(rows, whole, strict=True)]
    out = attention.attend(
        *map(torch.cat, zip(*tokens, strict=True)), 0, make_batch(rows, kv, block_size)
    )
    expected = torch.cat(
        [causal_attention(*w)[r.num_cached :] for r, w in zip(rows, whole, strict=True)]
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def block_ids(count: int, order: str, seed: int) -> list[int]:
    """`count` distinct ids from 1 on."""
    if order == "adjacent":
        return list(range(1, count + 1))
    if order == "reversed":
        return list(range(count, 0, -1))
    permutation = torch.randperm(2 * count, generator=torch.Generator().manual_seed(seed))
    return (permutation[:count] + 1).tolist()


@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_prefill_in_chunks_equals_whole_prefill(attention: AttentionBackend, chunk: int) -> None:
    spec = make_spec()
    q, k, v = qkv_of(50, 4, 2, 16, seed=0)
    blocks = (5, 2, 3, 9)
    kv = make_cache(attention, spec, 10)
    outs = []
    for start in range(0, 50, chunk):
        end = min(start + chunk, 50)
        row = Row(num_cached=start, num_new=end - start, blocks=blocks)
        batch = make_batch([row], kv, 16)
        outs.append(attention.attend(q[start:end], k[start:end], v[start:end], 0, batch))
    torch.testing.assert_close(
        torch.cat(outs).double(), causal_attention(q, k, v), rtol=2e-5, atol=2e-5
    )


def test_forked_rows_share_the_blocks_of_their_prompt(attention: AttentionBackend) -> None:
    spec = make_spec()
    kv = make_cache(attention, spec, 8)
    q, k, v = qkv_of(34, 4, 2, 16, seed=1)
    attention.attend(
        q[:32],
        k[:32],
        v[:32],
        0,
        make_batch([Row(num_cached=0, num_new=32, blocks=(4, 5))], kv, 16),
    )
    rows = [Row(num_cached=32, num_new=1, blocks=(4, 5, last)) for last in (6, 2)]
    out = attention.attend(q[32:], k[32:], v[32:], 0, make_batch(rows, kv, 16))
    for index in range(2):
        own = [torch.cat((x[:32], x[32 + index :][:1])) for x in (q, k, v)]
        expected = causal_attention(*own)[-1].float()
        torch.testing.assert_close(out[index], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_heads_are_normed_and_rotated_before_they_meet(
    attention: AttentionBackend, has_norms: bool, head_dim: int
) -> None:
    """In two chunks, so that cached keys are rotated keys; the projection itself is not changed."""
    q, k, v = qkv_of(30, 4, 2, head_dim, seed=3)
    before = k.clone()
    angles_TF = torch.outer(torch.arange(30.0), 10.0 ** -torch.arange(head_dim // 2))
    angles_TD = torch.cat((angles_TF, angles_TF), dim=1)
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5, 1e-6) if has_norms else ()
    kv = make_cache(attention, make_spec(head_dim=head_dim), 4)
    outs = []
    for start, end in ((0, 21), (21, 30)):
        part = slice(start, end)
        rotation = Rotation(angles_TD[part].cos(), angles_TD[part].sin(), *norms)
        row = Row(num_cached=start, num_new=end - start, blocks=(2, 3))
        batch = make_batch([row], kv, 16)
        outs.append(attention.attend(q[part], k[part], v[part], 0, batch, rotation))
    ops = ReferenceOps()
    turned = [q, k]
    if has_norms:
        turned = [ops.rms_norm(x, w, 1e-6) for x, w in zip((q, k), norms[:2], strict=True)]
    turned = ops.rotary(*turned, angles_TD.cos(), angles_TD.sin())
    expected = causal_attention(*turned, v)
    torch.testing.assert_close(torch.cat(outs).double(), expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(k, before)


def test_large_scores_do_not_overflow(attention: AttentionBackend) -> None:
    kv = make_cache(attention, make_spec(), 4)
    q, k, v = qkv_of(20, 4, 2, 16, seed=2)
    q, k = q * 100, k * 100
    batch = make_batch([Row(num_cached=0, num_new=20, blocks=(1, 2))], kv, 16)
    out = attention.attend(q, k, v, 0, batch)
    torch.testing.assert_close(out.double(), causal_attention(q, k, v), rtol=1e-3, atol=1e-3)


def filled_cache(attention: AttentionBackend, num_layers: int = 3) -> list[Tensor]:
    shape = attention.cache_shape(make_spec(num_layers=num_layers), 12)
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(num_layers)
    ]


def test_copied_blocks_equal_their_sources_in_every_layer(attention: AttentionBackend) -> None:
    kv = filled_cache(attention)
    before = [layer.clone() for layer in kv]
    attention.copy_blocks(kv, torch.tensor([3, 7], dtype=torch.int32), torch.tensor([5, 3]))
    for layer, old in zip(kv, before, strict=True):
        assert torch.equal(layer[5], old[3])
        assert torch.equal(layer[3], old[7])
        untouched = [b for b in range(12) if b not in (3, 5)]
        assert torch.equal(layer[untouched], old[untouched])


@all_backends
@given(blocks=st.lists(st.integers(0, 11), unique=True, max_size=12))
def test_gathered_blocks_come_back_unchanged(name: str, blocks: list[int]) -> None:
    attention = ATTENTION[name]()
    kv = filled_cache(attention)
    before = [layer.clone() for layer in kv]
    block_bytes = sum(layer[0].numel() * layer.element_size() for layer in kv)
    buffer = torch.zeros(len(blocks) * block_bytes, dtype=torch.uint8)
    ids = torch.tensor(blocks, dtype=torch.int64)
    attention.gather_blocks(kv, ids, buffer)
    for layer in kv:
        layer[ids] = torch.nan
    attention.scatter_blocks(kv, ids, buffer)
    for layer, old in zip(kv, before, strict=True):
        assert torch.equal(layer, old)


def test_a_slice_of_gathered_bytes_holds_whole_blocks(attention: AttentionBackend) -> None:
    """What the host arena relies on to bring back only some of the blocks."""
    kv = filled_cache(attention)
    old = [layer[6].clone() for layer in kv]
    block_bytes = sum(layer[0].numel() * layer.element_size() for layer in kv)
    buffer = torch.zeros(3 * block_bytes, dtype=torch.uint8)
    attention.gather_blocks(kv, torch.tensor([2, 6, 3]), buffer)
    for layer in kv:
        layer.zero_()
    attention.scatter_blocks(kv, torch.tensor([6]), buffer[block_bytes : 2 * block_bytes])
    for layer, expected in zip(kv, old, strict=True):
        assert torch.equal(layer[6], expected)
        assert not layer[2].any()
