"""Environments: what a model acts on over several turns, with tools, state and reward.

EnvironmentRollouts, a producer's `rollout_fn`, runs a user's ToolEnvironment or Environment.
`verifiers`, `verifiers_v1` and `openenv` run environments of other packages; `python_tool` runs
the model's Python programs. Used by users and by `trainer_hooks.train.task`.
"""

from trainer_hooks.environments.conversation import Conversation
from trainer_hooks.environments.episodes import EnvironmentRollouts, EpisodeLimits
from trainer_hooks.environments.faults import EnvironmentFailed, EnvironmentFault
from trainer_hooks.environments.protocol import (
    Environment,
    Message,
    ModelTurn,
    Step,
    ToolCallError,
    ToolSchema,
)
from trainer_hooks.environments.tools import ToolEnvironment, tool

__all__ = [
    "Conversation",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentFault",
    "EnvironmentRollouts",
    "EpisodeLimits",
    "Message",
    "ModelTurn",
    "Step",
    "ToolCallError",
    "ToolEnvironment",
    "ToolSchema",
    "tool",
]
