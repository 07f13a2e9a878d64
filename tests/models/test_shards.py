"""Two and four ranks that share a model compute what one does: every family.

Shape letters: L logit rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.library import load_library
from rollout.backends.forward_batch import ForwardBatch
from rollout.errors import LockstepError, ModelError
from rollout.models import CausalLM, build_model
from rollout.models.checkpoints.loading import open_model
from rollout.models.families.registry import FAMILIES
from rollout.parallel.collectives import Collectives, OneRank
from tests.family_cases import FAMILY_CASES, family_model, family_of
from tests.thread_ranks import on_ranks
from tests.tiny_models import tiny_model

BLOCK_SIZE = 8
LENGTHS = (13, 30)  # of prompts, beyond the window and not
NUM_DECODES = 3
NUM_IDS = 208  # that prompts are drawn from, of a vocabulary that may have more
TOLERANCE = 2e-5  # of logits of some units
FUSED_CASES = [
    case
    for case in FAMILY_CASES
    if FAMILIES[family_of(case)].mixture is None
    and not FAMILIES[family_of(case)].has_latent_attention
]
needs_compiler = pytest.mark.skipif(load_library() is None, reason="no C compiler")


def backend_of(collectives: Collectives, *, is_fused: bool) -> Backend:
    backend = cpu_backend("device")
    fuse = backend.fuse_decoder if is_fused else None
    return replace(backend, collectives=collectives, fuse_decoder=fuse)


def batch_of(query_lens: list[int], contexts: list[int], caches: list[Tensor]) -> ForwardBatch:
    """The last `query_lens` tokens of `contexts`, in blocks of each row's own; all have logits."""
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    most = -(-(max(LENGTHS) + NUM_DECODES) // BLOCK_SIZE)  # so that a row keeps its blocks
    tables = 1 + np.arange(len(contexts) * most, dtype=np.int32).reshape(len(contexts), most)
    rows = list(zip(query_lens, contexts, tables, strict=True))
    positions = np.concatenate([np.arange(context - new, context) for new, context, _ in rows])
    slots = np.concatenate(
        [
            table[np.arange(context - new, context) // BLOCK_SIZE] * BLOCK_SIZE
            + np.arange(context - new, context) % BLOCK_SIZE
            for new, context, table in rows
        ]
    )
    generator = torch.Generator().manual_seed(int(sum(contexts)))
    return ForwardBatch(
        token_ids_T=torch.randint(0, NUM_IDS, (int(starts[-1]),), generator=generator),
        positions_T=torch.from_numpy(positions),
        slots_T=torch.from_numpy(slots).long(),
        block_tables_RM=torch.from_numpy(tables),
        query_starts_E=torch.from_numpy(starts),
        context_lens_R=torch.tensor(contexts, dtype=torch.int32),
        query_starts=starts,
        context_lens=np.array(contexts, dtype=np.int32),
        num_decode_rows=sum(new == 1 for new in query_lens),
        block_size=BLOCK_SIZE,
        logit_indices_L=torch.arange(int(starts[-1])),
        kv=caches,
    )


def prepared(
    source: Any,
    collectives: Collectives,
    *,
    is_fused: bool = False,
    dtype: str = "auto",
) -> CausalLM:
    model, fill = open_model(source, dtype=dtype, rank=collectives.rank, size=collectives.size)
    assert fill is not None
    fill()
    model.prepare(backend_of(collectives, is_fused=is_fused))
    if is_fused:
        forbid_layers(model)
    return model


def forbid_layers(model: CausalLM) -> None:
    """Let nothing run layer by layer."""

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("the fused decoder has left this pass to the layers")

    model.model.forward = refuse  # type: ignore[method-assign]


def caches_of(model: CausalLM) -> list[Tensor]:
    spec = model.cache_spec(BLOCK_SIZE)
    num_blocks = 1 + len(LENGTHS) * -(-(max(LENGTHS) + NUM_DECODES) // BLOCK_SIZE)
    # One piece of memory, in which a block of all layers lies together, as in `KVCache`.
    shape = model.attention.cache_shape(spec, num_blocks)
    pool = torch.zeros((shape[0], spec.num_layers, *shape[1:]), dtype=spec.dtype)
    return list(pool.unbind(1))


@torch.inference_mode()
def logits_of(model: CausalLM) -> Tensor:
    """Of two prompts, and then of some steps of a token each, [L, V]."""
    caches, logits = caches_of(model), []
    for step in range(NUM_DECODES + 1):
        query_lens = [1] * len(LENGTHS) if step else list(LENGTHS)
        contexts = [length + step for length in LENGTHS]
        batch = batch_of(query_lens, contexts, caches)
        logits.append(model.compute_logits(model(batch)))
    return torch.cat(logits)


def logits_on_ranks(source: Any, size: int, **how: Any) -> list[Tensor]:
    return on_ranks(size, lambda collectives: logits_of(prepared(source, collectives, **how)))


# ---- what all ranks compute


@pytest.mark.drawn(12)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_of_all_ranks_equal_those_of_one(case: str, size: int) -> None:
    source = family_model(case, seed=3)
    assert_as_one(logits_on_ranks(source, size), logits_on_ranks(source, 1)[0])


@pytest.mark.drawn(8)
@needs_compiler
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", FUSED_CASES)
def test_logits_of_fused_decoders_on_ranks_equal_those_of_layers_on_one(
    case: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    source = family_model(case, seed=3)
    expected_LV = logits_on_ranks(source, 1)[0]
    assert_as_one(logits_on_ranks(source, size, is_fused=True), expected_LV)


def assert_as_one(logits: list[Tensor], expected_LV: Tensor) -> None:
    first_LV, *others = logits
    assert expected_LV.abs().max() > 0.5
    torch.testing.assert_close(first_LV, expected_LV, rtol=TOLERANCE, atol=TOLERANCE)
    for other_LV in others:
        assert torch.equal(first_LV, other_LV), "all ranks sample from the same bits"


@needs_compiler
@pytest.mark.parametrize("case", ["qwen3", "olmo2", "cohere2"])
def test_fused_decoder_sums_the_same_bits_with_any_number_of_threads(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    source = family_model(case, seed=3)
    once, thrice = (
        on_ranks(2, lambda c: logits_of(prepared(source, c, is_fused=True)), num_threads=num)[0]
        for num in (1, 3)
    )
    assert torch.equal(once, thrice)


class BrokenAt(OneRank):
    """Rank 0 of two, whose `call`-th sum fails."""

    size = 2

    def __init__(self, call: int) -> None:
        self.num_calls, self._call = 0, call

    def all_reduce_(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self._call:
            raise LockstepError(f"call {self._call}")
        return x


@needs_compiler
def test_fused_decoder_raises_the_error_of_a_failed_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    collectives = BrokenAt(call=3)
    model = prepared(family_model("qwen3"), collectives, is_fused=True)
    batch = batch_of([*LENGTHS], [*LENGTHS], caches_of(model))
    with torch.inference_mode():
        with pytest.raises(LockstepError, match="call 3"):
            model(batch)
        assert collectives.num_calls == 3
        model(batch)
    num_sums = 1 + 2 * model.spec.num_layers
    assert collectives.num_calls == 3 + num_sums


def test_compute_logits_gathers_an_even_vocabulary_in_order() -> None:
    source = tiny_model("qwen2", seed=3, vocab_size=208, tie_word_embeddings=True)
    assert_as_one(logits_on_ranks(source, 4), logits_on_ranks(source, 1)[0])


def test_bfloat16_logits_of_ranks_are_as_near_to_float32_as_those_of_one() -> None:
    source = family_model("qwen3", seed=3)
    expected_LV = logits_on_ranks(source, 1)[0]
    errors = [
        (logits_on_ranks(source, size, dtype="bfloat16")[0] - expected_LV).abs().mean()
        for size in (1, 2, 4)
    ]
    assert max(errors[1:]) < 2 * errors[0]


def test_routing_of_all_ranks_equals_that_of_one() -> None:
    source = family_model("qwen3_moe", seed=3)
    expected, first, second = (
        routing
        for size in (1, 2)
        for routing in on_ranks(size, lambda collectives: routing_of(source, collectives))
    )
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def routing_of(source: Any, collectives: Collectives) -> Tensor:
    model = prepared(source, collectives)
    batch = batch_of([*LENGTHS], [*LENGTHS], caches_of(model))
    shape = len(batch.token_ids_T), model.spec.num_moe_layers, model.spec.experts_per_token
    batch = replace(batch, routing_TLK=torch.zeros(shape, dtype=torch.int16))
    with torch.inference_mode():
        model(batch)
    assert batch.routing_TLK is not None
    return batch.routing_TLK


# ---- what cannot be cut


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({}, 3, "num_heads=4 cannot be divided among tensor_parallel_size=3"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "num_kv_heads=6 cannot be divided"),
        ({"intermediate_size": 66}, 4, "intermediate_size=66 cannot be divided"),
        ({"vocab_size": 3}, 4, "vocab_size=3 is less than tensor_parallel_size=4"),
        ({"num_heads": 16, "num_kv_heads": 16}, 16, "num_experts=8 is less than"),
    ],
)
def test_local_refuses_a_model_that_ranks_cannot_divide(
    changes: dict[str, Any], size: int, reason: str
) -> None:
    spec = replace(build_model(family_model("qwen3_moe")).spec, **changes)
    with pytest.raises(ModelError, match=reason):
        spec.local(0, size)


def test_part_of_another_rank_is_refused_by_local_and_prepare() -> None:
    spec = build_model(family_model("qwen3")).spec
    with pytest.raises(ModelError, match=r"rank=2 must be in \[0, tensor_parallel_size=2\)"):
        spec.local(2, 2)
    part = build_model(spec.local(1, 2))
    with pytest.raises(ModelError, match=r"built for rank 1 of 2, but its backend is rank 0 of 1"):
        part.prepare(cpu_backend("device"))
    with pytest.raises(ModelError, match="rank 1 of 2 keeps only parts of the weights"):
        part.read_weights()
    with pytest.raises(ModelError, match="shard"):
        part.spec.to_hf_config()


def test_cache_spec_of_a_rank_has_the_heads_that_it_reads() -> None:
    spec = build_model(family_model("qwen3")).spec
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)
    heads = {size: CausalLM(spec.local(0, size)).cache_spec(8).num_kv_heads for size in (1, 2, 4)}
    assert heads == {1: 2, 2: 1, 4: 1}
