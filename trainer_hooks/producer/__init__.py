"""Rollouts made beside the training that uses them, none older than a bound."""

from trainer_hooks.producer.batch import TrainingBatch
from trainer_hooks.producer.errors import ProducerError
from trainer_hooks.producer.group import ScoredGroup
from trainer_hooks.producer.producer import AsyncRolloutProducer
from trainer_hooks.producer.scoped_llm import ScopedLLM

__all__ = ["AsyncRolloutProducer", "ProducerError", "ScopedLLM", "ScoredGroup", "TrainingBatch"]
