"""Ranks of a trainer whose weights DeepSpeed partitions (ZeRO stage 3)."""

from __future__ import annotations

import os
import traceback
from typing import Any

import torch
from torch import Tensor

from tests.trainer_hooks.weight_sync.trainers import digests, model_with_a_buffer
from trainer_hooks import full_tensors

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
    """The most parameters that were whole while a stream was read."""
    stream, most = full_tensors(model), 0
    while next(stream, None) is not None:
        most = max(most, sum(parameter.numel() > 0 for parameter in model.parameters()))
    return most


def read_partitions(address: str, rank: int, pipe: Any) -> None:
    """Send what one of two ranks reads before and after a step, or the error that has ended it."""
    host, port = address.split(":")
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": host}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    try:
        _read(pipe)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _read(pipe: Any) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model = model_with_a_buffer()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
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
    torch.distributed.destroy_process_group()
