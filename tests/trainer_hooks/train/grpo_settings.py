"""The demo's settings, cut down until a run takes a second."""

from __future__ import annotations

from typing import Any

from trainer_hooks.train.job import JobSettings, compose_settings

TINY = {
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
    "model.head_dim": 8,
    "data.options.num_held_out": 4,
    "warmup.target_reward": 0.0,
    "warmup.first_check": 2,
    "warmup.check_interval": 2,
    "warmup.check_prompts": 2,
    "warmup.batch_size": 4,
    "algorithm.groups_per_step": 4,
    "algorithm.group_size": 3,
    "algorithm.num_minibatches": 2,
    "algorithm.max_new_tokens": 30,
    "trainer.num_steps": 4,
    "trainer.warmup_steps": 1,
    "trainer.checkpoint_interval": 2,
    "engine.max_requests": 16,  # 12 rollouts of a batch, and some of the next one
    "logger": "quiet",
}
# A reward in which the answers of a random model differ: every group has a gradient.
NUM_KINDS = "tests.trainer_hooks.train.sharded_job:num_kinds"


def tiny_settings(**changes: Any) -> JobSettings:
    """Settings of the demo with TINY and `changes`, whose dots are written as two underscores."""
    values = {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}}
    return compose_settings([f"{name}={value}" for name, value in values.items()], "demo")
