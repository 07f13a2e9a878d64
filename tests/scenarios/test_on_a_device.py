"""Parity, suspend, versions, released memory and graphs of an engine on each device.

On a CPU they test the tests themselves, and `test_fake_device` does with graphs; `make gpu-check`
runs them on a GPU.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rollout import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from tests.tiny_models import (
    Margins,
    drain,
    full_logits,
    generate_all,
    prompt_of,
    randomize,
    tiny_engine,
    tiny_model,
    tokens_of,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = ("persist", "offload", "recompute")
KINDS = [
    ("cpu", "device"),
    ("cpu", "reserved"),
    *(
        pytest.param("cuda", kind, marks=pytest.mark.gpu)
        for kind in ("device", "vmm", "torch_memory_saver", "unified")
    ),
]
STABLE_KINDS = [
    ("cpu", "reserved"),
    pytest.param("cuda", "vmm", marks=pytest.mark.gpu),
    pytest.param("cuda", "torch_memory_saver", marks=pytest.mark.gpu),
    pytest.param("cuda", "unified", marks=pytest.mark.gpu),
]
PROMPT_LENGTHS = (1, 2, 7, 8, 9, 33, 128, 300)


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=12, head_dim=16)


def params(seed: int, num_tokens: int = 24, **changes: Any) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=num_tokens, seed=seed, temperature=(0.0, 1.0)[seed % 2], **changes
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_in_float32_are_those_of_the_trainers_model(family: str, device: str) -> None:
    trained = tiny_model(family, head_dim=16)
    engine = tiny_engine(trained, device=device)
    prompts = [prompt_of(length) for length in PROMPT_LENGTHS]
    margins = Margins()
    for request in generate_all(engine, [(p, params(i)) for i, p in enumerate(prompts)]):
        margins.compare_with_oracle(trained, request)
    margins.check()
    assert margins.num_tokens == 24 * len(prompts)


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_in_bfloat16_are_near_those_of_a_teacher_forced_pass(device: str) -> None:
    """In float32 over the very weights that bfloat16 holds."""
    trained = tiny_model("qwen3", seed=2, std=0.05, head_dim=64)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())
    engine = tiny_engine(trained, device=device, dtype="bfloat16")
    jobs = [
        (prompt_of(length), params(i, return_log_probs=True))
        for i, length in enumerate(PROMPT_LENGTHS)
    ]
    for request in generate_all(engine, jobs):
        logits_TV = torch.from_numpy(full_logits(trained, tokens_of(request)[:-1]))
        logprobs_TV = logits_TV[len(request.prompt_tokens) - 1 :].log_softmax(-1)
        chosen = logprobs_TV.gather(1, torch.tensor(request.generated_tokens)[:, None])[:, 0]
        np.testing.assert_allclose(request.generated_log_probs, chosen.numpy(), atol=2e-2)


@cache
def jobs() -> tuple[tuple[list[int], SamplingParams], ...]:
    chooser = random.Random(7)
    return tuple(
        (prompt_of(chooser.choice((1, 9, 30, 70)), seed=i), params(i, chooser.randint(12, 30)))
        for i in range(8)
    )


def run_with_cycles(
    engine: DynamicInferenceEngine, between: Callable[[], None], every: int = 4
) -> dict[int, DynamicInferenceRequest]:
    """Run all jobs to their ends, and call `between` after every so many steps."""
    for i, (prompt, sampling) in enumerate(jobs()):
        engine.add_request(prompt, sampling, request_id=i)
    finished: dict[int, DynamicInferenceRequest] = {}
    while engine.has_unfinished_requests():
        for _ in range(every):
            finished |= {record.request_id: record.merge() for record in engine.step()}
        between()
    return finished


def assert_oracles(finished: dict[int, DynamicInferenceRequest]) -> None:
    margins = Margins()
    assert sorted(finished) == list(range(len(jobs())))
    for request in finished.values():
        margins.compare_with_oracle(model(), request)
    margins.check()


@pytest.mark.parametrize(("device", "kind"), KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_suspend_and_resume_change_no_token(device: str, kind: str, mode: str) -> None:
    engine = tiny_engine(model(), device=device, memory_kind=kind)

    def cycle() -> None:
        engine.pause()
        engine.suspend(mode, release=("kv_cache", "weights"))
        engine.resume()
        engine.unpause()

    assert_oracles(run_with_cycles(engine, cycle))


@pytest.mark.parametrize("device", DEVICES)
def test_every_token_names_the_version_that_sampled_it(device: str) -> None:
    """Updates in flight, with tensors that are on the device already."""
    engine = tiny_engine(model(), device=device)
    tensors = {name: tensor.to(device) for name, tensor in model().state_dict().items()}
    counts: dict[int, list[int]] = {i: [] for i in range(len(jobs()))}

    def update() -> None:
        engine.update_weights(tensors, in_flight=True)
        for i in counts:
            if engine.has_unfinished_requests() and i in engine.request_ids():
                counts[i].append(len(engine.get_record(i).merge().generated_tokens))

    finished = run_with_cycles(engine, update)
    assert_oracles(finished)
    for i, request in finished.items():
        expected = [
            sum(k >= count for count in counts[i]) for k in range(len(request.generated_tokens))
        ]
        assert request.policy_versions.tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_streamed_weights_are_committed_and_rolled_back_on_a_device(device: str) -> None:
    """Staged while requests run; committed and rolled back between two steps."""
    engine = tiny_engine(model(), device=device)
    other = tiny_model("qwen3", seed=13, head_dim=16)
    before, pointers = engine.weights_checksum(), engine.weight_data_ptrs()
    engine.add_request(prompt_of(9), params(0))
    engine.step()
    staged = engine.stage_weights(iter(other.state_dict().items()))
    engine.step()
    assert engine.weights_checksum() == before
    engine.commit_weights(staged, in_flight=True)
    assert engine.weights_checksum() == staged.checksum != before
    engine.executor.weights.roll_back(staged)
    assert engine.weights_checksum() == before
    engine.commit_weights(staged, in_flight=True)
    drain(engine)
    assert engine.weights_checksum() == tiny_engine(other).weights_checksum()
    assert engine.weight_data_ptrs() == pointers


@pytest.mark.parametrize(("device", "kind"), STABLE_KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_20_suspend_cycles_keep_every_address_and_every_graph(
    device: str, kind: str, mode: str
) -> None:
    """After `warm_up` no step captures a graph: no suspend loses one, and the prompts that are
    computed again, which grow, find the larger shapes captured."""
    trained = tiny_model("qwen3", seed=12, head_dim=16)
    few_shapes: dict[str, Any] = {"num_cuda_graphs": 8} if device == "cuda" else {}
    engine = tiny_engine(
        trained,
        device=device,
        memory_kind=kind,
        kv_cache_management_mode=mode,
        static_kv_memory_pointers=True,
        max_requests=4,
        **few_shapes,
    )
    for seed in range(3):
        engine.add_request(prompt_of(9, seed=seed), params(seed, 130))
    pointers = engine.kv_data_ptrs()
    num_shapes = engine.warm_up()
    assert (num_shapes > 0) == (device == "cuda")
    captures = []
    for cycle in range(20):
        for _ in range(4):
            engine.step()
        captures.append(engine.stats().num_graph_captures)
        engine.pause()
        engine.suspend(release=("kv_cache", "weights"))
        randomize(trained, seed=12 + cycle % 2)
        engine.resume(only="weights")
        engine.update_weights(trained.state_dict())
        assert engine.resume().graphs_recaptured == 0
        engine.unpause()
        assert engine.kv_data_ptrs() == pointers
    assert [len(request.generated_tokens) for request in drain(engine).values()] == [130] * 3
    assert [*captures, engine.stats().num_graph_captures] == [num_shapes] * 21


@pytest.mark.gpu
@pytest.mark.meters_memory
@pytest.mark.parametrize("kind", ["device", "vmm", "torch_memory_saver", "unified"])
@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_suspend_reports_the_bytes_that_the_driver_gets_back(kind: str, mode: str) -> None:
    """Within 5%, at suspend and at resume, of a pool of 512 MiB."""
    engine = tiny_engine(model(), device="cuda", memory_kind=kind, buffer_size_gb=0.5)
    request_id = engine.add_request(prompt_of(30), params(0, 20))
    engine.step()
    engine.pause()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    report = engine.suspend(mode)
    during = torch.cuda.mem_get_info()[0]
    assert during - before == pytest.approx(report.bytes_released, rel=0.05)
    assert report.bytes_released == pytest.approx(0.5 * 2**30, rel=0.05)
    engine.resume()
    after = torch.cuda.mem_get_info()[0]
    assert during - after == pytest.approx(report.bytes_released, rel=0.05)
    engine.unpause()
    assert len(drain(engine)[request_id].generated_tokens) == 20
