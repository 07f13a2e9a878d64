"""A trainer's weights on their way into engines: what they are read from, and the push."""

from trainer_hooks.weight_sync.sources import full_tensors, join_push, merged_tensors, weights_of
from trainer_hooks.weight_sync.weight_sync import (
    InProcessWeightSync,
    NamedParameters,
    SharedMemoryWeightSync,
    UpdatesWeights,
    WeightSync,
)

__all__ = [
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
