"""AsyncRolloutProducer: makes batches of rollouts while the trainer trains, within a staleness
bound.
"""

from trainer_hooks.producer.batches import ProducerError, TrainingBatch
from trainer_hooks.producer.groups import RolloutLLM, ScoredGroup
from trainer_hooks.producer.producer import AsyncRolloutProducer
from trainer_hooks.producer.staleness import EssBound

__all__ = [
    "AsyncRolloutProducer",
    "EssBound",
    "ProducerError",
    "RolloutLLM",
    "ScoredGroup",
    "TrainingBatch",
]
