"""The test suite's own helpers use the intended device on a machine with a GPU."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.tiny_models import tiny_engine, tiny_model


def test_a_tiny_engine_is_on_the_cpu_also_where_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert tiny_engine(tiny_model()).build.backend.device == torch.device("cpu")


def test_ops_that_bring_tensors_to_a_device_take_what_its_ops_take() -> None:
    pytest.importorskip("triton")
    from rollout.backends.cuda.ops import TritonOps
    from tests.contracts.on_device import DeviceOps

    own = {name for name, value in vars(DeviceOps).items() if inspect.isfunction(value)}
    for name in own & set(dir(TritonOps)) - {"__init__"}:
        ours, theirs = (
            list(inspect.signature(getattr(ops, name)).parameters) for ops in (DeviceOps, TritonOps)
        )
        assert ours == theirs, name
