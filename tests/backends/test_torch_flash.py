"""torch_flash: what torch's function is called with, what is refused, and whole engines over it.

The function runs on a device alone. Elsewhere `plain_varlen` stands for it, which follows what
torch documents; that the call fits torch's own signature and operation is shown on meta tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout import ConfigError
from rollout.backends.attention.reference import ReferenceAttention
from rollout.backends.attention.torch_flash import TorchFlashAttention, torch_varlen
from rollout.backends.buffers import Strips
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cuda.graph_shapes import GraphShape, Ladder
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch
from rollout.worker.kv_layout import strips_of
from tests.backends.paged_mixes import Mix, as_in_a_graph, build, projection
from tests.backends.plain_varlen import plain_flash
from tests.backends.repeating_device import check_a_life_with_a_suspend, graph_engine
from tests.contracts.attention_cases import make_spec
from tests.family_cases import family_model
from tests.run_kind import scaled
from tests.tiny_models import tiny_model

pytest.importorskip("torch.nn.attention.varlen")


def has_varlen() -> bool:
    try:
        torch_varlen()
    except ConfigError:
        return False
    return True


needs_varlen = pytest.mark.skipif(not has_varlen(), reason="torch_flash wants torch 2.13")
LADDER = Ladder(
    decode=(GraphShape(num_decode_rows=4),),
    mixed=(GraphShape(num_decode_rows=4, num_prefill_rows=2, num_prefill_tokens=24),),
)
mixes = st.builds(
    Mix,
    decode=st.lists(st.integers(2, 150), max_size=3).map(tuple),
    num_padding_rows=st.integers(0, 2),
    prefill=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=3).map(tuple),
    num_padding_tokens=st.sampled_from([0, 1, 13]),
    is_decode_known=st.booleans(),
    group_size=st.sampled_from([1, 5, 8]),
    num_kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([8, 24, 64]),
    block_size=st.sampled_from([1, 16, 256]),
    seed=st.integers(0, 1000),
)


def in_a_graph(batch: ForwardBatch, mix: Mix) -> ForwardBatch:
    """Padded, with garbage wherever nothing may be read; blocks lie apart."""
    cache = torch.stack((batch.kv[0], batch.kv[0]), dim=1)[:, 1]
    return replace(as_in_a_graph(batch, mix), kv=[cache])


@given(mix=mixes, window=st.sampled_from([None, None, 1, 9, 50]))
@settings(max_examples=scaled(60))
def test_padding_and_host_arrays_do_not_matter(mix: Mix, window: int | None) -> None:
    """Outputs of real tokens and all of the cache, in the shape of a captured step."""
    if not mix.num_tokens:
        return
    padding = mix.num_padding_tokens if mix.prefill else 0  # as graphs pad
    mix, traits = replace(mix, num_padding_tokens=padding), AttentionTraits(window=window)
    parts = projection(mix, mix.num_tokens + padding)
    batch = build(mix)
    in_graph = in_a_graph(batch, mix)
    real_parts = [part[: mix.num_tokens] for part in parts]
    expected = ReferenceAttention().attend(*real_parts, 0, batch, None, traits)
    attention = plain_flash()
    out = attention.attend(*parts, 0, attention.begin(in_graph), None, traits)
    real = mix.real_tokens
    torch.testing.assert_close(out[real], expected[real], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(in_graph.kv[0][1:], batch.kv[0][1:], rtol=0, atol=0, equal_nan=True)


@needs_varlen
@pytest.mark.parametrize(
    "mix",
    [
        Mix(decode=(300, 7), group_size=4, num_kv_heads=2, head_dim=64, block_size=256),
        Mix(decode=(40,), prefill=((3, 20), (0, 9)), num_kv_heads=2, head_dim=128, block_size=512),
    ],
    ids=["decode", "mixed"],
)
@pytest.mark.parametrize("traits", [PLAIN, AttentionTraits(window=30, scale=0.4)])
def test_the_call_fits_torchs_own_function(mix: Mix, traits: AttentionTraits) -> None:
    """Its operation is called with tensors without memory: names, kinds and shapes are checked."""
    batch, calls = build(mix), []
    on_meta = {
        name: getattr(batch, name).to("meta")
        for name in ("slots_T", "block_tables_RM", "query_starts_E", "context_lens_R")
    }
    cache = batch.kv[0].to("meta", torch.bfloat16)
    batch = replace(batch, kv=[cache], **on_meta)
    varlen = torch_varlen()

    def attend(*parts: Any, **named: Any) -> Tensor:
        calls.append(named)
        return varlen.attend(*parts, **named)

    attention = TorchFlashAttention(varlen=replace(varlen, attend=attend))
    q, k, v = (part.to("meta", torch.bfloat16) for part in projection(mix, mix.num_tokens))
    out = attention.attend(q, k, v, 0, attention.begin(batch), None, traits)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert [call["num_splits"] for call in calls] == [1], "more are wrong in torch 2.13"


def test_torch_without_block_tables_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(query: Tensor, *, scale: float | None = None) -> Tensor:
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    with pytest.raises(ConfigError, match=r"torch 2\.13.*lacks window_size, .*block_table.*'auto'"):
        torch_varlen()


# ---- the cache


@needs_varlen
def test_a_block_is_token_major_and_forks_copy_one_strip_a_layer() -> None:
    spec = make_spec(
        block_size=256, num_kv_heads=8, head_dim=128, num_layers=3, dtype=torch.bfloat16
    )
    attention = TorchFlashAttention()
    assert attention.cache_shape(spec, 5) == (5, 256, 2, 8, 128)
    assert strips_of(attention, spec) == Strips(
        num_strips=3, num_tokens=256, bytes_per_token=2 * 8 * 128 * 2
    )


@needs_varlen
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "dtype='float32'.*bfloat16 or float16"),
        ({"block_size": 128}, "block_size_tokens=128.*multiple of 256"),
        ({"head_dim": 512}, "head_dim=512"),
        ({"head_dim": 60}, "head_dim=60.*multiple of 8"),
        ({"head_dim": 64, "value_dim": 32}, "value_dim=32.*latent"),
    ],
)
def test_caches_that_torch_does_not_take_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    spec = make_spec(block_size=256, head_dim=64, dtype=torch.bfloat16)
    attention = TorchFlashAttention()
    attention.cache_shape(spec, 1)
    with pytest.raises(ConfigError, match=f"attention_backend='torch_flash' .*{message}.*'auto'"):
        attention.cache_shape(replace(spec, **changes), 1)


# ---- engines


@pytest.mark.parametrize(
    ("family", "message"),
    [("gemma2", "softcap="), ("gpt_oss", "attention sinks"), ("deepseek_v3", "value_dim=")],
)
def test_models_that_torch_cannot_serve_are_refused_when_they_are_known(
    monkeypatch: pytest.MonkeyPatch, family: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend='torch_flash' .*{message}"):
        graph_engine(monkeypatch, family_model(family), attention=plain_flash())


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_tokens_are_those_of_the_trainers_model(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A group that forks, captured steps, chunks of prompts, KV that was away on the host."""
    model = tiny_model("qwen3", seed=9) if family == "qwen3" else family_model(family, seed=9)
    engine, executor, _ = graph_engine(
        monkeypatch,
        model,
        ladder=LADDER,
        attention=plain_flash(cpu_backend("device").ops),
        max_requests=6,
        max_sequence_length=64,
        max_tokens=16,
        memory_kind="reserved",
        kv_cache_management_mode="offload",
    )
    check_a_life_with_a_suspend(engine, model)
    assert executor.num_captures > 0


