"""Ways to carry a trainer's weights into an engine."""

from trainer_hooks.weight_sync.in_process import InProcessWeightSync, NamedParameters

__all__ = ["InProcessWeightSync", "NamedParameters"]
