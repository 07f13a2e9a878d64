"""An engine shares a device with another engine, and with a trainer that has captured steps.

On a CPU they test the tests themselves; `make gpu-check` runs them on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout import DynamicInferenceEngine, SamplingParams
from tests.tiny_models import Margins, drain, prompt_of, tiny_engine, tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = ("persist", "offload", "recompute")
NUM_TOKENS = 20


def add(engine: DynamicInferenceEngine, num_requests: int = 3) -> None:
    for seed in range(num_requests):
        sampling = SamplingParams(num_tokens_to_generate=NUM_TOKENS, seed=seed)
        engine.add_request(prompt_of(5 + 7 * seed, seed=seed), sampling, request_id=seed)


def assert_oracles(engine: DynamicInferenceEngine, trained: Any) -> None:
    """Check that the finished requests of `add` have the tokens of the trainer's model."""
    margins, finished = Margins(), drain(engine)
    assert sorted(finished) == [0, 1, 2]
    for request in finished.values():
        margins.compare_with_oracle(trained, request)
    margins.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_two_engines_of_one_process_do_not_disturb_each_other(device: str, mode: str) -> None:
    """Each has graphs and a pool; one is suspended, and its memory goes, while the other steps."""
    models = [tiny_model("qwen3", seed=seed, head_dim=16) for seed in (1, 2)]
    engines = [tiny_engine(model, device=device) for model in models]
    for engine in engines:
        add(engine)
    for turn in range(4):
        sleeping, stepping = engines[turn % 2], engines[1 - turn % 2]
        sleeping.pause()
        sleeping.suspend(mode, release=("kv_cache", "weights"))
        for _ in range(3):
            stepping.step()
        sleeping.resume()
        sleeping.unpause()
    for engine, model in zip(engines, models, strict=True):
        assert_oracles(engine, model)


class Trainer:
    """Steps of plain gradient descent: captured once on a GPU and then replayed."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
        self._inputs = torch.randn(16, 32, device=device)
        self._targets = self._inputs.sum(1, keepdim=True)
        self._loss = torch.zeros((), device=device)
        self._replay: Callable[[], object] = self._step
        if device == "cuda":
            self._replay = self._captured()

    def losses(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            self._replay()
            losses.append(self._loss.item())
        return losses

    def _step(self) -> None:
        loss: Tensor = (self._model(self._inputs) - self._targets).square().mean()
        gradients = torch.autograd.grad(loss, list(self._model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
                parameter -= 0.01 * gradient
            self._loss.copy_(loss)

    def _captured(self) -> Callable[[], object]:
        """The warm-up leaves the model as it was."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        kept = [parameter.detach().clone() for parameter in self._model.parameters()]
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), kept, strict=True):
                parameter.copy_(value)
        # The finalizers of engines of earlier tests wait for the device, which no capture survives.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_captured_steps_of_a_trainer_and_an_engine_are_replayed_in_turn(
    device: str, mode: str
) -> None:
    alone = Trainer(device).losses(12)
    trained = tiny_model("qwen3", seed=3, head_dim=16)
    engine, trainer = tiny_engine(trained, device=device), Trainer(device)
    add(engine)
    losses = []
    for _ in range(4):
        for _ in range(2):
            engine.step()
        engine.pause()
        engine.suspend(mode)
        losses += trainer.losses(3)
        engine.resume()
        engine.unpause()
    assert losses == pytest.approx(alone)
    assert losses[-1] < losses[0]
    assert_oracles(engine, trained)
