"""Models as trainers hold them on two ranks, and what each rank reads of their weights."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from rollout.control.state import EngineState
from rollout.errors import EngineStateError
from rollout.weights.update import streamed
from tests.lora_adapters import PeftLike
from tests.tiny_models import tiny_model
from tests.trainer_hooks.fakes import FakeLLM
from tests.weights.trainer_ranks import gloo_mesh
from trainer_hooks.weight_sync import (
    WeightSync,
    full_tensors,
    join_push,
    merged_tensors,
    weights_of,
)

BUFFER = "model.layers.1.mlp.e_score_correction_bias"
Digests = dict[str, str]


def model_with_a_buffer() -> Any:
    """Return a model with tied embeddings, a persistent buffer, and a buffer that is not in its
    state dict.
    """
    model = tiny_model(seed=2, tie_word_embeddings=True)
    model.model.layers[1].mlp.register_buffer("e_score_correction_bias", torch.arange(4.0))
    model.model.layers[1].mlp.register_buffer("table", torch.ones(3), persistent=False)
    return model


def in_shards(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def in_units(model: Any, *, use_orig_params: bool) -> Any:
    kinds = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=kinds,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def with_checkpoints(model: Any) -> Any:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    return model


WRAPPED: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "ddp": lambda model, mesh: DistributedDataParallel(model),
    "fsdp2": in_shards,
    "fsdp2, checkpointed": lambda model, mesh: in_shards(with_checkpoints(model), mesh),
    "fsdp1": lambda model, mesh: in_units(model, use_orig_params=True),
    "fsdp1 of flat parameters": lambda model, mesh: in_units(model, use_orig_params=False),
}
SHARDED = [kind for kind in WRAPPED if kind.startswith("fsdp")]


def digests(tensors: Iterable[tuple[str, Tensor]]) -> Digests:
    """Return shape and bits of each tensor, by name."""
    return {
        name: f"{list(tensor.shape)} {hashlib.sha256(tensor.contiguous().numpy()).hexdigest()}"
        for name, tensor in tensors
    }


def num_places(mesh: DeviceMesh) -> int:
    """Return in how many places the tensors of a sharded model, all of one size, were whole."""
    layers = nn.Sequential(*[nn.Linear(7, 5, bias=False) for _ in range(4)])
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    stream = streamed(weights_of(fully_shard(layers, mesh=mesh)))
    return len({tensor.data_ptr() for _, tensor in stream})


def peft_model(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Return the same PEFT model whole and sharded."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(PeftLike("default"))
    return models[0], fully_shard(models[1], mesh=mesh)


def received(pipe: Any) -> Iterator[tuple[str, Any]]:
    """Return the messages of a rank until it ends."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def read_all(path: Path, rank: int, pipe: Any) -> None:
    """Send (what, outcome) of all that one rank reads, or the error that ended it."""
    try:
        _read_all(path, rank, pipe)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _read_all(path: Path, rank: int, pipe: Any) -> None:
    """Return the digests of the weights of each kind of trainer, then the outcomes of pushes."""
    mesh = gloo_mesh(dist.FileStore(str(path), 2), rank, num_ranks=2)
    for kind, wrap in WRAPPED.items():
        policy = wrap(model_with_a_buffer(), mesh)
        if kind in SHARDED:
            policy(torch.zeros(1, 4, dtype=torch.long))  # root parameters stay gathered after it
        pipe.send((kind, digests(full_tensors(policy))))
        if kind in SHARDED:
            pipe.send((f"again {kind}", digests(full_tensors(policy))))
    for kind, policy in zip(("peft", "sharded peft"), peft_model(mesh), strict=True):
        pipe.send((f"{kind} merged", digests(merged_tensors(policy))))
        pipe.send((f"{kind} adapter", digests(full_tensors(policy))))
    pipe.send(("places", num_places(mesh)))
    pipe.send(("pushes", _pushes(in_shards(model_with_a_buffer(), mesh), rank)))
    dist.destroy_process_group()


def _pushes(policy: Any, rank: int) -> list[str]:
    """Push on rank 0 what its engine refuses unread, then again; rank 1 takes part in both."""
    if rank == 1:
        return [join_push(policy) or "took part" for _ in range(2)]
    llm, found = FakeLLM(EngineState.RUNNING), []
    for _ in range(2):
        try:
            WeightSync(llm).push(policy)
            found.append(f"{len(llm.weights)} tensors")
        except EngineStateError as error:
            found.append(type(error).__name__)
            llm.pause()
    return found
