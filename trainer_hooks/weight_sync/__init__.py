"""Ways to carry a trainer's weights into an engine."""

from trainer_hooks.weight_sync.full_tensors import full_tensors
from trainer_hooks.weight_sync.in_process import InProcessWeightSync
from trainer_hooks.weight_sync.llm_sync import NamedParameters
from trainer_hooks.weight_sync.shared_memory import SharedMemoryWeightSync

__all__ = ["InProcessWeightSync", "NamedParameters", "SharedMemoryWeightSync", "full_tensors"]
