"""Environments in which a model acts over several turns, with tools, state and reward.

EnvironmentRollouts, a producer's `rollout_fn`, runs a user's ToolEnvironment or Environment.
`verifiers`, `verifiers_v1` and `openenv` run environments of other packages. `python_tool` runs the
model's Python programs. Used by users, and by `trainer_hooks.train` (task, settings).
"""

from rollout.lazy_names import lazy_names as _lazy_names

# The names that this package takes from each module. The stub beside this file has the same names.
_HOMES = {
    "trainer_hooks.environments.conversation": "Conversation",
    "trainer_hooks.environments.episodes": "EnvironmentRollouts EpisodeLimits",
    "trainer_hooks.environments.faults": "EnvironmentFailed EnvironmentFault",
    "trainer_hooks.environments.protocol": (
        "Environment Message ModelTurn Step ToolCallError ToolSchema"
    ),
    "trainer_hooks.environments.tools": "ToolEnvironment tool",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
