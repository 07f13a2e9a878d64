"""Contract of FusedDecoder: it gives the bits of the layers computed one by one.

Shape letters: L kept tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.decoder import native_decoder
from rollout.backends.cpu.library import load_library
from rollout.backends.cpu.products import BUCKETS, PLAIN
from rollout.backends.forward_batch import ForwardBatch
from rollout.errors import ConfigError
from rollout.layers.rope import RopeSpec
from rollout.models import CausalLM, ModelSpec
from tests.contracts.implementations import kernels

BLOCK_SIZE = 16
NUM_BLOCKS = 40
SPEC = ModelSpec(
    family="qwen3",
    vocab_size=50,
    hidden_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=72,
    max_position_embeddings=256,
)
WINDOWS = (9, None)
# Every trait of a layer that some family has, by itself.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "all biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "windows": {"windows": WINDOWS},
    "scale and softcap": {"attention_scale": 0.4, "attention_softcap": 4.0},
    "norms after": {"family": "olmo2", "qk_norm": True, "qk_norm_whole": True},
    "norms before and after": {"family": "glm4", "qk_norm": True},
    "parallel": {"family": "cohere2", "norm": "layer"},
    "ropes": {"ropes": (RopeSpec(theta=500.0), None), "qk_norm": True},
    "half of a head turns": {"rope": RopeSpec(partial=0.5, is_interleaved=True), "qk_norm": True},
    "norm weights + 1": {"norm_offset": 1.0, "qk_norm": True},
}
# Compilers and torch round what these compute differently.
ROUNDED_FAMILIES: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu_tanh"},
    "multipliers": {"embedding_multiplier": 7.0, "residual_multiplier": 0.3},
    "queries that grow": {"rope": RopeSpec(query_growth=0.2, original_max_positions=8)},
}
pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")


def native_backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    return cpu_backend("device")


def prepared(spec: ModelSpec, backend: Backend) -> CausalLM:
    model = CausalLM.random(spec, seed=3)
    generator = torch.Generator().manual_seed(5)
    for name, slot in model.weight_slots().items():
        values, mean = torch.empty(slot.shape, dtype=slot.dtype), name.endswith("norm.weight")
        slot.write(values.normal_(float(mean), 0.3, generator=generator))
    model.prepare(backend)
    return model


def caches(spec: ModelSpec, seed: int = 7) -> list[Tensor]:
    """Return caches in one buffer, where a block of all layers is contiguous, as in `KVCache`."""
    shape = (NUM_BLOCKS, spec.num_layers, BLOCK_SIZE, 2, spec.num_kv_heads, spec.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(shape, generator=generator).unbind(1))


def batch_of(
    rows: Sequence[tuple[int, int]], kept: Sequence[int], kv: Sequence[Tensor]
) -> ForwardBatch:
    """Return a batch of rows (context, new tokens), decode rows first; `kept`: token indices."""
    query_lens = [new for _, new in rows]
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    contexts = np.array([old + new for old, new in rows], dtype=np.int32)
    most_blocks = max(-(-int(length) // BLOCK_SIZE) for length in contexts)
    blocks = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist())
    tables = np.zeros((len(rows), most_blocks), dtype=np.int32)
    positions, slots = [], []
    for row, (old, new) in enumerate(rows):
        for index in range(-(-(old + new) // BLOCK_SIZE)):
            tables[row, index] = next(blocks)
        for position in range(old, old + new):
            positions.append(position)
            slots.append(
                int(tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            )
    num_tokens = int(starts[-1])
    generator = torch.Generator().manual_seed(num_tokens)
    return ForwardBatch(
        token_ids_T=torch.randint(0, SPEC.vocab_size, (num_tokens,), generator=generator),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        block_tables_RM=torch.from_numpy(tables),
        query_starts_E=torch.from_numpy(starts),
        context_lens_R=torch.from_numpy(contexts),
        query_starts=starts,
        context_lens=contexts,
        num_decode_rows=sum(new == 1 for new in query_lens),
        block_size=BLOCK_SIZE,
        logit_indices_L=torch.tensor(kept, dtype=torch.int64),
        kv=tuple(kv),
    )


def fused(model: CausalLM, batch: ForwardBatch) -> Tensor | None:
    assert model.fused is not None
    return model.fused.run([(table.cos_PD, table.sin_PD) for table in model.rotary], batch)


def one_by_one(model: CausalLM, batch: ForwardBatch) -> Tensor:
    angles = [table(batch.positions_T) for table in model.rotary]
    hidden_LE: Tensor = model.model(angles, model.attention.begin(batch))
    return hidden_LE


def assert_equal_to_layers(
    model: CausalLM,
    rows: Sequence[tuple[int, int]],
    kept: Sequence[int],
    tolerance: float = 0.0,
) -> None:
    model.reserve_positions(128)
    batch = batch_of(rows, kept, caches(model.spec))
    other = replace(batch, kv=caches(model.spec))
    result, expected = fused(model, batch), one_by_one(model, other)
    assert result is not None
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(result, expected, **near)
    for ours, theirs in zip(batch.kv, other.kv, strict=True):
        torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rows",
    [
        [(20, 1)],
        [(0, 1), (31, 1), (16, 1)],
        [(0, 23)],
        [(3, 1), (40, 1), (0, 17), (5, 30)],
    ],
)
def test_fused_decoder_equals_the_layers_one_by_one(
    family: str, rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared(replace(SPEC, **FAMILIES[family]), native_backend(monkeypatch))
    num_tokens = sum(new for _, new in rows)
    assert_equal_to_layers(model, rows, [num_tokens - 1, *range(0, num_tokens, 3)])


@pytest.mark.parametrize("family", ROUNDED_FAMILIES)
def test_fused_decoder_equals_the_layers_up_to_rounding(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared(replace(SPEC, **ROUNDED_FAMILIES[family]), native_backend(monkeypatch))
    assert_equal_to_layers(model, [(3, 1), (40, 1), (0, 17), (5, 30)], [0, 1, 18, 48], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_decoder_reads_a_tied_embedding_from_the_heads_panels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, vocab_size=64, tie_word_embeddings=True, dtype=dtype)
    model = prepared(spec, native_backend(monkeypatch))
    assert model.lm_head.repacked is not None
    table_VE = model.read_weights()["model.embed_tokens.weight"]
    token_ids_T = torch.tensor([0, 15, 16, 31, 32, 63, 7, 7])
    assert torch.equal(model.model.embed_tokens(token_ids_T), table_VE[token_ids_T])
    kv = [cache.to(dtype) for cache in caches(spec)]
    model.reserve_positions(128)
    result = fused(model, batch_of([(3, 1), (0, 17)], [0, 17], kv))
    # As with an embedding of its own, which is not packed.
    untied = CausalLM(replace(spec, tie_word_embeddings=False))
    for name, values in model.read_weights().items():
        untied.weight_slots()[name].write(values)
    untied.prepare(native_backend(monkeypatch))
    untied.reserve_positions(128)
    kv = [cache.to(dtype) for cache in caches(spec)]
    expected = fused(untied, batch_of([(3, 1), (0, 17)], [0, 17], kv))
    assert result is not None
    assert expected is not None
    assert torch.equal(result, expected)


@given(data=st.data())
def test_fused_decoder_gives_the_bits_of_the_layers_for_any_batch(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = prepared(replace(SPEC, qk_norm=True), native_backend(monkeypatch))
    decode = data.draw(st.lists(st.integers(0, 60), max_size=8))
    prefill = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(2, 40)), max_size=3))
    rows = [(old, 1) for old in decode] + prefill or [(0, 1)]
    num_tokens = sum(new for _, new in rows)
    kept = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=6))
    assert_equal_to_layers(model, rows, kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_decoder_in_bfloat16_agrees_with_the_layers_in_float32(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and KV are rounded to bfloat16; the pass rounds nothing else."""
    spec = replace(SPEC, **FAMILIES[family])
    backend = native_backend(monkeypatch)
    model = prepared(replace(spec, dtype=torch.bfloat16), backend)
    exact = prepared(spec, backend)
    for name, slot in exact.weight_slots().items():
        slot.write(model.read_weights()[name])
    exact.refresh()
    rows, kept = [(3, 1), (40, 1), (0, 17), (5, 30)], [0, 1, 18, 48]
    for each in (model, exact):
        each.reserve_positions(128)
    kv = [cache.bfloat16() for cache in caches(spec)]
    result = fused(model, batch_of(rows, kept, kv))
    assert result is not None
    assert result.dtype == torch.bfloat16
    expected = one_by_one(exact, batch_of(rows, kept, [c.bfloat16().float() for c in caches(spec)]))
    torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("unit", ["dot", "amx"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_decoder_by_dot_or_amx_agrees_with_vectors(
    family: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DOT and AMX round factors to bfloat16; several threads give the same bits."""
    if not getattr(kernels(), f"{unit}_is_usable")():
        pytest.skip(f"no native-{unit} on this machine")
    spec = replace(SPEC, dtype=torch.bfloat16, **FAMILIES[family])
    rows, kept = [(3, 1), (40, 1), (0, 17), (5, 30)], [0, 1, 18, 48]
    results = []
    for switch, num_threads in (("native-512", 1), (f"native-{unit}", 1), (f"native-{unit}", 3)):
        monkeypatch.setenv("ROLLOUT_TUNE", switch)
        model = prepared(spec, cpu_backend("device"))
        model.reserve_positions(128)
        kv = [cache.bfloat16() for cache in caches(spec)]
        torch.set_num_threads(num_threads)
        try:
            result = fused(model, batch_of(rows, kept, kv))
        finally:
            torch.set_num_threads(1)
        assert result is not None
        results.append(result.float())
    by_vectors, by_pairs, on_threads = results
    # 0.005 to 0.03 with random weights of several generators.
    assert (by_pairs - by_vectors).norm() < 0.06 * by_vectors.norm()
    assert not torch.equal(by_pairs, by_vectors), f"{unit} was not used"
    assert torch.equal(by_pairs, on_threads)


def test_fused_decoder_computes_a_long_prompt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, max_position_embeddings=1024)
    model = prepared(spec, native_backend(monkeypatch))
    model.reserve_positions(600)
    assert_equal_to_layers(model, [(2, 1), (0, 600)], [0, 600])


def test_fused_decoder_gives_the_same_bits_on_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = prepared(SPEC, native_backend(monkeypatch))
    model.reserve_positions(128)
    rows, kept = [(50, 1), (3, 1), (9, 1), (0, 40), (7, 21)], [0, 1, 2, 42, 63]
    alone = fused(model, batch_of(rows, kept, caches(SPEC)))
    torch.set_num_threads(3)
    try:
        together = fused(model, batch_of(rows, kept, caches(SPEC)))
    finally:
        torch.set_num_threads(1)
    assert alone is not None
    assert together is not None
    assert torch.equal(alone, together)


def test_fused_decoder_follows_new_weights_and_moved_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = prepared(SPEC, native_backend(monkeypatch))
    assert_equal_to_layers(model, [(5, 1), (0, 9)], [0, 9])
    for slot in model.weight_slots().values():
        slot.write(slot.read() * 1.25)
    model.refresh()
    assert_equal_to_layers(model, [(5, 1), (0, 9)], [0, 9])


def test_fused_decoder_returns_none_without_packed_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(SPEC, native_backend(monkeypatch))
    model.reserve_positions(128)
    batch = batch_of([(5, 1)], [0], caches(SPEC))
    expected = fused(model, batch)
    assert expected is not None
    model.release_packed()
    assert fused(model, batch) is None
    torch.testing.assert_close(model(batch), expected, rtol=1e-4, atol=1e-4)
    model.refresh()
    assert torch.equal(model(batch), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"head_dim": 24},
        {"hidden_size": 36},
        {"intermediate_size": 30},
    ],
)
def test_fused_decoder_returns_none_for_unsupported_models(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, **changes)  # type: ignore[arg-type]
    model = prepared(spec, native_backend(monkeypatch))
    model.reserve_positions(128)
    kv = [cache.to(spec.dtype) for cache in caches(spec)]
    assert fused(model, batch_of([(5, 1)], [0], kv)) is None
    assert model.fused is not None
    assert model.fused.explain().startswith("never: the compiled kernels need a float32")
    assert not model.fused.handles


def test_native_decoder_is_none_for_other_layers_and_refuses_deterministic() -> None:
    assert native_decoder(kernels(), None) is None
    with pytest.raises(ConfigError, match="deterministic=True needs layers of one attention"):
        native_decoder(kernels(), None, deterministic=True)


def test_prepare_again_replaces_the_fused_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = native_backend(monkeypatch)
    model = prepared(SPEC, backend)
    model.prepare(replace(backend, fuse_decoder=None))
    assert model.fused is None


def test_fused_decoder_returns_none_for_another_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "plain")
    model = prepared(SPEC, cpu_backend("device"))
    model.reserve_positions(128)
    assert fused(model, batch_of([(5, 1)], [0], caches(SPEC))) is None
    assert model.fused is not None
    assert model.fused.explain().startswith("never: the layers run one by one, as other products")


def test_fused_decoder_explains_which_numbers_of_rows_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = prepared(SPEC, native_backend(monkeypatch))
    assert model.fused is not None
    assert model.fused.explain() == "for any number of rows"
    native, *_ = (handle.packing for handle in model.fused.handles)
    for handle in model.fused.handles[:3]:  # of up to 2, 16 and 128 rows
        handle.use([PLAIN if rows in (2, 16, 128) else native for rows in BUCKETS])
    shown = model.fused.explain()
    assert shown.startswith("for 1, 3 to 8, 17 to 64, 129 or more rows; for others the layers")
    model.reserve_positions(128)
    for num_rows, is_fused in ((1, True), (2, False), (3, True), (9, False)):
        batch = batch_of([(5, 1)] * num_rows, range(num_rows), caches(SPEC))
        assert (fused(model, batch) is not None) == is_fused
