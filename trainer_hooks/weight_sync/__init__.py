"""Pushing a trainer's weights into engines: reading them from any trainer, and the push itself.

Used by users' training loops, `trainer_hooks.phase`, `trainer_hooks.trl_rollouts` and
`trainer_hooks.train`.
"""

from trainer_hooks.weight_sync.sources import full_tensors, join_push, merged_tensors, weights_of
from trainer_hooks.weight_sync.weight_sync import (
    CheckpointWeightSync,
    CollectiveWeightSync,
    InProcessWeightSync,
    NamedParameters,
    SharedMemoryWeightSync,
    UpdatesWeights,
    WeightSync,
)

__all__ = [
    "CheckpointWeightSync",
    "CollectiveWeightSync",
    "InProcessWeightSync",
    "NamedParameters",
    "SharedMemoryWeightSync",
    "UpdatesWeights",
    "WeightSync",
    "full_tensors",
    "merged_tensors",
    "join_push",
    "weights_of",
]
