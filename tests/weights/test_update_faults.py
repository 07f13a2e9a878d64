"""Every fault of a weight update, at every stage and in every state, changes nothing."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from rollout import (
    DynamicInferenceEngine,
    EngineState,
    EngineStateError,
    SamplingParams,
    WeightUpdateError,
)
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.linear_ops import CpuOps
from rollout.models.checkpoints.loading import build_model
from rollout.weights.served import ServedWeights
from rollout.weights.staged import WeightBackup
from rollout.weights.version import MAX_VERSION
from tests.lora_adapters import random_adapter
from tests.tiny_models import (
    IS_LONG,
    Finished,
    drain,
    generate_all,
    prompt_of,
    tiny_engine,
    tiny_model,
)

Weights = dict[str, Tensor]
Source = Callable[[Weights], Any]
PARAMS = SamplingParams(num_tokens_to_generate=8, seed=2, return_log_probs=True)
# The packed product runs from 17 rows on: the last prompt shows which packed copies serve.
LENGTHS = (9, 20)
LATER_LENGTH = 40
NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
LAYER_NORM = "model.layers.1.post_attention_layernorm.weight"
STATES = ("RUNNING", "PAUSED", "persist", "offload", "recompute")


@cache
def old_model() -> Any:
    return tiny_model("llama", tie_word_embeddings=True, seed=1)


def new_weights() -> Weights:
    model = tiny_model("llama", tie_word_embeddings=True, seed=2)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class FailingTensor(Tensor):
    """A tensor on which one torch function fails; a copy from it fails after half the rows."""

    function: str
    error: BaseException

    @classmethod
    def wrap(cls, tensor: Tensor, function: str, error: BaseException) -> FailingTensor:
        wrapped = tensor.as_subclass(cls)
        wrapped.function, wrapped.error = function, error
        return wrapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else [arg])]
        failing = next(arg for arg in flat if isinstance(arg, cls))
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == failing.function:
                if name == "copy_":
                    half = len(args[0]) // 2
                    args[0][:half].copy_(failing[:half])
                raise failing.error
            result = func(*args, **(kwargs or {}))
            if name in ("detach", "to"):
                return cls.wrap(result, failing.function, failing.error)
            return result


def failing(name: str, function: str, error: BaseException) -> Source:
    return lambda w: w | {name: FailingTensor.wrap(w[name], function, error)}


def replaced(name: str, change: Callable[[Tensor], Any]) -> Source:
    return lambda w: w | {name: change(w[name])}


def broken_off(error: BaseException) -> Source:
    def source(w: Weights) -> Iterator[tuple[str, Tensor]]:
        yield from list(w.items())[:3]
        raise error

    return source


def poisoned(tensor: Tensor) -> Tensor:
    tensor.view(-1)[-1] = float("nan")
    return tensor


# Fault: (source, error, what its message holds).
FAULTS: dict[str, tuple[Source, type[BaseException], str]] = {
    "missing": (
        lambda w: {k: v for k, v in w.items() if k != NORM},
        WeightUpdateError,
        f"lacks 1 .*'{NORM}'",
    ),
    "nothing": (lambda w: {}, WeightUpdateError, "lacks"),
    "extra": (lambda w: w | {"model.x": torch.ones(1)}, WeightUpdateError, "'model.x'"),
    "twice": (
        lambda w: [*w.items(), (NORM, torch.ones(48))],
        WeightUpdateError,
        f"'{NORM}' comes twice",
    ),
    "transposed": (
        replaced(EMBED, lambda t: t.T.contiguous()),
        WeightUpdateError,
        rf"'{EMBED}' has shape \[48, 211\].*\[211, 48\]",
    ),
    "misshapen": (
        replaced(NORM, lambda t: torch.ones(47)),
        WeightUpdateError,
        rf"'{NORM}' has shape \[47\].*\[48\]",
    ),
    "one dim too many": (
        replaced(NORM, lambda t: torch.ones(1, 48)),
        WeightUpdateError,
        r"\[1, 48\]",
    ),
    "NaN": (
        replaced(GATE, poisoned),
        WeightUpdateError,
        f"'{GATE}' holds NaN.*reject_non_finite_weights",
    ),
    "infinity": (
        replaced(NORM, lambda t: t / -0.0),
        WeightUpdateError,
        f"'{NORM}' holds NaN or infinity",
    ),
    "too large for float32": (
        replaced(NORM, lambda t: torch.full((48,), 1e300, dtype=torch.float64)),
        WeightUpdateError,
        f"'{NORM}' holds NaN or infinity",
    ),
    "integers": (replaced(GATE, Tensor.int), WeightUpdateError, f"'{GATE}' has dtype torch.int32"),
    "bools": (replaced(GATE, Tensor.bool), WeightUpdateError, "torch.bool"),
    "complex": (
        replaced(GATE, lambda t: t.to(torch.complex64)),
        WeightUpdateError,
        "torch.complex64",
    ),
    "tied that differ": (
        lambda w: w | {HEAD: w[EMBED] + 1},
        WeightUpdateError,
        f"'{HEAD}' and '{EMBED}' are tied",
    ),
    "meta": (replaced(GATE, lambda t: t.to("meta")), WeightUpdateError, f"'{GATE}' is on the meta"),
    "no tensor": (replaced(GATE, lambda t: [1.0]), WeightUpdateError, f"'{GATE}' is a list"),
    "None": (replaced(GATE, lambda t: None), WeightUpdateError, f"'{GATE}' is a NoneType"),
    "sender dies": (broken_off(WeightUpdateError("after 'three'")), WeightUpdateError, "three"),
    "source dies": (
        broken_off(OSError("gone")),
        WeightUpdateError,
        "the source, after.*gone",
    ),
    "source times out": (broken_off(TimeoutError("5 s")), WeightUpdateError, "TimeoutError: 5 s"),
    "interrupted source": (broken_off(KeyboardInterrupt()), KeyboardInterrupt, "^$"),
    "check": (
        failing(GATE, "detach", RuntimeError("bad read")),
        WeightUpdateError,
        f"checking '{GATE}' failed with RuntimeError: bad read",
    ),
    "pack": (
        failing(GATE, "to", RuntimeError("no memory")),
        WeightUpdateError,
        "packing 'model.layers.1.mlp.gate_up' failed with RuntimeError: no memory",
    ),
    "interrupted pack": (failing(GATE, "to", KeyboardInterrupt()), KeyboardInterrupt, "^$"),
    **{
        f"copy of {name}": (
            failing(name, "copy_", RuntimeError("lost device")),
            WeightUpdateError,
            f"copying '{name}' failed with RuntimeError: lost device",
        )
        for name in (EMBED, LAYER_NORM, NORM)  # the first, one in the middle, the last
    },
    "interrupted copy": (failing(NORM, "copy_", KeyboardInterrupt()), KeyboardInterrupt, "^$"),
}
if os.environ["ROLLOUT_TUNE"] == "plain":  # which packs nothing
    del FAULTS["pack"], FAULTS["interrupted pack"]


@cache
def undisturbed() -> Finished:
    engine = tiny_engine(old_model())
    started(engine)
    finished = drain(engine)
    finished[2] = generate_all(engine, [(prompt_of(LATER_LENGTH), PARAMS)])[0]
    return finished


def started(engine: DynamicInferenceEngine) -> None:
    for length in LENGTHS:
        engine.add_request(prompt_of(length), PARAMS)
    for _ in range(3):
        engine.step()


def engine_in(state: str) -> DynamicInferenceEngine:
    """An engine with two requests under way, in RUNNING, PAUSED, or suspended under a mode."""
    engine = tiny_engine(old_model())
    started(engine)
    if state != "RUNNING":
        engine.pause()
    if state not in ("RUNNING", "PAUSED"):
        engine.suspend(state)
    return engine


def run_again(engine: DynamicInferenceEngine) -> None:
    if engine.state is EngineState.SUSPENDED:
        engine.resume()
    engine.unpause()


def assert_undisturbed(engine: DynamicInferenceEngine) -> None:
    """The requests under way and a later one have the tokens and log-probs of the old weights."""
    run_again(engine)
    finished = drain(engine)
    finished[2] = generate_all(engine, [(prompt_of(LATER_LENGTH), PARAMS)])[0]
    for request_id, expected in undisturbed().items():
        assert finished[request_id].generated_tokens == expected.generated_tokens
        given = finished[request_id].generated_log_probs
        assert_allclose(given, expected.generated_log_probs, atol=1e-5)


def assert_refused(
    engine: DynamicInferenceEngine, source: Any, error: type[BaseException], message: str
) -> None:
    before = (engine.state, engine.weights_version, engine.weights_checksum())
    pointers = engine.weight_data_ptrs()
    with pytest.raises(error, match=message):
        engine.update_weights(source, in_flight=engine.state is EngineState.RUNNING)
    assert (engine.state, engine.weights_version, engine.weights_checksum()) == before
    assert engine.weight_data_ptrs() == pointers
    assert engine.stats().num_weight_updates == before[1]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("state", STATES)
def test_update_weights_faults_change_nothing_and_are_named(state: str) -> None:
    engine = engine_in(state)
    for spoil, error, message in FAULTS.values():
        assert_refused(engine, spoil(new_weights()), error, message)
    assert_undisturbed(engine)


@pytest.mark.parametrize("state", STATES)
def test_commit_rolls_back_a_fault_of_packed_copies(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_in(state)
    for index in (0, 3, 8):
        for error in (RuntimeError("boom"), KeyboardInterrupt()):
            with monkeypatch.context() as patch:
                fail_call(patch, index, error)
                is_interrupt = isinstance(error, KeyboardInterrupt)
                expected = KeyboardInterrupt if is_interrupt else WeightUpdateError
                assert_refused(
                    engine, new_weights(), expected, "^$" if is_interrupt else "packed copies.*boom"
                )
    assert_undisturbed(engine)


def fail_call(patch: pytest.MonkeyPatch, index: int, error: BaseException) -> None:
    """Let the call number `index` of CpuOps.refresh fail, after it did its work."""
    original, calls = CpuOps.refresh, []

    def refresh(ops: CpuOps, handle: Any, staged: Any = None) -> None:
        original(ops, handle, staged)
        calls.append(handle)
        if len(calls) == index + 1:
            raise error

    patch.setattr(CpuOps, "refresh", refresh)


@pytest.mark.parametrize("state", STATES)
def test_update_weights_refuses_a_version_not_above_the_served_one(state: str) -> None:
    engine = engine_in(state)
    for version in (0, -1, 2**31, "1", True):
        with pytest.raises(WeightUpdateError, match="version="):
            engine.update_weights(new_weights(), version=version, in_flight=True)
        with pytest.raises(WeightUpdateError, match="version="):
            engine.commit_weights(engine.stage_weights(new_weights()), version, in_flight=True)
    assert engine.weights_version == 0
    assert_undisturbed(engine)


@pytest.mark.parametrize("version", [None, MAX_VERSION, MAX_VERSION + 1])
def test_update_weights_refuses_a_version_above_max_version(version: int | None) -> None:
    engine = tiny_engine(old_model(), weights_version=MAX_VERSION)
    with pytest.raises(WeightUpdateError, match="version="):
        engine.update_weights(new_weights(), version, in_flight=True)
    with pytest.raises(WeightUpdateError, match="version="):
        engine.commit_weights(engine.stage_weights(new_weights()), version, in_flight=True)
    with pytest.raises(WeightUpdateError, match="version="):
        engine.check_update(version, in_flight=True)
    assert engine.weights_version == MAX_VERSION
    (request,) = generate_all(engine, [(prompt_of(9), PARAMS)])
    assert set(request.policy_versions.tolist()) == {MAX_VERSION}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_commit_rolls_back_every_copy_of_every_family_and_dtype(family: str, dtype: str) -> None:
    """With biases (qwen2), with an untied head. Repacked weights are not copied by a commit."""
    engine = tiny_engine(tiny_model(family, seed=3), dtype=dtype)
    source = dict(tiny_model(family, seed=4).named_parameters())
    source = {name: parameter.detach() for name, parameter in source.items()}
    (before,) = generate_all(engine, [(prompt_of(30), PARAMS)])
    copied = [name for name in source if not name.endswith("proj.weight")]
    for name in copied if IS_LONG else copied[::5]:
        spoiled = failing(name, "copy_", RuntimeError("boom"))(source)
        assert_refused(engine, spoiled, WeightUpdateError, f"copying '{name}' failed")
    (after,) = generate_all(engine, [(prompt_of(30), PARAMS)])
    assert after.generated_log_probs.tolist() == before.generated_log_probs.tolist()
    engine.update_weights(source, in_flight=True)
    expected = tiny_engine(tiny_model(family, seed=4), dtype=dtype).weights_checksum()
    assert engine.weights_checksum() == expected


def test_commit_that_fails_restores_the_latest_committed_weights() -> None:
    engine = tiny_engine(tiny_model("llama", tie_word_embeddings=True, seed=7))
    stale = engine.stage_weights(failing(NORM, "copy_", RuntimeError("boom"))(new_weights()))
    engine.update_weights(dict(old_model().named_parameters()), in_flight=True)
    with pytest.raises(WeightUpdateError, match=f"'{NORM}'"):
        engine.commit_weights(stale, in_flight=True)
    assert engine.weights_version == 1
    assert engine.weights_checksum() == tiny_engine(old_model()).weights_checksum()
    (request,) = generate_all(engine, [(prompt_of(LATER_LENGTH), PARAMS)])
    assert request.generated_tokens == undisturbed()[2].generated_tokens


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("state", STATES)
def test_failed_roll_back_stops_sampling_until_a_full_update(
    state: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_in(state)
    with monkeypatch.context() as patch:
        fail_call(patch, index, RuntimeError("boom"))
        patch.setattr(WeightBackup, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(new_weights(), in_flight=True)
    refused = [engine.weights_checksum, lambda: run_again(engine) or engine.step()]
    for command in refused if state != "RUNNING" else [engine.weights_checksum, engine.step]:
        with pytest.raises(EngineStateError, match="commit a full update first"):
            command()
    engine.update_weights(dict(old_model().named_parameters()), in_flight=True)
    if engine.state is not EngineState.RUNNING:
        run_again(engine)
    finished = drain(engine)
    for request_id in range(len(LENGTHS)):
        expected = undisturbed()[request_id].generated_tokens
        assert finished[request_id].generated_tokens == expected


def test_commit_refuses_spent_staged_weights() -> None:
    engine = tiny_engine(old_model())
    staged = engine.stage_weights(new_weights())
    engine.commit_weights(staged, in_flight=True)
    checksum = engine.weights_checksum()
    with pytest.raises(WeightUpdateError, match="committed before; stage the update again"):
        engine.commit_weights(staged, in_flight=True)
    assert (engine.weights_version, engine.weights_checksum()) == (1, checksum)


def test_commit_can_be_repeated_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(old_model())
    staged = engine.stage_weights(new_weights())
    with monkeypatch.context() as patch:
        fail_call(patch, 5, RuntimeError("boom"))
        with pytest.raises(WeightUpdateError, match="boom"):
            engine.commit_weights(staged, in_flight=True)
    engine.commit_weights(staged, in_flight=True)
    expected = tiny_engine(old_model())
    expected.update_weights(new_weights(), in_flight=True)
    assert engine.weights_checksum() == expected.weights_checksum()


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Ctrl-C as the line of this number in ServedWeights.commit is about to run."""
    code, lines = inspect.unwrap(ServedWeights.commit).__code__, itertools.count(1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_commit_interrupted_at_any_line_changes_all_or_nothing() -> None:
    """From an adapter, whose base is kept, to weights that are not all finite."""
    model = build_model(old_model())
    backend = cpu_backend("device")
    served = ServedWeights(model, backend, version=0, reject_non_finite=False)
    model.prepare(backend)
    served.commit(served.stage(random_adapter(new_weights(), [GATE.removesuffix(".weight")])), 1)
    staged = served.stage(new_weights() | {NORM: poisoned(new_weights()[NORM])})

    def state() -> tuple[Any, ...]:
        return served.version, served.checksum(), served.is_finite, served.num_base_bytes

    before = state()
    assert before[2:] == (True, new_weights()[GATE].nbytes)
    for line in itertools.count(1):
        try:
            with interrupted_at(line):
                served.commit(staged, 2)
            break
        except KeyboardInterrupt:
            if served.version == 2:
                break
            assert state() == before, line
    assert line > 15
    assert state() == (2, staged.checksum, False, 0)


def interrupted(backup: WeightBackup) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("discard", [False, True])
def test_update_weights_of_released_weights_is_refused(discard: bool) -> None:
    engine = tiny_engine(old_model())
    engine.pause()
    engine.suspend(release=("weights",), discard_weights=discard)
    for command in (
        lambda: engine.update_weights(new_weights()),
        lambda: engine.stage_weights(new_weights()),
        engine.weights_checksum,
    ):
        with pytest.raises(EngineStateError, match=r"released; resume\(only='weights'\) first"):
            command()


def discarded() -> DynamicInferenceEngine:
    """A paused engine whose weights' memory is there, without values."""
    engine = tiny_engine(old_model())
    engine.pause()
    engine.suspend(release=("kv_cache", "weights"), discard_weights=True)
    engine.resume()
    return engine


def test_update_weights_after_discard_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a packed copy or a backup was made")

    engine = discarded()
    monkeypatch.setattr(CpuOps, "stage", refused)
    monkeypatch.setattr(WeightBackup, "__init__", refused)
    engine.update_weights(new_weights())
    engine.unpause()
    expected = tiny_engine(old_model())
    monkeypatch.undo()
    expected.update_weights(new_weights(), in_flight=True)
    assert engine.weights_checksum() == expected.weights_checksum()
    prompts = [(prompt_of(length), PARAMS) for length in (*LENGTHS, LATER_LENGTH)]
    tokens = [request.generated_tokens for request in generate_all(engine, prompts)]
    assert tokens == [request.generated_tokens for request in generate_all(expected, prompts)]


def test_commit_that_fails_after_discard_leaves_the_values_missing() -> None:
    engine = discarded()
    with pytest.raises(WeightUpdateError, match="boom"):
        engine.update_weights(failing(NORM, "copy_", RuntimeError("boom"))(new_weights()))
    assert engine.weights_version == 0
    with pytest.raises(EngineStateError, match="commit a full update first"):
        engine.unpause()
    engine.update_weights(new_weights())
    engine.unpause()
    expected = tiny_engine(old_model())
    expected.update_weights(new_weights(), in_flight=True)
    assert engine.weights_checksum() == expected.weights_checksum()


def test_commit_of_weights_staged_after_discard_is_refused_after_another_update() -> None:
    engine = discarded()
    staged = engine.stage_weights(new_weights())
    engine.update_weights(dict(old_model().named_parameters()))
    with pytest.raises(WeightUpdateError, match="stage it again"):
        engine.commit_weights(staged)
    assert engine.weights_checksum() == tiny_engine(old_model()).weights_checksum()
