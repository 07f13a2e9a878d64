"""Environments: what a model acts on over several turns, with tools, state and reward."""

from trainer_hooks.environments.conversation import Conversation as Conversation
from trainer_hooks.environments.episodes import EnvironmentRollouts as EnvironmentRollouts
from trainer_hooks.environments.episodes import EpisodeLimits as EpisodeLimits
from trainer_hooks.environments.faults import EnvironmentFailed as EnvironmentFailed
from trainer_hooks.environments.faults import EnvironmentFault as EnvironmentFault
from trainer_hooks.environments.protocol import Environment as Environment
from trainer_hooks.environments.protocol import Message as Message
from trainer_hooks.environments.protocol import ModelTurn as ModelTurn
from trainer_hooks.environments.protocol import Step as Step
from trainer_hooks.environments.protocol import ToolCallError as ToolCallError
from trainer_hooks.environments.protocol import ToolSchema as ToolSchema
from trainer_hooks.environments.tools import ToolEnvironment as ToolEnvironment
from trainer_hooks.environments.tools import tool as tool

__all__: list[str]
