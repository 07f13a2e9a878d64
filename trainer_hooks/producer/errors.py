"""What a producer raises when it cannot go on as it was asked to."""

from rollout.errors import RolloutError


class ProducerError(RolloutError):
    """No batch can come: of the bound, of prompts that all fail, or since it is closed."""
