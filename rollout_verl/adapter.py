"""ServerAdapter: sends a trainer's weights to the engines and releases the engines' memory.

verl's trainer workers create one per rank, by the name that `rollout_verl.plugin` registers. It
calls the Ray actor EngineServer and writes weights to files in shared memory.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import ray
from torch import Tensor
from verl.workers.rollout.base import BaseRollout

from rollout.errors import ConfigError
from rollout_verl.replica import actor_name
from trainer_hooks.weight_sync.weight_files import WeightFiles, weight_directory


class ServerAdapter(BaseRollout):
    """Connects a trainer rank to the EngineServer of its replica. Only the first rank of a replica
    calls the actor. All ranks take part in gathering the weights."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        # The number of ranks of a replica, over all its engines.
        world_size = self.config.data_parallel_size * self.config.tensor_model_parallel_size
        self.replica_rank = rank // world_size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % world_size == 0
        self._server: Any = None

    @property
    def _handle(self) -> Any:
        # The actor is started after the trainer's workers.
        if self._server is None:
            self._server = ray.get_actor(actor_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Restore the engines' memory of `tags`: "weights", "kv_cache". Does nothing unless
        `free_cache_engine` is set."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._handle.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Release the engines' memory of weights and KV cache. Does nothing unless
        `free_cache_engine` is set."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._handle.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        base_sync_done: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send all tensors through a directory in shared memory, and wait until the engines load
        them. `global_steps` is the trainer's step. Raises ConfigError for adapters and for a
        `wire_format` other than "named_tensors". Raises WeightUpdateError if the update fails."""
        if wire_format != "named_tensors":
            raise ConfigError(f"wire_format={wire_format!r} is not supported; use 'named_tensors'")
        if peft_config is not None and base_sync_done:
            raise ConfigError("adapters are not supported; merge them (model.lora.merge=True)")
        pairs = _as_async(weights)
        try:
            if self.is_leader_rank:
                await self._send(pairs, global_steps)
        finally:
            async for _ in pairs:  # gathering is a collective: every rank reads to the end
                pass

    async def _send(
        self, pairs: AsyncIterator[tuple[str, Tensor]], global_steps: int | None
    ) -> None:
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        with weight_directory() as directory:
            with WeightFiles(directory, bucket_bytes) as files:
                async for name, tensor in pairs:
                    files.add(name, tensor)
            await self._handle.update_weights.remote(str(directory), global_steps)


async def _as_async(
    pairs: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(pairs, AsyncIterable):
        async for pair in pairs:
            yield pair
    else:
        for pair in pairs:
            yield pair
