"""Contract of AttentionBackend against float64: 2e-5 in float32, 2e-2 in bfloat16.

Scores of a larger scale are larger and round by more, so their part of the bound grows with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import AttentionBackend
from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from rollout.backends.forward_batch import PLAIN, AttentionTraits, Rotation
from rollout.backends.ops.reference import ReferenceOps
from rollout.errors import ConfigError
from tests.contracts.attention_cases import (
    Row,
    attend,
    causal_attention,
    make_batch,
    make_cache,
    make_spec,
)
from tests.contracts.implementations import ATTENTION, is_interpreted
from tests.contracts.reference_attention import ReferenceAttention
from tests.run_kind import scaled
from tests.run_seed import run_seed

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

all_backends = pytest.mark.parametrize("name", ATTENTION)
heads = st.sampled_from([(1, 1), (4, 4), (8, 4), (14, 2), (6, 1), (3, 3)])


@pytest.fixture(params=ATTENTION)
def attention(request: pytest.FixtureRequest) -> AttentionBackend:
    return ATTENTION[request.param]()


def qkv_of(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Views cut out of one fused projection, as a model hands them over; with `value_dim` V is the
    first dims of K.
    """
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator) * 2
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v if value_dim is None else k[..., :value_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """Rows of (cached, new) tokens, and the layout of their cache."""

    lengths: list[tuple[int, int]]
    num_heads: tuple[int, int]
    head_dim: int
    block_size: int
    order: str
    dtype: torch.dtype
    seed: int
    traits: AttentionTraits = PLAIN
    has_sinks: bool = False
    value_dim: int | None = None

    @property
    def all_traits(self) -> AttentionTraits:
        """With a sink for each query head, if they have one."""
        generator = torch.Generator().manual_seed(self.seed)
        sinks_H = 3 * torch.randn(self.num_heads[0], generator=generator)
        return replace(self.traits, sinks_H=sinks_H) if self.has_sinks else self.traits


ragged_batches = st.builds(
    Ragged,
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    num_heads=heads,
    head_dim=st.sampled_from([8, 16, 64]),
    block_size=st.sampled_from([1, 2, 16, 32, 256]),
    order=st.sampled_from(["adjacent", "scattered", "reversed"]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
    traits=st.builds(
        AttentionTraits,
        scale=st.sampled_from([None, 0.7]),
        window=st.sampled_from([None, None, 1, 7, 16, 33]),
        softcap=st.sampled_from([None, 2.0, 30.0]),
    ),
    has_sinks=st.booleans(),
)
TRAITS = {
    "scale": (AttentionTraits(scale=0.6), False),
    "window of one": (AttentionTraits(window=1), False),
    "window": (AttentionTraits(window=20), False),
    "wide window": (AttentionTraits(window=1000), False),
    "softcap": (AttentionTraits(softcap=3.0), False),
    "sinks": (PLAIN, True),
    "window and sinks": (AttentionTraits(window=9), True),
    "all": (AttentionTraits(scale=0.6, window=21, softcap=5.0), True),
}


@pytest.mark.drawn(16)
@pytest.mark.parametrize("traits", TRAITS)
def test_traits_change_scores_and_weights(attention: AttentionBackend, traits: str) -> None:
    """Decode rows, a chunk and a whole prompt, some within the window and some beyond it."""
    ragged = Ragged(
        lengths=[(70, 1), (5, 1), (33, 18), (0, 40)],
        num_heads=(6, 2),
        head_dim=16,
        block_size=16,
        order="scattered",
        dtype=torch.float32,
        seed=3,
        traits=TRAITS[traits][0],
        has_sinks=TRAITS[traits][1],
    )
    assert_rows_attend_causally(attention, ragged)


@pytest.mark.parametrize("name", [name for name in ATTENTION if not is_interpreted(name)])
@given(ragged=ragged_batches)
@settings(max_examples=scaled(60))
def test_ragged_rows_attend_causally_to_their_own_context(name: str, ragged: Ragged) -> None:
    attention = ATTENTION[name]()
    assert_rows_attend_causally(attention, ragged)


@pytest.mark.parametrize("name", [name for name in ATTENTION if is_interpreted(name)])
@given(ragged=ragged_batches)
@settings(max_examples=scaled(12))
def test_ragged_rows_attend_causally_where_kernels_are_interpreted(
    name: str, ragged: Ragged
) -> None:
    """Fewer examples, since each takes a second; in float32, since bfloat16 products are wrong."""
    assert_rows_attend_causally(ATTENTION[name](), replace(ragged, dtype=torch.float32))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["native", "triton"])
def test_fresh_bfloat16_rows_attend_within_the_bound_at_every_width(
    name: str, head_dim: int
) -> None:
    """The numbers differ in each run. Interpreted kernels get short rows in float32, as above."""
    is_slow = is_interpreted(name)
    ragged = Ragged(
        lengths=[(20, 1), (5, 9)] if is_slow else [(290, 1), (70, 1), (33, 18), (0, 40)],
        num_heads=(2, 1) if is_slow else (8, 2),
        head_dim=head_dim,
        block_size=16,
        order="scattered",
        dtype=torch.float32 if is_slow else torch.bfloat16,
        seed=run_seed() + head_dim,
    )
    assert_rows_attend_causally(ATTENTION[name](), ragged)


def assert_rows_attend_causally(attention: AttentionBackend, ragged: Ragged) -> None:
    """Write each row's context, then attend from its last tokens, and compare with float64."""
    lengths = sorted(ragged.lengths, key=lambda pair: pair[1] > 1 or pair[0] == 0)
    counts = [-(-(cached + new) // ragged.block_size) for cached, new in lengths]
    ids = iter(block_ids(sum(counts), ragged.order, ragged.seed))
    rows = [
        Row(num_cached=cached, num_new=new, blocks=tuple(next(ids) for _ in range(count)))
        for (cached, new), count in zip(lengths, counts, strict=True)
    ]
    spec = make_spec(
        block_size=ragged.block_size,
        num_kv_heads=ragged.num_heads[1],
        head_dim=ragged.head_dim,
        dtype=ragged.dtype,
        value_dim=ragged.value_dim,
    )
    kv = make_cache(attention, spec, 2 * sum(counts) + 2)
    whole = [
        qkv_of(
            *(row.num_cached + row.num_new, *ragged.num_heads, ragged.head_dim),
            *(ragged.seed + index, ragged.value_dim),
        )
        for index, row in enumerate(rows)
    ]
    whole = [tuple(part.to(ragged.dtype) for part in parts) for parts in whole]
    past = [Row(num_cached=0, num_new=r.num_cached, blocks=r.blocks) for r in rows if r.num_cached]
    if past:
        tokens = [
            [p[: r.num_cached] for p in w] for r, w in zip(rows, whole, strict=True) if r.num_cached
        ]
        batch = make_batch(past, kv, ragged.block_size)
        parts = map(torch.cat, zip(*tokens, strict=True))
        attend(attention, *parts, batch, None, ragged.all_traits)
    tokens = [[p[r.num_cached :] for p in w] for r, w in zip(rows, whole, strict=True)]
    batch = make_batch(rows, kv, ragged.block_size)
    parts = map(torch.cat, zip(*tokens, strict=True))
    traits = ragged.all_traits
    out = attend(attention, *parts, batch, None, traits)
    expected = torch.cat(
        [causal_attention(*w, traits)[r.num_cached :] for r, w in zip(rows, whole, strict=True)]
    )
    assert out.dtype == ragged.dtype
    tolerance = TOLERANCE[ragged.dtype] * max(1.0, ragged.head_dim / 256)
    if traits.scale is not None:
        times_larger = max(1.0, traits.scale * ragged.head_dim**0.5)
        tolerance += (times_larger - 1) * TOLERANCE[torch.float32]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["reference", "torch_sdpa", "native"])
@given(
    ragged=ragged_batches,
    num_heads=st.sampled_from([(1, 1), (4, 1), (6, 2)]),
    dims=st.sampled_from([(16, 16), (24, 16), (48, 32), (80, 64)]),
)
@settings(max_examples=scaled(20))
def test_values_may_be_the_first_dims_of_keys(
    name: str, ragged: Ragged, num_heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    """As in latent attention, (head dim, value dim): the cache holds keys alone."""
    head_dim, value_dim = dims
    latent = replace(ragged, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim)
    assert_rows_attend_causally(ATTENTION[name](), latent)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(264, None), (592, None), (48, 32), (576, 512)]
)
def test_cache_shape_supports_or_refuses_wide_heads_and_shared_values(
    attention: AttentionBackend, head_dim: int, value_dim: int | None
) -> None:
    """A refusal comes when the cache is made, before any step."""
    ragged = Ragged(
        lengths=[(70, 1), (33, 18), (0, 40)],
        num_heads=(4, 2),
        head_dim=head_dim,
        block_size=16,
        order="scattered",
        dtype=torch.float32,
        seed=4,
        value_dim=value_dim,
    )
    if isinstance(attention, TorchSdpaAttention):
        assert_rows_attend_causally(attention, ragged)
    else:
        with pytest.raises(ConfigError, match=f"head_dim={head_dim}, value_dim={value_dim}.*cpu"):
            assert_rows_attend_causally(attention, ragged)


def test_a_cache_of_keys_alone_takes_half_the_room_of_keys_and_values() -> None:
    """With the dims of latent attention, 576 and 512."""
    for backend in (ReferenceAttention(), TorchSdpaAttention()):
        spec = make_spec(num_kv_heads=1, head_dim=576)
        shape = backend.cache_shape(replace(spec, value_dim=512), 3)
        assert math.prod(shape) == 3 * spec.block_size * 576
        assert 2 * math.prod(shape) == math.prod(backend.cache_shape(spec, 3))


def block_ids(count: int, order: str, seed: int) -> list[int]:
    """Return `count` distinct ids from 1 on."""
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
        outs.append(attend(attention, q[start:end], k[start:end], v[start:end], batch))
    torch.testing.assert_close(
        torch.cat(outs).double(), causal_attention(q, k, v), rtol=2e-5, atol=2e-5
    )


def test_forked_rows_share_the_blocks_of_their_prompt(attention: AttentionBackend) -> None:
    spec = make_spec()
    kv = make_cache(attention, spec, 8)
    q, k, v = qkv_of(34, 4, 2, 16, seed=1)
    attend(
        attention,
        q[:32],
        k[:32],
        v[:32],
        make_batch([Row(num_cached=0, num_new=32, blocks=(4, 5))], kv, 16),
    )
    rows = [Row(num_cached=32, num_new=1, blocks=(4, 5, last)) for last in (6, 2)]
    out = attend(attention, q[32:], k[32:], v[32:], make_batch(rows, kv, 16))
    for index in range(2):
        own = [torch.cat((x[:32], x[32 + index :][:1])) for x in (q, k, v)]
        expected = causal_attention(*own)[-1].float()
        torch.testing.assert_close(out[index], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_attend_norms_and_rotates_heads_first(
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
        outs.append(attend(attention, q[part], k[part], v[part], batch, rotation))
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
    out = attend(attention, q, k, v, batch)
    torch.testing.assert_close(out.double(), causal_attention(q, k, v), rtol=1e-3, atol=1e-3)
