"""The device that an engine runs on: by name, in any thread, and among the engines of a fleet."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from rollout import SamplingParams
from rollout.backends.base import Backend
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.devices import environment_of, parse_device
from rollout.backends.select import create_backend, needs_gpu, use_device
from rollout.config import InferenceConfig
from rollout.errors import ConfigError
from rollout.launch import local
from rollout.launch.launcher import EngineJob
from rollout.parallel.collectives import ONE_RANK
from tests.tiny_models import prompt_of, tiny_engine, tiny_model


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Make torch report four devices. Returns the indices for which backends were made."""
    asked: list[int | None] = []
    module: Any = ModuleType("rollout.backends.cuda.backend")

    def cuda_backend(memory_kind: str, *, index: int | None, **arguments: Any) -> Backend:
        asked.append(index)
        return cpu_backend("device")

    module.cuda_backend = cuda_backend
    monkeypatch.setitem(sys.modules, "rollout.backends.cuda.backend", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return asked


def test_a_device_is_named_with_or_without_an_index(four_devices: list[int | None]) -> None:
    for name in ("auto", "cuda", "cuda:1", "cuda:3"):
        create_backend(InferenceConfig(device=name))
    assert four_devices == [None, None, 1, 3]


def test_ranks_take_the_devices_from_the_named_one_on(
    four_devices: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives: Any = type("Rank", (), {"rank": 2, "size": 3})()
    create_backend(InferenceConfig(device="cuda:1"), collectives)
    assert four_devices == [3]
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    use_device(InferenceConfig(device="cuda:1"), 2)
    use_device(InferenceConfig(device="cuda"), 2)
    use_device(InferenceConfig(device="cpu"), 2)
    assert used == [3, 2]


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:4", r"device='cuda:4' is not available: torch sees 4 CUDA.*CUDA_VISIBLE_DEVICES"),
        ("cuda:-1", r"device='cuda:-1' does not exist"),
        ("cuda:", r"device='cuda:' does not exist"),
        ("cpu:0", r"device='cpu:0' does not exist"),
        ("tpu", r"device='tpu' does not exist; use 'auto', 'cpu', 'cuda'"),
    ],
)
def test_an_unavailable_device_is_refused_with_the_remedy(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_backend(InferenceConfig(device=name), ONE_RANK)


def test_parse_device_does_not_need_the_device() -> None:
    assert parse_device("cuda:7") == ("cuda", 7)
    assert parse_device("cuda") == ("cuda", None)
    assert needs_gpu(InferenceConfig(device="cuda"))
    assert not needs_gpu(InferenceConfig(device="cuda:1")), "all engines get that one"
    assert not needs_gpu(InferenceConfig(device="cpu"))


# ---- fleets


@pytest.mark.parametrize(
    ("visible", "num_gpus", "expected"),
    [
        (None, 1, ["0", "1", "2", "3", "0"]),
        (None, 2, ["0,1", "2,3", "0,1"]),
        ("5,GPU-8a", 1, ["5", "GPU-8a", "5"]),
        (None, 0, [None, None]),
    ],
)
@pytest.mark.usefixtures("four_devices")
def test_engines_of_a_fleet_see_a_device_each_and_share_in_turn_beyond(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    visible: str | None,
    num_gpus: int,
    expected: list[str | None],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with caplog.at_level(logging.WARNING):
        found = [environment_of(number, num_gpus) for number in range(len(expected))]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == expected
    assert ("shares its device" in caplog.text) == (num_gpus > 0)


@pytest.mark.usefixtures("four_devices")
def test_the_local_launcher_gives_each_engine_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def process(name: str, module: str, begin: Any, **options: Any) -> Any:
        given.append(options["environment"])

    monkeypatch.setattr(local, "SupervisedProcess", process)
    job = EngineJob(
        module="m",
        arguments={},
        num_gpus=2,
        address=None,  # type: ignore[arg-type]
        max_restarts=0,
        start_timeout_s=1.0,
        on_end=lambda name, reason: None,
    )
    local.LocalLauncher().launch(job, 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in given] == ["0,1", "2,3"]


# ---- threads


def test_any_thread_that_steps_or_stages_launches_on_the_engines_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new thread's current device is 0, and a trainer may set its own."""
    is_current = False
    launched: list[bool] = []

    @contextlib.contextmanager
    def as_current() -> Iterator[None]:
        nonlocal is_current
        is_current = True
        yield
        is_current = False

    def watched(call: Any) -> Any:
        def watch(*arguments: Any, **named: Any) -> Any:
            launched.append(is_current)
            return call(*arguments, **named)

        return watch

    backend = cpu_backend("device")
    monkeypatch.setattr(backend.executor, "launch", watched(backend.executor.launch))
    for name in ("fingerprint", "copy_with_fingerprint"):
        monkeypatch.setattr(backend.ops, name, watched(getattr(backend.ops, name)))
    made = replace(backend, as_current=as_current)
    monkeypatch.setattr("rollout.worker.loading.create_backend", lambda *_: made)
    engine = tiny_engine(tiny_model("qwen3", seed=8))
    engine.add_request(prompt_of(5), SamplingParams(num_tokens_to_generate=3))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(launched) >= 3
    engine.update_weights(tiny_model("qwen3", seed=9).state_dict(), in_flight=True)
    assert engine.weights_checksum()
    assert len(launched) >= 5
    assert all(launched)
    assert not is_current


def test_float32_on_a_device_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_device = replace(cpu_backend("device"), device=torch.device("meta"))
    made = [cpu_backend("device"), on_a_device]
    monkeypatch.setattr("rollout.worker.loading.create_backend", lambda *_: made.pop())
    monkeypatch.setattr("rollout.worker.loading.ServedWeights", lambda *_, **__: None)
    monkeypatch.setattr("rollout.worker.loading.open_model", lambda *_, **__: (model, None))
    from rollout.models import build_model
    from rollout.worker.loading import load_model

    model = build_model(tiny_model("qwen3", seed=8))
    with caplog.at_level(logging.WARNING):
        load_model(model, InferenceConfig(), 0)
        assert "dtype=float32 on meta" in caplog.text
        caplog.clear()
        load_model(model, InferenceConfig(), 0)
    assert caplog.text == ""
