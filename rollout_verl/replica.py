"""EngineReplica: starts the Ray actor with the engines of one verl replica.

verl creates one per replica, by the name that `rollout_verl.plugin` registers.
`rollout_verl.adapter` uses `actor_name` to find the actor.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.workers.rollout.replica import RolloutReplica

from rollout.errors import ConfigError
from rollout_verl.fields import check_config, check_model_config
from rollout_verl.server import EngineServer


def actor_name(replica_rank: int, role: str = "", suffix: str = "") -> str:
    return f"rollout_server_{role}{replica_rank}_0{suffix}"


class EngineReplica(RolloutReplica):
    """A replica whose EngineServer actor runs all engines on one node. It has
    `rollout.data_parallel_size` engines with `rollout.tensor_model_parallel_size` processes
    each."""

    async def launch_servers(self) -> None:
        """Start the actor on the first worker's node with the devices of all workers. Wait until
        its server listens. Raises ConfigError for unsupported settings before it starts
        anything."""
        check_config(self.config)
        check_model_config(self.model_config)
        if self.nnodes != 1:
            raise ConfigError(f"a replica over {self.nnodes} nodes is not supported; use one node")
        places = await asyncio.gather(
            *[worker.__ray_call__.remote(_place) for worker in self.workers]
        )
        role = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if devices := [device for _, device in places if device is not None]:
            environment[get_visible_devices_keyword()] = ",".join(devices)
        server = (
            ray.remote(EngineServer)
            .options(
                name=actor_name(self.replica_rank, role, self.name_suffix),
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node_id=places[0][0], soft=False
                ),
                runtime_env={"env_vars": environment},
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config.local_path, self.rollout_mode, self.replica_rank)
        )
        self.servers, self._server_handle = [server], server
        self._server_address = await server.launch.remote()


def _place(worker: Any) -> tuple[str, str | None]:
    """Return a worker's node id and its first device, or None. Runs in the worker's process."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_resource_name()) or [None]
    return context.get_node_id(), devices[0]
