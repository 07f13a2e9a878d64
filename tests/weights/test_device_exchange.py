"""Exchange: updates of a device's weights change all or nothing, wherever a commit is interrupted.

The device is a host that reports another device type, with a bucket of a few rows.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.memory import MappedHostArena
from rollout.errors import ConfigError, WeightUpdateError
from rollout.layers.weight_slot import ReorderedSlot, TensorSlot, WeightSlot
from rollout.models.checkpoints.loading import open_model
from rollout.weights import staged as replacement
from rollout.weights.served import ServedWeights
from rollout.weights.staged import Exchange, Overwriting
from rollout.weights.update import NamedTensors, WeightStream
from tests.device_bytes import DeviceBytes
from tests.family_cases import FAMILY_CASES
from tests.lora_adapters import linear_modules, merged, random_adapter
from tests.tiny_models import IS_LONG
from tests.weights.test_rank_updates import Group, Seat, own_checksum, trainer, weights_of

META = torch.device("meta")
BUCKET_BYTES = 4096
NUM_EXAMPLES = 400 if IS_LONG else 40
all_families = pytest.mark.parametrize("case", FAMILY_CASES)


@pytest.fixture(autouse=True)
def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device."""
    monkeypatch.setenv("ROLLOUT_TUNE", "plain")


def served_by(
    source: Any,
    *,
    size: int = 1,
    dtype: str = "auto",
    is_device: bool = True,
    arenas: list[MappedHostArena] | None = None,
) -> Group:
    """Ranks whose weights are exchanged through a small bucket, or those of a host."""
    made: list[MappedHostArena] = [] if arenas is None else arenas

    def create_arena() -> MappedHostArena:
        made.append(MappedHostArena())
        return made[-1]

    ranks, models = [], []
    for rank in range(size):
        model, fill = open_model(source, dtype=dtype, rank=rank, size=size, seed=5)
        host = replace(cpu_backend("device"), collectives=Seat(rank, size))
        backend = replace(host, device=META, create_host_arena=create_arena) if is_device else host
        ranks.append(
            ServedWeights(
                model,
                backend,
                version=0,
                reject_non_finite=True,
                fill=fill,
                bucket_bytes=BUCKET_BYTES,
            )
        )
        model.prepare(host)
        models.append(model)
    return Group(ranks, models)


def reused(weights: Mapping[str, Tensor]) -> NamedTensors:
    """A stream whose tensors come one after the other in the same memory."""

    def pairs() -> Iterator[tuple[str, Tensor]]:
        memory = torch.empty(max(t.numel() for t in weights.values()), dtype=torch.float64)
        for name, tensor in weights.items():
            place = memory.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
            yield name, place.copy_(tensor)
        memory.fill_(float("nan"))

    return WeightStream(pairs(), lasts=False)


def bytes_of(group: Group) -> list[Tensor]:
    """All bytes that a rank serves: its one buffer, and the persistent buffers."""
    return [
        tensor.clone()
        for rank, model in zip(group.ranks, group.models, strict=True)
        for tensor in (rank._memory.bytes_N, *model.persistent_buffers().values())
    ]


def assert_same(given: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


@pytest.mark.drawn(12)
@pytest.mark.parametrize("size", [1, 2])
@all_families
def test_exchange_serves_the_new_values_and_keeps_the_old_ones(case: str, size: int) -> None:
    """Experts, latent attention, tied weights, and parts of ranks among the families."""
    device = served_by(trainer(case, 1), size=size)
    host = served_by(trainer(case, 1), size=size, is_device=False)
    addresses = [rank.data_ptrs() for rank in device.ranks]
    before = bytes_of(device)
    host.update(weights_of(case, 2))
    expected = bytes_of(host)
    staged = [rank.stage(reused(weights_of(case, 2))) for rank in device.ranks]
    assert all(isinstance(part.replacement, Exchange) for part in staged)
    assert_same(bytes_of(device), before)
    for _ in range(2):
        device.commit(staged)
        assert_same(bytes_of(device), expected)
        for rank, part in zip(device.ranks, staged, strict=True):
            rank.roll_back(part)
        assert_same(bytes_of(device), before)
    device.commit(staged)
    assert device.checksum() == host.checksum()
    if size == 1:
        assert [part.checksum for part in staged] == [host.checksum()]
    assert [rank.data_ptrs() for rank in device.ranks] == addresses


# ---- updates of every kind, cut off anywhere

CASES = ("qwen3", "gpt_oss")


def in_turn(case: str, dtype: torch.dtype = torch.float32) -> NamedTensors:
    return reused({name: tensor.to(dtype) for name, tensor in weights_of(case, 2).items()})


def adapter_of(case: str, **changes: Any) -> NamedTensors:
    served = weights_of(case, 1)
    return random_adapter(served, linear_modules(served)[:3], **changes)


def adapter_on_a_stream(case: str) -> NamedTensors:
    given: Any = adapter_of(case)
    return replace(given, base=in_turn(case))


KINDS: dict[str, Callable[[str], NamedTensors]] = {
    "mapping": lambda case: weights_of(case, 2),
    "mapping in float64": lambda case: {n: t.double() for n, t in weights_of(case, 2).items()},
    "stream": in_turn,
    "stream in bfloat16": lambda case: in_turn(case, torch.bfloat16),
    "some of it lasts": lambda case: (
        (name, tensor.clone() if index % 3 else torch.nn.Parameter(tensor))
        for index, (name, tensor) in enumerate(weights_of(case, 2).items())
    ),
    "adapter": adapter_of,
    "adapter on a stream": adapter_on_a_stream,
}


@contextmanager
def cut_off_at_line(number: int) -> Iterator[None]:
    """Ctrl-C as the line of this number in replacement.py is about to run, counted as they run."""
    left = [number]

    def on_line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: Any, event: str, argument: Any) -> Any:
        is_ours = frame.f_code.co_filename == replacement.__file__
        return on_line if is_ours and left[0] > 0 else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def failing_at_copy(number: int) -> Iterator[None]:
    """The copy of this number fails when half of it is done."""
    original, left = Tensor.copy_, [number]

    def failing(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            half = target.shape[0] // 2
            original(target[:half], source[:half])
            raise RuntimeError("made up")
        return original(target, source, non_blocking)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "copy_", failing)
        yield


