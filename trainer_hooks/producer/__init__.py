"""AsyncRolloutProducer: makes batches while the trainer trains, within a staleness bound.

Used by users' training loops, `trainer_hooks.train.main`, `trainer_hooks.train.samples`,
`trainer_hooks.train.dashboard`, `trainer_hooks.train.no_signal` and `trainer_hooks.doctor.command`.
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