# ---- on a device


@needs_varlen
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    "mix",
    [
        Mix(decode=(2, 300, 1000), num_padding_rows=1, group_size=4, num_kv_heads=2),
        Mix(decode=(2, 300), prefill=((0, 300), (513, 70)), group_size=4, num_kv_heads=2),
        Mix(prefill=((0, 40),), num_padding_tokens=9, num_kv_heads=2),
    ],
    ids=["decode", "mixed", "prefill"],
)
def test_torch_and_triton_agree(mix: Mix, window: int | None, dtype: torch.dtype) -> None:
    """On the same rows, each with a cache in its own layout; and both with float32's reference."""
    pytest.importorskip("triton")
    from rollout.backends.cuda.attention import TritonPagedAttention

    mix = replace(mix, block_size=256, head_dim=128)
    traits, real = AttentionTraits(window=window), mix.real_tokens
    batch = build(mix)
    batch.kv[0].copy_(batch.kv[0].to(dtype))
    parts = [p.to(dtype) for p in projection(mix, mix.num_tokens + mix.num_padding_tokens)]
    kinds = {
        TritonPagedAttention(): as_in_a_graph(batch, mix),
        TorchFlashAttention(): in_a_graph(batch, mix),
    }
    outs = [on_device(kind, parts, in_graph, traits) for kind, in_graph in kinds.items()]
    real_parts = [part[: mix.num_tokens].float() for part in parts]
    expected = ReferenceAttention().attend(*real_parts, 0, batch, None, traits)
    torch.testing.assert_close(outs[0][real], outs[1][real], rtol=2e-2, atol=2e-2)
    for out in outs:
        torch.testing.assert_close(out[real], expected[real], rtol=2e-2, atol=2e-2)


def on_device(
    attention: Any, parts: list[Tensor], batch: ForwardBatch, traits: AttentionTraits
) -> Tensor:
    names = ("slots_T", "block_tables_RM", "query_starts_E", "context_lens_R")
    moved = {name: getattr(batch, name).cuda() for name in names}
    batch = replace(batch, kv=[batch.kv[0].to("cuda", parts[0].dtype)], **moved)
    heads = [part.cuda() for part in parts]
    out: Tensor = attention.attend(*heads, 0, attention.begin(batch), None, traits)
    return out.cpu().float()