@pytest.mark.parametrize("cut_off", [cut_off_at_line, failing_at_copy])
def test_exchange_rolls_back_wherever_both_directions_are_interrupted(cut_off: Any) -> None:
    """Each line and each copy in turn."""
    for number in itertools.count(1):
        exchange, slots, values = small_exchange()
        before = [slot.read().clone() for slot in slots], [rows.clone() for rows in values]
        if not is_cut_off(cut_off(number), exchange.replace):
            break
        is_cut_off(cut_off(number), exchange.roll_back)
        exchange.roll_back()
        for served, staged in (before, before[::-1]):
            assert_same([slot.read() for slot in slots], served)
            assert_same(values, staged)
            exchange.replace()
    assert number > 20


def test_exchange_buckets_take_weights_of_several_dtypes_and_odd_sizes() -> None:
    slots: dict[str, WeightSlot] = {
        "odd": TensorSlot(torch.randn(3).bfloat16()),
        "wide": TensorSlot(torch.randn(1)),
    }
    values = {name: torch.randn(slot.shape).to(slot.dtype) for name, slot in slots.items()}
    expected = [rows.clone() for rows in values.values()]
    in_use: Any = None
    exchange = Exchange(slots, in_use, values, 6, torch.device("cpu"))
    exchange.reserve(0)
    exchange.replace()
    assert_same([slot.read() for slot in slots.values()], expected)


def small_exchange() -> tuple[Exchange, list[WeightSlot], list[Tensor]]:
    """Of a vector, a matrix, and a stack that a checkpoint has in another order."""
    slots: dict[str, WeightSlot] = {
        "vector": TensorSlot(torch.randn(3)),
        "matrix": TensorSlot(torch.randn(2, 4)),
        "stack": ReorderedSlot(torch.randn(2, 4, 2), alternate=True, is_transposed=True),
    }
    values = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    in_use: Any = None
    exchange = Exchange(slots, in_use, values, 16, torch.device("cpu"))
    exchange.reserve(0)
    return exchange, [*slots.values()], [*values.values()]


def is_cut_off(cut_off: Any, work: Callable[[], None]) -> bool:
    try:
        with cut_off:
            work()
    except (KeyboardInterrupt, WeightUpdateError, RuntimeError):
        return True
    return False


@cache
def expected_bytes(case: str, kind: str) -> list[Tensor]:
    """What a host serves after the update."""
    host = served_by(trainer(case, 1), is_device=False)
    host.update(KINDS[kind](case))
    return bytes_of(host)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    case=st.sampled_from(CASES),
    kind=st.sampled_from(sorted(KINDS)),
    cut_off=st.builds(cut_off_at_line, st.integers(1, 2000))
    | st.builds(failing_at_copy, st.integers(1, 550)),
)
def test_commit_interrupted_anywhere_changes_no_byte_on_a_device(
    case: str, kind: str, cut_off: Any
) -> None:
    group = served_by(trainer(case, 1))
    (served,), before = group.ranks, bytes_of(group)
    staged = served.stage(KINDS[kind](case))
    try:
        with cut_off:
            served.commit(staged, None)
    except (KeyboardInterrupt, WeightUpdateError):
        assert_same(bytes_of(group), before)
        assert (served.version, served.has_values) == (0, True)
        served.commit(staged, None)
    assert_same(bytes_of(group), expected_bytes(case, kind))
    served.roll_back(staged)
    assert_same(bytes_of(group), before)
    served.commit(staged, 7)
    assert_same(bytes_of(group), expected_bytes(case, kind))


