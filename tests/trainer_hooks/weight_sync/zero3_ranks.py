"""Ranks of a trainer whose weights DeepSpeed partitions (ZeRO stage 3)."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout import LLM
from tests.tiny_models import tiny_engine, tiny_model
from tests.trainer_hooks.weight_sync.trainers import digests, model_with_a_buffer
from trainer_hooks import WeightSync, full_tensors, join_push

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
TOKENS = torch.arange(6).view(1, 6)


def loss_of(policy: Any) -> Tensor:
    logits: Tensor = policy(TOKENS).logits
    return logits.logsumexp(-1).mean()


def num_gathered_at_once(model: Any) -> int:
    """Return the largest number of parameters that were whole while a stream was read."""
    stream, most = full_tensors(model), 0
    while next(stream, None) is not None:
        most = max(most, sum(parameter.numel() > 0 for parameter in model.parameters()))
    return most


def run_as_rank(
    work: Callable[..., None], address: str, rank: int, pipe: Any, *arguments: Any
) -> None:
    """Run `work(pipe, *arguments)` as one of two ranks. Sends the error that ended it."""
    host, port = address.split(":")
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": host}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    try:
        work(pipe, *arguments)
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def partitioned(model: Any) -> Any:
    """Return the DeepSpeed engine of `model`."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def read_partitions(pipe: Any) -> None:
    """Send what a rank reads before and after a step."""
    import deepspeed

    model = model_with_a_buffer()
    engine = partitioned(model)
    pipe.send(("is partitioned", model.model.norm.weight.numel() == 0))
    for name, source in (("engine", engine), ("module", model)):
        pipe.send((name, digests(full_tensors(source))))
    pipe.send(("gathered at once", num_gathered_at_once(model)))
    engine.backward(loss_of(engine))
    engine.step()
    pipe.send(("trained", digests(full_tensors(engine))))
    masters = [
        (name, deepspeed.utils.safe_get_full_fp32_param(parameter))
        for name, parameter in model.named_parameters()
    ]
    pipe.send(("masters", digests(masters)))  # what the optimizer has


def push_partitions(pipe: Any, directory: Path) -> None:
    """Take a step and push it by each transport to two engine processes, which serve `directory`.

    Rank 0 sends (transport, (checksum of the served weights, checksum of DeepSpeed's state dict)).
    """
    policy = partitioned(pushed_model())
    is_first = torch.distributed.get_rank() == 0
    for transport in ("shared", f"directory:{directory / 'pushes'}", "collective"):
        policy.backward(loss_of(policy))
        policy.step()
        state = policy._zero3_consolidated_16bit_state_dict()
        if not is_first:
            join_push(policy)
            continue
        fleet = LLM(
            directory, use_coordinator=True, data_parallel_size=2, weight_transport=transport,
            max_sequence_length=64, num_threads=1,
        )  # fmt: skip
        with fleet as llm:
            WeightSync(llm, in_flight=True).push(policy)
            served = llm.weights_checksum()
        whole = pushed_model()
        whole.load_state_dict(state)
        pipe.send((transport, (served, tiny_engine(whole).weights_checksum())))


def pushed_model() -> Any:
    return tiny_model(seed=2, tie_word_embeddings=True)
