"""Updates on ranks that share a model: together they serve the weights of one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.library import load_library
from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import WeightUpdateError
from rollout.layers.weight_slot import kept_of
from rollout.models import ModelSpec
from rollout.models.checkpoints.loading import open_model
from rollout.models.plain_tensors import named_weights
from rollout.parallel.collectives import OneRank
from rollout.weights.fingerprints import (
    WeightShare,
    checksum_of_shares,
    checksums_of_shares,
)
from rollout.weights.lora import LoraAdapter
from rollout.weights.served import ServedWeights
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors, checksum_of
from tests.family_cases import FAMILY_CASES, family_model
from tests.lora_adapters import linear_modules, random_adapter
from tests.tiny_models import tiny_model

Weights = dict[str, Tensor]
all_families = pytest.mark.parametrize("case", FAMILY_CASES)
sizes = pytest.mark.parametrize("size", [2, 4])


class Seat(OneRank):
    """The place of a rank that says nothing: staging is the business of each by itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@dataclass(frozen=True, slots=True)
class Group:
    """The served weights of all ranks, and the votes that a group's leader takes."""

    ranks: list[ServedWeights]
    models: list[Any]

    def checksum(self) -> str:
        return checksum_of_shares([sent(rank.fingerprint_share()) for rank in self.ranks])

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each weight, computed in two pages."""
        names, found = self.ranks[0].names, dict[str, str]()
        for page in (names[:3], names[3:]):
            shares = [sent(rank.fingerprint_share(page)) for rank in self.ranks]
            found |= checksums_of_shares(shares)
        return found

    def stage(self, tensors: NamedTensors, source_checksum: str = "") -> list[StagedWeights]:
        staged = [rank.stage(tensors, source_checksum=source_checksum) for rank in self.ranks]
        if len(staged) > 1:
            assert staged[0].checksum == "", "not before all ranks' shares are there"
            shares = [sent(part.share) for part in staged]
            self.ranks[0].verify(staged[0], shares, source_checksum)
        return staged

    def commit(self, staged: Sequence[StagedWeights], version: int | None = None) -> int:
        return sum(
            rank.commit(part, version) for rank, part in zip(self.ranks, staged, strict=True)
        )

    def update(self, tensors: NamedTensors, source_checksum: str = "") -> str:
        """Returns the checksum that was announced to the caller."""
        staged = self.stage(tensors, source_checksum)
        self.commit(staged)
        return staged[0].checksum


def sent(share: WeightShare) -> WeightShare:
    """As it comes from another process."""
    received = pickle.loads(pickle.dumps(share))
    assert isinstance(received, WeightShare)
    return received


def group_of(source: Any, size: int, dtype: str = "auto") -> Group:
    models, ranks = [], []
    for rank in range(size):
        model, fill = open_model(source, dtype=dtype, rank=rank, size=size, seed=5)
        backend = replace(cpu_backend("device"), collectives=Seat(rank, size))
        ranks.append(ServedWeights(model, backend, version=0, reject_non_finite=True, fill=fill))
        model.prepare(backend)
        models.append(model)
    return Group(ranks, models)


@cache
def trainer(case: str, seed: int) -> Any:
    return family_model(case, seed=seed)


def weights_of(case: str, seed: int) -> Weights:
    return {name: tensor.detach() for name, tensor in named_weights(trainer(case, seed)).items()}


def own_checksum(tensors: Mapping[str, Tensor]) -> str:
    """As a sender announces it."""
    ops = cpu_backend("device").ops
    return checksum_of(
        {n: ops.fingerprint(x, hashed_dtype(x.dtype)).tolist() for n, x in tensors.items()}
    )


@pytest.mark.drawn(9)
@sizes
@all_families
def test_checksums_of_ranks_equal_those_of_one_process(case: str, size: int) -> None:
    one, group = (group_of(trainer(case, 1), num) for num in (1, size))
    assert group.checksum() == one.checksum()
    tensors = weights_of(case, 2)
    announced = own_checksum(tensors)
    assert group.update(tensors, announced) == one.update(tensors, announced)
    assert group.checksum() == one.checksum()
    other = group_of(trainer(case, 2), 1)
    assert group.checksum() == other.checksum()
    assert group.checksums() == one.checksums() == other.checksums()
    assert sorted(one.checksums()) == one.ranks[0].names
    assert {rank.version for rank in group.ranks} == {1}


@pytest.mark.drawn(9)
@all_families
def test_ranks_keep_their_parts_and_each_expert_once(case: str) -> None:
    whole = group_of(trainer(case, 1), 1).models[0].read_weights()
    slots = [model.weight_slots() for model in group_of(trainer(case, 1), 2).models]
    for name, values in whole.items():
        parts = [rank[name] for rank in slots]
        assert all(part.shape == values.shape for part in parts), name
        assert all(torch.equal(part.read(), kept_of(part, values)) for part in parts), name
        if ".experts." in name:
            assert sum(part.read().numel() for part in parts) == values.numel(), name
        elif "_proj.weight" in name and "kv_a" not in name and "q_a" not in name:
            assert all(part.read().numel() < values.numel() for part in parts), name


@pytest.mark.parametrize("size", [2, 4])
def test_random_weights_of_ranks_are_parts_of_one_process_draws(size: int) -> None:
    for case in ("qwen2", "gpt_oss", "gemma"):
        spec: ModelSpec = group_of(trainer(case, 1), 1).models[0].spec
        assert group_of(spec, size).checksum() == group_of(spec, 1).checksum()


# ---- the checks that need all shares


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cast_update_of_ranks_has_the_checksum_of_one_process(dtype: str) -> None:
    one, group = (group_of(trainer("qwen3", 1), num, dtype) for num in (1, 2))
    tensors = {name: tensor.double() for name, tensor in weights_of("qwen3", 2).items()}
    announced = own_checksum(tensors)
    assert group.update(tensors, announced) == one.update(tensors, announced) == one.checksum()
    assert group.checksum() == one.checksum()


# Parts of the first and of the last rank; a weight that all ranks have; an expert of the last.
BAD_PLACES = [
    ("qwen3", "model.layers.0.self_attn.q_proj.weight", (0, 0)),
    ("qwen3", "model.layers.1.self_attn.o_proj.weight", (-1, -1)),
    ("qwen3", "lm_head.weight", (-1, -1)),
    ("qwen3", "model.norm.weight", (3,)),
    ("qwen3_moe", "model.layers.2.mlp.experts.gate_up_proj", (-1, -1, -1)),
]


@pytest.mark.parametrize(("case", "name", "place"), BAD_PLACES)
def test_verify_refuses_nan_in_the_part_of_any_rank(
    case: str, name: str, place: tuple[int, ...]
) -> None:
    group = group_of(trainer(case, 1), 2)
    before = group.checksum()
    tensors = {n: tensor.clone() for n, tensor in weights_of(case, 2).items()}
    tensors[name][place] = torch.nan
    with pytest.raises(WeightUpdateError, match=f"{name}.* holds NaN"):
        group.stage(tensors)
    assert group.checksum() == before


def test_verify_finds_one_changed_number() -> None:
    group = group_of(trainer("qwen3", 1), 2)
    tensors = {name: tensor.clone() for name, tensor in weights_of("qwen3", 2).items()}
    announced = own_checksum(tensors)
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1
    with pytest.raises(WeightUpdateError, match=f"not {announced} as announced"):
        group.stage(tensors, announced)


def test_verify_refuses_ranks_with_different_tensors() -> None:
    group, tensors = group_of(trainer("gemma", 1), 2), weights_of("gemma", 2)
    other = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    first, second = (
        rank.stage(given) for rank, given in zip(group.ranks, (tensors, other), strict=True)
    )
    with pytest.raises(WeightUpdateError, match=r"ranks 0 and 1 .*only one of them has .*lm_head"):
        group.ranks[0].verify(first, [first.share, second.share])


def test_stage_takes_another_order_of_tensors_on_each_rank() -> None:
    group = group_of(trainer("qwen3_moe", 1), 2)
    tensors = {name: tensor.double() for name, tensor in weights_of("qwen3_moe", 2).items()}
    backwards = dict(reversed(tensors.items()))
    staged = [
        rank.stage(given, source_checksum="announced")
        for rank, given in zip(group.ranks, (tensors, backwards), strict=True)
    ]
    group.ranks[0].verify(staged[0], [part.share for part in staged], own_checksum(tensors))


def test_verify_refuses_tied_weights_that_differ_on_the_last_rank() -> None:
    group = group_of(trainer("gemma", 1), 2)
    tensors = weights_of("gemma", 2)
    head = tensors["model.embed_tokens.weight"].clone()
    group.stage(tensors | {"lm_head.weight": head})
    head[-1, -1] += 1
    with pytest.raises(WeightUpdateError, match="tied in this model"):
        group.stage(tensors | {"lm_head.weight": head})


def test_roll_back_restores_a_rank_that_has_committed() -> None:
    group = group_of(trainer("qwen3", 1), 2)
    before = group.checksum()
    staged = group.stage(weights_of("qwen3", 2))
    group.commit(staged, version=7)
    after = group.checksum()
    for rank, part in zip(group.ranks, staged, strict=True):
        rank.roll_back(part)
    assert group.checksum() == before
    assert {rank.version for rank in group.ranks} == {0}
    group.commit(staged, version=8)
    assert (group.checksum(), group.ranks[1].version) == (after, 8)


def test_commit_refuses_an_adapter_on_weights_that_were_rolled_back() -> None:
    group = group_of(tiny_model("qwen3", seed=1), 1)
    (served,) = group.ranks
    taken_back, kept = (served.stage(tiny_model("qwen3", seed=seed)) for seed in (2, 3))
    served.commit(taken_back, None)
    adapter = random_adapter(named_weights(tiny_model("qwen3", seed=2)))
    staged = served.stage(adapter)
    served.roll_back(taken_back)
    served.commit(kept, None)
    with pytest.raises(WeightUpdateError, match="other weights were committed"):
        served.commit(staged, None)


@pytest.mark.skipif(load_library() is None, reason="no C compiler")
def test_roll_back_restores_parts_packed_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    first, second = (tiny_model("qwen3", seed=seed, **sizes) for seed in (1, 2))
    group = group_of(first, 2)
    assert group.models[1].weight_slots()["lm_head.weight"].is_repacked
    before = group.checksum()
    assert before == group_of(first, 1).checksum()
    staged = group.stage(second)
    group.commit(staged)
    assert group.checksum() == group_of(second, 1).checksum()
    for rank, part in zip(group.ranks, staged, strict=True):
        rank.roll_back(part)
    assert group.checksum() == before


def test_restore_brings_back_released_parts() -> None:
    group = group_of(trainer("qwen2_moe", 1), 2)
    before = group.checksum()
    for rank in group.ranks:
        rank.release(discard=False)
    for rank in group.ranks:
        rank.restore()
    assert group.checksum() == before


# ---- adapters


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", ["qwen3", "olmo2", "phi3", "deepseek_v3"])
@pytest.mark.parametrize("has_base", [False, True])
def test_adapter_on_ranks_serves_the_weights_of_one_process(case: str, has_base: bool) -> None:
    one, group = (group_of(trainer(case, 1), num, "bfloat16") for num in (1, 2))
    weights = weights_of(case, 3 if has_base else 1)
    modules = [name for name in linear_modules(weights) if ".experts." not in name]
    base = weights if has_base else None
    for seed in (1, 2):
        adapter: LoraAdapter = random_adapter(weights, modules, seed=seed, base=base)
        announced = own_checksum(adapter.tensors)
        assert group.update(adapter, announced) == one.update(adapter, announced)
        assert group.checksum() == one.checksum()
    kept, whole = ([rank.num_base_bytes for rank in served.ranks] for served in (group, one))
    assert max(kept) < whole[0]
    # A full update ends the adapter.
    assert group.update(weights_of(case, 4)) == one.update(weights_of(case, 4))


def test_verify_names_an_adapter_tensor_with_nan() -> None:
    group = group_of(trainer("qwen3", 1), 2)
    weights = weights_of("qwen3", 1)
    adapter = random_adapter(weights, linear_modules(weights)[:3])
    for name in adapter.tensors:
        bad = {**adapter.tensors, name: torch.full_like(adapter.tensors[name], torch.nan)}
        with pytest.raises(WeightUpdateError, match=f"{name}.* holds NaN"):
            group.stage(replace(adapter, tensors=bad))
