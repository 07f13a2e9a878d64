"""verl's rollout backend over this engine: `actor_rollout_ref.rollout.name=rollout`.

`import verl` imports this package by the entry point group verl.plugins, which registers it.
verl logs errors of that import at DEBUG only: `python -m rollout_verl` shows them.
"""

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "rollout"


def _load_replica() -> type:
    from rollout_verl.replica import EngineReplica

    return EngineReplica


RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "rollout_verl.adapter.ServerAdapter"
