"""Forks a process that has used an LLM on two threads, and prints one JSON object of outcomes.

The outcome of a child is "ok" or its exit status; SIGALRM ends a child that hangs.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rollout import LLM, EngineStateError, InferenceConfig, SamplingParams
from rollout.backends.cpu import forks
from rollout.models import CausalLM, ModelSpec
from tests.apis.fake_fleet import fake_fleet

CHILD_S = 30


def outcome(work: Callable[[], object]) -> str:
    """Return the outcome of `work` in a forked child."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        error = work()
        os.write(2, f"{error}\n".encode() if error else b"")
        os._exit(1 if error else 0)
    status = os.waitpid(pid, 0)[1]
    return "ok" if status == 0 else f"status {status}"


def random_model() -> CausalLM:
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    return CausalLM.random(ModelSpec.from_hf_config({"model_type": "llama", **sizes}))


def results(llm: LLM, weights: dict[str, torch.Tensor]) -> list[object]:
    """Return results that need both thread pools: the kernels' to stage and sample, torch's for a
    product."""
    llm.update_weights(weights, in_flight=True)
    params = SamplingParams(num_tokens_to_generate=3, seed=1)
    tokens = [request.generated_tokens for request in llm.generate([[1, 2, 3]], params, n=32)]
    return [*tokens, float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())]


def forked_engine() -> dict[str, str]:
    model = random_model()
    weights = {name: view.clone() for name, view in model.read_weights().items()}
    config = InferenceConfig(num_threads=2, max_sequence_length=64, buffer_size_gb=0.01)
    with LLM(model, inference_config=config) as llm:
        expected = results(llm, weights)

        def differs() -> str | None:
            return None if results(llm, weights) == expected else "other results"

        outcomes = {"engine in the child": outcome(differs)}
        outcomes["engine in the parent"] = differs() or "ok"
        # From here on as with an OpenMP of before GCC 9, which cannot end its threads.
        old = SimpleNamespace(GOMP_parallel=None)
        forks.ctypes = SimpleNamespace(CDLL=lambda _: old)  # type: ignore[assignment]
        outcomes["old OpenMP in the child"] = outcome(differs)
    return outcomes


def forked_fleet() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        llm = fake_fleet(patch).llm()

        def is_usable() -> str | None:
            try:
                llm.pause()
            except EngineStateError as error:
                llm.shutdown()
                return None if "belongs to process" in str(error) else str(error)
            return "not refused"

        outcomes = {"fleet in the child": outcome(is_usable)}
        llm.shutdown()
    return outcomes


if __name__ == "__main__":
    print(json.dumps(forked_engine() | forked_fleet()))
