"""TritonPagedAttention beyond the contract suite: padding, splits, groups, capture, compilation.

Against ReferenceAttention, 2e-5 in float32. Interpreted without a GPU, a second per example.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.forward_batch import PLAIN, AttentionTraits, Rotation
from tests.backends.paged_mixes import Mix, as_in_a_graph, build, projection
from tests.backends.triton_references import append_kv_reference
from tests.contracts.reference_attention import ReferenceAttention

pytest.importorskip("triton")

import triton

from rollout.backends.cuda import attention_plan as triton_plan
from rollout.backends.cuda.append import append_kv
from rollout.backends.cuda.attention import (
    TritonPagedAttention,
    launch_choice,
    program_choice,
)
from tests.backends.aot_usage import compiled
from tests.contracts.attention_on_device import device_attention
from tests.run_kind import scaled

HOME = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 products are wrong.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HOME.type == "cuda" else [])
ONE_ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHARED_MEMORY_BYTES = 227 * 1024  # of one program on sm_90
SPILLED_BYTES = {"fp32": 64}  # a register or two per thread, of float32 alone
# Triton before 3.7 gives kernels of heads of 64 dims some registers more, so that a program less
# runs at once, and the kernel that cuts tiles spills two.
IS_OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
SPILLED_BYTES_OF_OLD_TRITON = 8

mixes = st.builds(
    Mix,
    decode=st.lists(st.integers(2, 150), max_size=3).map(tuple),
    num_padding_rows=st.integers(0, 2),
    prefill=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), min_size=1, max_size=3).map(
        tuple
    ),
    num_padding_tokens=st.sampled_from([0, 1, 13]),
    is_decode_known=st.booleans(),
    group_size=st.sampled_from([1, 2, 5, 7, 8, 16]),
    num_kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([8, 16, 24, 64]),
    block_size=st.sampled_from([1, 4, 16, 256]),
    seed=st.integers(0, 1000),
)


def assert_as_the_reference(
    mix: Mix, num_programs: int | None, traits: AttentionTraits = PLAIN
) -> None:
    """Compare outputs of real tokens, and cached K and V of all blocks but the scratch block."""
    num_tokens = mix.num_tokens
    q, k, v = projection(mix, num_tokens + mix.num_padding_tokens)
    batch = build(mix)
    in_graph = as_in_a_graph(batch, mix)
    for padding in (q[num_tokens:], k[num_tokens:], v[num_tokens:]):
        padding.fill_(torch.nan)
    parts = q[:num_tokens], k[:num_tokens], v[:num_tokens]
    expected = ReferenceAttention().attend(*parts, 0, batch, None, traits)
    attention = device_attention(num_programs)
    out = attention.attend(q, k, v, 0, attention.begin(in_graph), None, traits)
    real = mix.real_tokens
    torch.testing.assert_close(out[real], expected[real], rtol=2e-5, atol=2e-5)
    cached = in_graph.kv[0].permute(0, 3, 1, 2, 4)
    torch.testing.assert_close(cached[1:], batch.kv[0][1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.device
@given(mix=mixes, how=st.sampled_from([(None, 8), (1, 0), (2, 0), (5, 0), (40, 8), (40, 0)]))
@settings(max_examples=scaled(14))
def test_padding_and_host_arrays_do_not_matter(mix: Mix, how: tuple[int | None, int]) -> None:
    """Contexts of prompts are cut as early as possible, or never."""
    num_programs, worth = how
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_plan, "WORTH_CUTTING", worth)
        if mix.num_tokens > 0:
            assert_as_the_reference(mix, num_programs)


@pytest.mark.device
def test_a_batch_of_padding_alone_has_no_output() -> None:
    mix = Mix(decode=(), num_padding_rows=1, prefill=((0, 0),), group_size=1, num_kv_heads=1)
    assert_as_the_reference(mix, None)


@pytest.mark.drawn(2)
@pytest.mark.device
@pytest.mark.parametrize("num_programs", [1, 2, 3, 8, 64])
def test_every_number_of_programs_gives_the_same(num_programs: int) -> None:
    """Shares within a row, over several rows, and none; contexts of one context tile."""
    contexts = (2, 31, 32, 33, 65, 300)
    mix = Mix(decode=contexts, num_padding_rows=1, group_size=2, num_kv_heads=1)
    assert_as_the_reference(mix, num_programs)


@pytest.mark.device
@pytest.mark.parametrize("num_programs", [1, 4, 7])
def test_windows_softcaps_and_sinks_hold_in_parts_and_padding(num_programs: int) -> None:
    """Windows that begin within a tile, before it and after it; a sink counts once."""
    mix = Mix(
        decode=(2, 65, 300),
        num_padding_rows=1,
        prefill=((70, 40), (0, 9)),
        num_padding_tokens=5,
        group_size=2,
        num_kv_heads=2,
    )
    traits = AttentionTraits(
        scale=0.4, window=50, softcap=4.0, sinks_H=torch.tensor([-1.0, 0.5, 3.0, 0.0])
    )
    assert_as_the_reference(mix, num_programs, traits)


@pytest.mark.drawn(2)
@pytest.mark.device
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("num_programs", [3, 12])
def test_prefill_behind_long_contexts_is_the_same_in_parts(
    num_programs: int, is_plain: bool
) -> None:
    """Several parts a head, of which the last hold tokens that the first queries do not
    see; rows with and without a cached context, decode rows before them.
    """
    mix = Mix(
        decode=(65,),
        num_padding_rows=1,
        prefill=((700, 40), (0, 9), (3, 0), (415, 1)),
        num_padding_tokens=5,
        group_size=2,
        num_kv_heads=2,
        head_dim=24,
    )
    sinks_H = torch.tensor([-1.0, 0.5, 3.0, 0.0])
    traits = AttentionTraits(scale=0.4, window=500, softcap=4.0, sinks_H=sinks_H)
    assert_as_the_reference(mix, num_programs, PLAIN if is_plain else traits)


@pytest.mark.drawn(3)
@pytest.mark.device
@pytest.mark.parametrize("group_size", [1, 2, 5, 7, 8, 16, 17, 64])
def test_query_heads_of_any_group_size_share_their_kv_head(group_size: int) -> None:
    mix = Mix(decode=(40, 9), prefill=((20, 30), (0, 3)), group_size=group_size, head_dim=64)
    assert_as_the_reference(mix, None)


@pytest.mark.device
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256])
def test_heads_of_any_width_attend(head_dim: int) -> None:
    mix = Mix(decode=(40, 9), prefill=((5, 30),), num_kv_heads=2, group_size=2, head_dim=head_dim)
    assert_as_the_reference(mix, 2)


@pytest.mark.device
def test_rows_without_tokens_take_nothing_from_their_neighbours() -> None:
    prefill = ((3, 0), (0, 0), (5, 17), (9, 0), (0, 33), (1, 0))
    mix = Mix(decode=(5,), prefill=prefill, num_padding_tokens=70, num_kv_heads=2)
    assert_as_the_reference(mix, None)


@pytest.mark.device
def test_a_batch_of_padding_alone_is_harmless() -> None:
    mix = Mix(num_padding_rows=3)
    q, k, v = projection(mix, 3)
    in_graph = as_in_a_graph(build(mix), mix)
    attention = device_attention()
    attention.attend(q, k, v, 0, attention.begin(in_graph))
    assert in_graph.kv[0][1:].isnan().all()


@pytest.mark.device
@given(
    num_tokens=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (14, 2), (8, 8), (40, 8)]),
    head_dim=st.sampled_from([8, 16, 64, 96]),
    block_size=st.sampled_from([1, 16, 256]),
    turn=st.sampled_from(["none", "rotated", "normed"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=scaled(20))
def test_append_kv_is_norm_rotation_and_copy(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    turn: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Every third token is padding, which may leave anything in block 0."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, heads[0] + 2 * heads[1], head_dim, generator=generator)
    fused = fused.to(HOME, dtype)
    before = fused.clone()
    parts = fused.split([heads[0], heads[1], heads[1]], dim=1)
    slots = torch.randperm(max(1, num_tokens) * 2, generator=generator)[:num_tokens] + block_size
    slots[::3] = 0
    shape = (-(-(2 * num_tokens) // block_size) + 2, 3, 2, heads[1], block_size, head_dim)
    rotation = rotation_of(turn, num_tokens, head_dim, dtype, generator)
    results = []
    for append in (append_kv, append_kv_reference):
        caches = torch.full(shape, 7.0, dtype=dtype, device=HOME)
        q = append(*parts, caches[:, 1], slots.to(HOME), rotation)
        assert q.is_contiguous()
        results.append((q, caches[1:]))
    tolerance = ONE_ROUNDING[dtype]
    torch.testing.assert_close(*map(list, results), rtol=tolerance, atol=tolerance)
    assert torch.equal(fused, before)


def rotation_of(
    turn: str, num_tokens: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> Rotation | None:
    """Return cosines and sines of random angles that differ in the two halves."""
    if turn == "none":
        return None
    angles = torch.rand(num_tokens, head_dim, generator=generator).to(HOME) * 6
    norms = torch.rand(2, head_dim, generator=generator).to(HOME, dtype) + 0.5
    return Rotation(angles.cos(), angles.sin(), *((*norms, 1e-5) if turn == "normed" else ()))


@pytest.mark.device
def test_blocks_beyond_two_gi_numbers_are_reached() -> None:
    """A sparse cache of 4 blocks, 2 GiB apart: offsets do not fit into 32 bits."""
    mix = Mix(decode=(20,), prefill=((0, 5),), num_kv_heads=2, group_size=2)
    q, k, v = projection(mix, mix.num_tokens)
    parts = [part.half().to(HOME) for part in (q, k, v)]
    batch = as_in_a_graph(build(mix), mix)
    near = batch.kv[0].half()
    order = torch.tensor([0, *batch.block_tables_RM[0, :2].tolist(), batch.block_tables_RM[1, 0]])
    near = near[order].to(HOME)
    far = torch.empty(3 * 2**30 + near[0].numel(), dtype=torch.half, device=HOME)
    far = far.as_strided(near.shape, (2**30, *near.stride()[1:]))
    far.copy_(near)
    batch = replace(
        batch,
        slots_T=torch.tensor([2 * 16 + 3, *range(3 * 16, 3 * 16 + 5)], device=HOME),
        block_tables_RM=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32, device=HOME),
        query_starts_E=batch.query_starts_E.to(HOME),
        context_lens_R=batch.context_lens_R.to(HOME),
    )
    attention = TritonPagedAttention()
    outs = [
        attention.attend(*parts, 0, attention.begin(replace(batch, kv=[cache])))
        for cache in (near, far)
    ]
    assert torch.equal(*outs)
    assert torch.equal(far[1:].nan_to_num(), near[1:].nan_to_num())


@given(
    num_rows=st.integers(1, 600),
    num_kv_heads=st.integers(1, 64),
    table_tokens=st.integers(1, 200_000),
    block_n=st.sampled_from([32, 64]),
)
def test_there_are_as_many_programs_as_the_device_holds_but_none_that_never_has_work(
    num_rows: int, num_kv_heads: int, table_tokens: int, block_n: int
) -> None:
    num_programs = program_choice(num_rows, num_kv_heads, table_tokens, block_n, 2 * 132)
    num_tiles = num_rows * num_kv_heads * -(-table_tokens // block_n)
    assert 1 <= num_programs <= 2 * 132
    assert num_programs == 2 * 132 or num_programs == -(-num_tiles // 2)


@given(group_size=st.integers(1, 64), head_dim=st.integers(8, 256), is_decode=st.booleans())
def test_a_tile_holds_all_query_heads_of_a_token(
    group_size: int, head_dim: int, is_decode: bool
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert launch_choice(dtype, head_dim, group_size, is_decode).block_m >= group_size


@pytest.mark.gpu
def test_a_captured_step_follows_what_its_tensors_hold() -> None:
    """Captured for one set of lengths, replayed for another, of the same shape."""
    captured = Mix(decode=(5, 200), prefill=((0, 30), (40, 3)), num_kv_heads=2, group_size=7)
    replayed = replace(captured, decode=(290, 17), prefill=((270, 2), (0, 31)), seed=5)
    batches = [as_in_a_graph(build(mix), mix) for mix in (captured, replayed)]
    parts = [projection(mix, mix.num_tokens) for mix in (captured, replayed)]
    reference = device_attention(4)
    expected = reference.attend(*parts[1], 0, reference.begin(batches[1]))
    names = ("slots_T", "block_tables_RM", "query_starts_E", "context_lens_R")
    width = max(batch.block_tables_RM.shape[1] for batch in batches)
    shape = (max(batch.kv[0].shape[0] for batch in batches), *batches[0].kv[0].shape[1:])
    fixed: dict[str, Tensor] = {name: getattr(batches[0], name).cuda() for name in names}
    fixed["block_tables_RM"] = torch.zeros(4, width, dtype=torch.int32, device=HOME)
    fixed |= {name: part.cuda() for name, part in zip("qkv", parts[0], strict=True)}
    cache = torch.zeros(shape, device=HOME)
    batch = replace(batches[0], kv=[cache], **{name: fixed[name] for name in names})
    attention = TritonPagedAttention(num_programs=4)
    heads = [fixed[name] for name in "qkv"]
    attention.attend(*heads, 0, attention.begin(batch))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(*heads, 0, attention.begin(batch))
    for name in names:
        new = getattr(batches[1], name)
        fixed[name][..., : new.shape[-1]].copy_(new)
    for tensor, part in zip(heads, parts[1], strict=True):
        tensor.copy_(part)
    cache[: batches[1].kv[0].shape[0]].copy_(as_in_a_graph(build(replayed), replayed).kv[0])
    graph.replay()
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "fp32"))]
)
def test_every_kernel_compiles_for_an_h100_within_its_memory(dtype: str, tmp_path: Path) -> None:
    usage = compiled("aot_attention", dtype, tmp_path)
    assert len(usage) > 20
    assert max(use["shared"] for use in usage.values()) <= SHARED_MEMORY_BYTES
    spilled = SPILLED_BYTES_OF_OLD_TRITON if IS_OLD_TRITON else 0
    assert max(use["stack"] for use in usage.values()) <= SPILLED_BYTES.get(dtype, spilled)
    for name, use in usage.items():
        lacking = 1 if IS_OLD_TRITON and " 64 64 " in name else 0
        assert use["programs"] >= use["wanted_programs"] - lacking, name
