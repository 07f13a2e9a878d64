"""LatentAttention against attention with keys and values of each head, in float64: 1e-4."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import CacheSpec
from rollout.backends.cpu.backend import cpu_backend
from rollout.layers.latent_attention import LatentAttention, LatentAttentionSpec, LatentDims
from rollout.layers.rope import RopeSpec, RotaryTable
from tests.contracts.attention_cases import Row, causal_attention, make_batch, make_cache
from tests.run_kind import scaled

HIDDEN_SIZE, BLOCK_SIZE, EPS = 24, 8, 1e-6
CPU = torch.device("cpu")

specs = st.builds(
    LatentAttentionSpec,
    num_heads=st.integers(1, 5),
    dims=st.builds(
        LatentDims,
        q_lora_rank=st.sampled_from([None, 6, 17]),
        kv_lora_rank=st.sampled_from([5, 8, 24]),
        qk_nope_head_dim=st.sampled_from([3, 8, 16]),
        qk_rope_head_dim=st.sampled_from([2, 8]),
        v_head_dim=st.sampled_from([4, 9, 16]),
    ),
    bias=st.just(False),
    output_bias=st.booleans(),
    rope=st.builds(RopeSpec, is_interleaved=st.booleans()),
    rope_index=st.just(0),
    scale=st.sampled_from([0.1, 0.4]),
)


def make_layer(spec: LatentAttentionSpec, seed: int) -> LatentAttention:
    """Return a layer with random weights, large enough to make attention uneven."""
    layer = LatentAttention(0, HIDDEN_SIZE, spec, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.normal_(std=0.4, generator=generator)
    backend = cpu_backend("device")
    for module in layer.modules():
        if hasattr(module, "bind"):
            module.bind(backend)
    return layer


def run(layer: LatentAttention, x_TE: Tensor, cuts: list[int]) -> Tensor:
    """Run the layer over one sequence, in chunks that end at `cuts`."""
    spec, dims = layer.spec, layer.spec.dims
    cache = CacheSpec(
        num_layers=1,
        num_kv_heads=1,
        head_dim=dims.cached_dim,
        value_dim=dims.kv_lora_rank,
        dtype=torch.float32,
        block_size=BLOCK_SIZE,
    )
    table = RotaryTable(spec.rope, dims.qk_rope_head_dim, device=CPU)
    table.reserve(len(x_TE))
    kv = make_cache(layer.attention, cache, 8)
    outs = []
    for start, end in zip([0, *cuts], [*cuts, len(x_TE)], strict=True):
        row = Row(num_cached=start, num_new=end - start, blocks=(5, 2, 7, 1))
        batch = layer.attention.begin(make_batch([row], kv, BLOCK_SIZE))
        outs.append(layer(x_TE[start:end], [table(batch.positions_T)], batch))
    return torch.cat(outs)


def expected(layer: LatentAttention, x_TE: Tensor) -> Tensor:
    """Compute the layer by the paper, with keys and values of each head."""
    spec, dims = layer.spec, layer.spec.dims
    weights = {name: p.double() for name, p in layer.named_parameters()}
    x_TE = x_TE.double()
    query, latent_TR, k_TP = (x_TE @ weights["input.weight"].T).split(
        [layer.input_split[0], dims.kv_lora_rank, dims.qk_rope_head_dim], dim=1
    )
    if dims.q_lora_rank is not None:
        query = normed(query, weights["q_a_layernorm.weight"]) @ weights["q_b.weight"].T
    q_THQ = query.view(len(x_TE), spec.num_heads, -1)
    latent_TR = normed(latent_TR, weights["kv_a_layernorm.weight"])
    made = (latent_TR @ weights["kv_b_proj.weight"].T).view(len(x_TE), spec.num_heads, -1)
    k_THN, v_THV = made.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=2)
    q_THN, q_THP = q_THQ.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=2)
    k_THP = turned(k_TP[:, None], spec.rope).expand(-1, spec.num_heads, -1)
    q_THQ = torch.cat((q_THN, turned(q_THP, spec.rope)), dim=2)
    context_THV = causal_attention(q_THQ, torch.cat((k_THN, k_THP), dim=2), v_THV, layer.traits)
    return context_THV.flatten(1) @ weights["output.weight"].T + weights.get("output.bias", 0)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x_THP: Tensor, rope: RopeSpec) -> Tensor:
    """Multiply each pair of dims, as a complex number, by e^(i position theta^(-2 pair / P))."""
    num_pairs = x_THP.shape[2] // 2
    frequencies = rope.theta ** (-torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    angles = torch.outer(torch.arange(len(x_THP), dtype=torch.float64), frequencies)
    if rope.is_interleaved:
        real, imaginary = x_THP[..., ::2], x_THP[..., 1::2]
    else:
        real, imaginary = x_THP.chunk(2, dim=2)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(real.contiguous(), imaginary.contiguous()) * turns
    if rope.is_interleaved:
        return torch.view_as_real(pairs).flatten(2)
    return torch.cat((pairs.real, pairs.imag), dim=2)


@given(spec=specs, cuts=st.sets(st.integers(1, 26), max_size=3), seed=st.integers(0, 1000))
@settings(max_examples=scaled(40))
def test_latent_attention_equals_attention_over_keys_and_values_of_heads(
    spec: LatentAttentionSpec, cuts: set[int], seed: int
) -> None:
    layer = make_layer(spec, seed)
    x_TE = torch.randn(27, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed + 1))
    out_TE = run(layer, x_TE, sorted(cuts))
    torch.testing.assert_close(out_TE.double(), expected(layer, x_TE), rtol=1e-4, atol=1e-4)


def test_latent_attention_follows_new_weights_in_place() -> None:
    """The layer keeps no copy of the projections to keys and values."""
    dims = LatentDims(
        q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6
    )
    spec = LatentAttentionSpec(
        norm_rounds_first=False,
        rotary_rounding="once",
        num_heads=2,
        dims=dims,
        bias=False,
        output_bias=False,
        rope=RopeSpec(),
        rope_index=0,
        scale=0.4,
    )
    layer = make_layer(spec, 0)
    x_TE = torch.randn(20, HIDDEN_SIZE)
    before = run(layer, x_TE, [])
    layer.kv_b_proj.weight.mul_(-2.0)
    after = run(layer, x_TE, [])
    torch.testing.assert_close(after.double(), expected(layer, x_TE), rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 0.1
