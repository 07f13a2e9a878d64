"""Norms and the rotary embedding are rounded as the family's own modules in Transformers round.

Results must be equal bit for bit. Triton's interpreter rounds to float16 as a device does, but
truncates to bfloat16: there the kernels are compared in float16, and the reference in both.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout.backends.forward_batch import Rotation
from rollout.backends.ops.reference import ReferenceOps
from rollout.layers.attention import Attention
from rollout.layers.norm import RMSNorm
from rollout.layers.rope import RotaryTable, head_order
from rollout.models import CausalLM
from rollout.models.families.registry import FAMILIES
from rollout.models.spec import ModelSpec
from tests.contracts.on_device import device_ops
from tests.family_cases import family_model

CPU = torch.device("cpu")
HALVES = [torch.float16, torch.bfloat16]
NUM_TOKENS, NUM_HEADS = 40, 3
# The others have LayerNorms, which are rounded once everywhere.
NORMED = [name for name, family in FAMILIES.items() if family.values.get("norm") != "layer"]
# One of each way to round, and one with norms of heads.
KERNEL_FAMILIES = ["llama", "gemma", "olmo2", "cohere2", "qwen3", "gemma3_text"]


@cache
def case(family: str) -> tuple[ModelSpec, nn.Module, Any]:
    """Return the spec, the model of Transformers, and the Python module that defines it."""
    model = family_model(family, seed=3)
    spec = ModelSpec.from_hf_config(model.config.to_dict())
    return spec, model.model, importlib.import_module(type(model).__module__)


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trainers_norm(family: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a norm of the family with random weights, and the weights plus their offset."""
    spec, model, _ = case(family)
    norm = type(model.norm)(64, eps=spec.rms_norm_eps)
    norm.weight.data = drawn(64, seed=1, dtype=dtype)
    weight = norm.weight.detach()
    return norm, weight.float() + spec.norm_offset if spec.norm_offset else weight


