"""Registers this backend in verl under the name "rollout": EngineReplica and ServerAdapter.

verl imports this module through its entry point. The import writes to verl's two registries.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "rollout"


def _load_replica() -> type:
    # Importing Ray and verl's workers takes seconds, which other backends do not need.
    from rollout_verl.replica import EngineReplica

    return EngineReplica


RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "rollout_verl.adapter.ServerAdapter"
