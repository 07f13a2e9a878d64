"""Registers this backend in verl under the name "rollout".

Imported by verl through its entry point. It writes verl's two registries.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "rollout"


def _load_replica() -> type:
    # Ray and verl's workers take seconds to import; jobs with another backend need none of it.
    from rollout_verl.replica import EngineReplica

    return EngineReplica


RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "rollout_verl.adapter.ServerAdapter"
