"""W1 to W4 on one device: rollout.LLM against transformers, `generate` and continuous batching."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.contestants import (
    Contestant,
    RolloutEngine,
    TransformersGenerate,
    timed,
)
from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_engines import pool_config
from benchmarks.gpu_floors import Floors
from benchmarks.gpu_shapes import PoolShape, generation_floor_s
from benchmarks.peers_workloads import Contest
from benchmarks.workloads import Generated, Workload
from rollout import LLM
from rollout.models.spec import ModelSpec

_NO_END_TOKEN = -1
_RESULT_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestSizes:
    """Runs of each contestant, the best of which counts: the first one also warms up.

    `num_peer_blocks` is the KV cache of transformers' continuous batching, None for half the
    memory.
    """

    num_runs: int
    num_peer_blocks: int | None


def device_model(spec: ModelSpec, device: str) -> Any:
    """A transformers model with random weights drawn on the device."""
    values = spec.to_hf_config()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
    return model.eval()


class OnDevice:
    """A transformers model whose `generate` takes prompts from the host."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, prompts: Tensor, *, attention_mask: Tensor, **options: Any) -> Any:
        device = self._model.device
        mask = attention_mask.to(device)
        return self._model.generate(prompts.to(device), attention_mask=mask, **options)


class ContinuousBatching:
    """transformers' continuous batching, the engine behind its `generate_batch`; that itself gives
    all requests one length. Needs a transformers that has it.
    """

    name = "transformers continuous batching"
    knows_lengths = False

    def __init__(self, model: Any, workload: Workload, num_blocks: int | None) -> None:
        self._model, self._workload = model, workload
        self._settings = transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=_NO_END_TOKEN,
            max_new_tokens=max(workload.output_lens),
            num_return_sequences=workload.num_samples,
        )
        self._batching = transformers.ContinuousBatchingConfig(
            return_logprobs=workload.wants_logprobs,
            num_blocks=num_blocks,
            max_memory_percent=0.5,
        )

    def open(self, stack: ExitStack) -> None:
        """Capture its graphs and start its thread; `stack` will stop it."""
        # Here, for versions differ in what they have of it.
        from transformers.generation.continuous_batching.utils import WorkloadHints

        hints = WorkloadHints(
            max_prompt_length=max(map(len, self._workload.prompts)),
            max_generated_length=max(self._workload.output_lens),
            num_requests=len(self._workload.prompts) * self._workload.num_samples,
        )
        self._manager = stack.enter_context(
            self._model.continuous_batching_context_manager(
                generation_config=self._settings,
                continuous_batching_config=self._batching,
                workload_hints=hints,
            )
        )

    def run(self, workload: Workload, seed: int) -> Generated:
        """Queue all requests with their own lengths, wait for all samples."""
        lengths = workload.output_lens
        order = [
            self._manager.add_request(list(prompt), max_new_tokens=n, eos_token_id=_NO_END_TOKEN)
            for prompt, n in zip(workload.prompts, lengths, strict=True)
        ]
        samples: dict[str, list[Any]] = {request_id: [] for request_id in order}
        missing = len(order) * workload.num_samples
        while missing:
            result = self._manager.get_result(timeout=_RESULT_WAIT_S)
            if result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching has stopped by itself")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            samples[result.request_id.partition("__")[0]].append(result)
            missing -= 1
        results = [result for request_id in order for result in samples[request_id]]
        return Generated(
            tokens=[result.generated_tokens for result in results],
            logprobs=[r.logprobs for r in results] if workload.wants_logprobs else None,
        )


def measure_contest(
    device: MeasuredDevice,
    spec: ModelSpec,
    contest: Contest,
    floors: Floors | None,
    sizes: ContestSizes,
    *,
    has_time: Callable[[], bool],
) -> dict[str, Any]:
    """Tokens per second of everyone, with the same weights, one after the other, and rollout beside
    what the device's memory and matrix units ask for.

    A peer that fails is listed with its error, and one that `has_time` refuses as left out.
    """
    model, workload = device_model(spec, device.name), contest.workload
    seconds, errors = {}, {}
    seconds["rollout"] = _run_ours(device, model, spec, workload, sizes)
    for name, run in (
        ("transformers continuous batching", _run_continuous),
        ("transformers generate", _run_generate),
    ):
        if not has_time():
            errors[name] = "left out: no time left"
            continue
        try:
            seconds[name] = run(device, model, workload, sizes)
        except Exception as error:  # it is told with the peer; the other peers are measured
            errors[name] = f"{type(error).__name__}: {error}"
        device.give_back_unused()
    floor_s = None
    if floors is not None:
        floor_s = generation_floor_s(
            spec,
            workload,
            bytes_per_s=floors.memory_bytes_per_s,
            flops_per_s=floors.matmul_flops_per_s,
        )
    return _judged(contest, floor_s, seconds, errors)


def _judged(
    contest: Contest,
    floor_s: float | None,
    seconds: dict[str, list[float]],
    errors: dict[str, str],
) -> dict[str, Any]:
    best = {name: min(runs) for name, runs in seconds.items()}
    peers = {name: s for name, s in best.items() if name != "rollout"}
    best_peer = min(peers, key=peers.__getitem__) if peers else None
    return {
        "workload": contest.name,
        "summary": contest.workload.summary,
        "num_tokens": contest.num_counted,
        "counted": contest.counted,
        "transformers": transformers.__version__,
        "seconds": seconds,
        "tokens_per_s": {name: contest.num_counted / s for name, s in best.items()},
        "errors": errors,
        "best_peer": best_peer,
        "ratio": None if best_peer is None else peers[best_peer] / best["rollout"],
        "floor_s": floor_s,
        "share_of_floor": None if floor_s is None else floor_s / best["rollout"],
    }


def _run_ours(
    device: MeasuredDevice, model: Any, spec: ModelSpec, workload: Workload, sizes: ContestSizes
) -> list[float]:
    num_rows = len(workload.prompts) * workload.num_samples
    longest = max(map(len, workload.prompts)) + max(workload.output_lens)
    pool = PoolShape(num_rows=num_rows, context_len=longest)
    with LLM(model, inference_config=pool_config(spec, pool, device.name)) as llm:
        return _runs(device, RolloutEngine(llm), workload, sizes)


def _run_continuous(
    device: MeasuredDevice, model: Any, workload: Workload, sizes: ContestSizes
) -> list[float]:
    with ExitStack() as stack:
        contestant = ContinuousBatching(model, workload, sizes.num_peer_blocks)
        contestant.open(stack)
        return _runs(device, contestant, workload, sizes)


def _run_generate(
    device: MeasuredDevice, model: Any, workload: Workload, sizes: ContestSizes
) -> list[float]:
    contestant = TransformersGenerate(OnDevice(model), cache="dynamic")
    return _runs(device, contestant, workload, sizes)


def _runs(
    device: MeasuredDevice, contestant: Contestant, workload: Workload, sizes: ContestSizes
) -> list[float]:
    """Wall seconds of each run."""
    gc.collect()
    return [
        device.seconds(partial(timed, contestant, workload, seed)) for seed in range(sizes.num_runs)
    ]