@pytest.mark.parametrize("kind", ["mapping", "stream", "adapter on a stream"])
def test_commit_takes_updates_that_were_staged_together_in_any_order(kind: str) -> None:
    case = "qwen3"
    group = served_by(trainer(case, 1))
    (served,) = group.ranks
    first = served.stage(KINDS[kind](case))
    second, third = served.stage(in_turn(case)), served.stage(weights_of(case, 3))
    served.commit(third, None)
    between = bytes_of(group)
    served.commit(first, None)
    assert_same(bytes_of(group), expected_bytes(case, kind))
    with failing_at_copy(50), pytest.raises(WeightUpdateError, match="made up"):
        served.commit(second, None)
    assert_same(bytes_of(group), expected_bytes(case, kind))
    served.roll_back(first)
    assert_same(bytes_of(group), between)
    served.commit(second, None)
    assert_same(bytes_of(group), expected_bytes(case, "stream"))


@pytest.mark.parametrize("discard", [False, True])
def test_commit_after_release_and_restore_of_the_weights(discard: bool) -> None:
    group = served_by(trainer("qwen3", 1))
    (served,), before = group.ranks, bytes_of(group)
    staged = served.stage(in_turn("qwen3"))
    served.release(discard=discard)
    served.restore()
    served.commit(staged, None)
    assert_same(bytes_of(group), expected_bytes("qwen3", "stream"))
    served.roll_back(staged)
    assert served.has_values is not discard
    if not discard:
        assert_same(bytes_of(group), before)


def test_stage_of_a_failing_stream_releases_its_memory() -> None:
    arenas: list[MappedHostArena] = []
    (served,) = served_by(trainer("qwen3", 1), arenas=arenas).ranks
    weights = weights_of("qwen3", 2)
    num_arenas = len(arenas)
    errors = []
    for bad in (weights | {"lm_head.weight": weights["lm_head.weight"] * float("inf")}, {}):
        with pytest.raises(WeightUpdateError) as caught:
            served.stage(reused(weights | bad) if bad else iter([("model.norm.weight", 5)]))
        errors.append(caught.value)  # with what it was raised in
    staged = served.stage(reused(weights))
    served.commit(staged, None)
    assert len(arenas) == num_arenas
    other = served.stage(reused(weights))
    assert len(arenas) == num_arenas + 1, "the first update has the weights from before"
    served.roll_back(staged)
    served.commit(other, None)


def test_stage_backs_up_only_tensors_that_last() -> None:
    """What the model computes itself says nothing of the others."""
    (served,) = served_by(trainer("qwen3", 1)).ranks
    parameters = [*trainer("qwen3", 2).named_parameters()]
    inv_freq = ("model.rotary_emb.inv_freq", torch.ones(8))
    staged = served.stage(iter([inv_freq, *parameters]))
    assert isinstance(staged.replacement, Overwriting)
    for kind, make in KINDS.items():
        staged = served.stage(make("qwen3"))
        expected = Overwriting if "mapping" in kind else Exchange
        assert isinstance(staged.replacement, expected), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_stage_verifies_source_checksum_before_a_stream_is_cast(dtype: torch.dtype) -> None:
    (served,) = served_by(trainer("qwen3", 1), dtype="bfloat16").ranks
    weights = {name: tensor.to(dtype) for name, tensor in weights_of("qwen3", 2).items()}
    served.stage(reused(weights), source_checksum=own_checksum(weights))
    altered = own_checksum(weights | {"model.norm.weight": weights["model.norm.weight"] + 1})
    with pytest.raises(WeightUpdateError, match="as announced"):
        served.stage(reused(weights), source_checksum=altered)


@pytest.mark.parametrize("case", ["phi3", "glm4", "qwen3"])
def test_stage_verifies_source_checksum_of_whole_tensors_on_ranks(case: str) -> None:
    """The first two families have weights of which a rank keeps several ranges."""
    weights = {name: tensor.double() for name, tensor in weights_of(case, 2).items()}
    group = served_by(trainer(case, 1), size=2)
    group.update(weights, own_checksum(weights))
    assert group.checksum() == served_by(trainer(case, 2)).checksum()


def test_commit_frees_an_outdated_backup_before_the_next_one() -> None:
    arenas: list[MappedHostArena] = []
    (served,) = served_by(trainer("qwen3", 1), arenas=arenas).ranks
    first, second = (served.stage(weights_of("qwen3", seed)) for seed in (2, 3))
    num_arenas = len(arenas)
    served.commit(first, None)
    del first
    served.commit(second, None)
    assert len(arenas) == num_arenas