def trainers_rotation(family: str, q_THD: Tensor, k_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads as the family's own code rotates them, in our order of dims."""
    spec, model, code = case(family)
    positions = torch.arange(NUM_TOKENS)[None] + 3
    embedding = model.rotary_emb
    types = getattr(embedding, "layer_types", None)
    rest = (sorted(types)[0],) if types else ()
    cos, sin = embedding(q_THD, positions, *rest)
    turned = code.apply_rotary_pos_emb(
        q_THD.transpose(0, 1)[None], k_TGD.transpose(0, 1)[None], cos, sin
    )
    order_D = order_of(family, spec)
    q_THD, k_TGD = (x[0].transpose(0, 1) for x in turned)
    return (q_THD, k_TGD) if order_D is None else (q_THD[..., order_D], k_TGD[..., order_D])


def order_of(family: str, spec: ModelSpec) -> Tensor | None:
    """Their latent attention takes pairs apart before the function that is called here."""
    rope = replace(spec.rope, is_interleaved=spec.rope.is_interleaved and spec.latent is None)
    return head_order(rope, spec.head_dim, CPU)


def heads(family: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Rotation]:
    """Return query and key heads as views of a projection, and their rotation."""
    spec, model, _ = case(family)
    q_THD, k_TGD = (
        drawn(NUM_TOKENS, num, spec.head_dim, seed=num, dtype=dtype) for num in (NUM_HEADS, 2)
    )
    types = getattr(model.rotary_emb, "layer_types", None)
    rope = spec.rope
    if types:
        layer = model.config.layer_types.index(sorted(types)[0])
        rope = spec.ropes[layer] or rope
    table = RotaryTable(rope, spec.head_dim, device=CPU)
    table.reserve(NUM_TOKENS + 3)
    cos_TD, sin_TD = table(torch.arange(NUM_TOKENS) + 3)
    return q_THD, k_TGD, Rotation(cos_TD, sin_TD, rounding=spec.rotary_rounding)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", NORMED)
def test_a_norm_rounds_like_the_familys_trainers(family: str, dtype: torch.dtype) -> None:
    spec = case(family)[0]
    norm, weight = trainers_norm(family, dtype)
    x = drawn(NUM_TOKENS, 64, seed=2, dtype=dtype)
    results = [
        ReferenceOps().rms_norm(x, weight, spec.rms_norm_eps, rounds_first=rounds_first)
        for rounds_first in (spec.norm_rounds_first, not spec.norm_rounds_first)
    ]
    assert torch.equal(results[0], norm(x))
    assert not torch.equal(results[1], norm(x))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotation_rounds_like_the_familys_trainers(family: str, dtype: torch.dtype) -> None:
    q_THD, k_TGD, rotation = heads(family, dtype)
    expected = trainers_rotation(family, q_THD, k_TGD)
    order_D = order_of(family, case(family)[0])
    if order_D is not None:
        q_THD, k_TGD = q_THD[..., order_D], k_TGD[..., order_D]
    for rounding in ("once", "angles", "each"):
        angles = rotation.cos_TD, rotation.sin_TD
        turned = ReferenceOps().rotary(q_THD, k_TGD, *angles, rounding)
        is_same = torch.equal(turned[0], expected[0]) and torch.equal(turned[1], expected[1])
        assert is_same == (rounding == rotation.rounding), rounding


def assert_rounded_alike(found: Tensor, expected: Tensor) -> None:
    """To the bit in the interpreter. A device's reciprocal roots are approximate, and one number in
    hundreds may be the next one; rounded elsewhere, many are.
    """
    if not torch.cuda.is_available():
        assert torch.equal(found, expected)
        return
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    assert (found != expected).float().mean() < 0.005


@pytest.mark.device
@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2"])
def test_kernels_round_norms_as_the_familys_trainers(family: str) -> None:
    pytest.importorskip("triton")
    spec, dtype = case(family)[0], torch.float16
    norm, weight = trainers_norm(family, dtype)
    x, residual = (drawn(NUM_TOKENS, 64, seed=seed, dtype=dtype) for seed in (2, 3))
    rounds_first = spec.norm_rounds_first
    ops = device_ops()
    normed = ops.rms_norm(x, weight, spec.rms_norm_eps, rounds_first=rounds_first)
    assert_rounded_alike(normed, norm(x))
    both = ops.add_rms_norm(x, residual, weight, spec.rms_norm_eps, rounds_first=rounds_first)
    assert_rounded_alike(both[0], norm(x + residual))
    assert torch.equal(both[1], x + residual)


@pytest.mark.device
@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_the_kernel_before_attention_rounds_as_the_familys_trainers(family: str) -> None:
    """append_kv norms heads if the family does, then rotates them; the cache gets the keys."""
    pytest.importorskip("triton")
    from rollout.backends.cuda.append import append_kv

    spec, dtype = case(family)[0], torch.float16
    q_THD, k_TGD, rotation = heads(family, dtype)
    expected = q_THD, k_TGD
    weight = drawn(spec.head_dim, seed=5, dtype=dtype)
    if has_norms := spec.qk_norm and not spec.qk_norm_whole:
        norm = type(case(family)[1].norm)(spec.head_dim, eps=spec.rms_norm_eps)
        norm.weight.data = weight
        scale = weight.float() + spec.norm_offset if spec.norm_offset else weight
        norms = scale, scale, spec.rms_norm_eps, spec.norm_rounds_first
        rotation = Rotation(rotation.cos_TD, rotation.sin_TD, *norms, rotation.rounding)
        expected = norm(q_THD), norm(k_TGD)
    expected = trainers_rotation(family, *expected)
    order_D = order_of(family, spec)
    if order_D is not None:
        assert not has_norms
        q_THD, k_TGD = q_THD[..., order_D], k_TGD[..., order_D]
    home = "cuda" if torch.cuda.is_available() else "cpu"
    cache_ = torch.zeros(3, 2, 2, 16, spec.head_dim, dtype=dtype, device=home)
    turned = append_kv(
        *(x.to(home) for x in (q_THD, k_TGD, k_TGD)),
        cache_,
        torch.arange(NUM_TOKENS, device=home),
        replace(
            rotation,
            **{
                name: getattr(rotation, name).to(home)
                for name in ("cos_TD", "sin_TD", "q_norm_D", "k_norm_D")
                if getattr(rotation, name) is not None
            },
        ),
    )
    assert_rounded_alike(turned.cpu(), expected[0])
    keys_TGD = cache_[:, 0].transpose(1, 2).flatten(0, 1)[:NUM_TOKENS]
    assert_rounded_alike(keys_TGD.cpu(), expected[1])


class TrainerLikeOps(ReferenceOps):
    rounds_like_trainers = True


def test_a_backend_chooses_whether_layers_round_like_trainers() -> None:
    from rollout.backends.cpu.backend import cpu_backend

    causal_lm = CausalLM(replace(case("qwen3")[0], dtype=torch.bfloat16))
    backend = cpu_backend("device")
    for ops, rounds in ((backend.ops, False), (TrainerLikeOps(), True)):
        causal_lm.prepare(replace(backend, ops=ops, fuse_decoder=None))
        norms = [m for m in causal_lm.modules() if isinstance(m, RMSNorm)]
        assert norms
        assert all(norm.rounds_first is rounds for norm in norms)
        attention = next(m for m in causal_lm.modules() if isinstance(m, Attention))
        angles = [(torch.ones(1, 16), torch.ones(1, 16))]
        rotation = attention._rotation(angles)
        assert rotation is not None
        assert (rotation.rounds_norm_first, rotation.rounding == "each") == (rounds, rounds)