def test_commit_makes_a_backup_that_failed_before() -> None:
    group = served_by(trainer("qwen3", 1))
    (served,), before = group.ranks, bytes_of(group)
    first, second = (served.stage(weights_of("qwen3", seed)) for seed in (2, 3))
    served.commit(first, None)
    after_first = bytes_of(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedHostArena, "reserve", no_memory)
        with pytest.raises(WeightUpdateError, match="made up"):
            served.commit(second, None)
    assert_same(bytes_of(group), after_first)
    served.roll_back(first)
    served.commit(second, None)
    served.roll_back(second)
    assert_same(bytes_of(group), before)


@pytest.mark.parametrize("is_device", [True, False])
def test_backup_copies_the_weights_that_serve_when_it_is_made(is_device: bool) -> None:
    """Another update is committed while this one is staged, and taken back after."""
    group = served_by(trainer("qwen3", 1), is_device=is_device)
    (served,), before = group.ranks, bytes_of(group)
    other = [served.stage(in_turn("qwen3"))]

    def commit_the_other() -> None:
        if served.version == 0:
            served.commit(other[0], None)

    staged = served.stage(weights_of("qwen3", 3), commit_the_other)
    served.roll_back(other[0])
    served.commit(staged, None)
    served.roll_back(staged)
    assert_same(bytes_of(group), before)


def no_memory(arena: MappedHostArena, num_bytes: int) -> Tensor:
    raise ConfigError("made up")


def test_stage_takes_tied_weights_under_both_names_of_a_stream() -> None:
    tied = next(case for case in FAMILY_CASES if trainer(case, 1).config.tie_word_embeddings)
    (served,) = served_by(trainer(tied, 1)).ranks
    weights = weights_of(tied, 2)
    name = "model.embed_tokens.weight"
    twice = {"lm_head.weight": weights[name], **weights}
    host = served_by(trainer(tied, 1), is_device=False)
    served.commit(served.stage(reused(twice)), None)
    assert served.checksum() == host.update(weights)
    with pytest.raises(WeightUpdateError, match="tied in this model"):
        served.stage(reused(twice | {name: weights[name] + 1}))


@pytest.mark.parametrize("is_device", [True, False])
def test_stage_takes_an_adapter_with_a_tied_base(is_device: bool) -> None:
    tied = next(case for case in FAMILY_CASES if trainer(case, 1).config.tie_word_embeddings)
    group = served_by(trainer(tied, 1), is_device=is_device)
    weights = weights_of(tied, 2)
    adapter = random_adapter(weights, linear_modules(weights)[:2])
    expected = served_by(trainer(tied, 1), is_device=False).update(merged(weights, adapter))
    assert group.update(replace(adapter, base=weights)) == group.checksum() == expected


def test_stage_of_an_adapter_copies_only_adapted_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stack in another order can only be read as a copy, of which one is there at a time."""
    group = served_by(trainer("gpt_oss", 1))
    (served,), (model,) = group.ranks, group.models
    weights = weights_of("gpt_oss", 1)
    adapter = random_adapter(weights, linear_modules(weights)[:1])
    no_hash = torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(type(served._hasher), "of_kept", lambda *arguments: no_hash)
    slots = model.weight_slots().values()
    stacks = [math.prod(slot.shape) * 4 for slot in slots if isinstance(slot, ReorderedSlot)]
    assert sum(stacks) > 3 * max(stacks)
    with DeviceBytes("cpu") as device:
        served.stage(adapter)
    assert device.peak < 2 * max(stacks)


def test_commit_of_an_adapter_keeps_its_base_for_the_next_adapter() -> None:
    group, host = (served_by(trainer("qwen3", 1), is_device=d) for d in (True, False))
    (served,) = group.ranks
    weights = weights_of("qwen3", 1)
    modules = linear_modules(weights)
    for seed, chosen in enumerate((modules[:3], modules[1:2], modules[2:5])):
        adapter = random_adapter(weights, chosen, seed=seed)
        before = bytes_of(group)
        served.commit(staged := served.stage(adapter), None)
        served.roll_back(staged)
        assert_same(bytes_of(group), before)
        served.commit(staged, None)
        host.update(adapter)
        assert_same(bytes_of(group), bytes_of(host))


def test_commit_is_refused_on_a_device_without_memory_for_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = served_by(trainer("qwen3", 1))
    (served,), before = group.ranks, bytes_of(group)
    staged = served.stage(in_turn("qwen3"))

    def refusing(*shape: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refusing)
        with pytest.raises(WeightUpdateError, match=r"bucket.*made up"):
            served.commit(staged, None)
    assert_same(bytes_of(group), before)
    served.commit(staged, None)
    assert_same(bytes_of(group), expected_bytes("qwen3", "stream"))
