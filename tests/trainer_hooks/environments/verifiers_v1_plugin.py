"""A plug-in of verifiers.v1: an environment in which the user speaks twice, and its chat loop.

Loaded by test_verifiers_v1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import two_turn_env  # of tests/doors
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

__all__ = ["ChatLoop", "TwoTurnEnv", "TwoTurnTaskset"]


class TwoTurnTask(vf.Task):
    @vf.reward
    async def vowels(self, trace: Any) -> float:
        """The share of vowels."""
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter in "aeiou" for letter in text) / max(len(text), 1)

    @vf.reward(weight=0.5)
    async def turns(self, trace: Any) -> float:
        trace.info["asked"] = self.data.name
        return float(trace.num_turns)

    @vf.metric
    async def length(self, trace: Any) -> float:
        return float(sum(len(m.content or "") for m in trace.assistant_messages))


class TwoTurnTaskset(vf.Taskset[TwoTurnTask, vf.TasksetConfig]):
    def load(self) -> Iterable[TwoTurnTask]:
        for name in ("red", "blue", "broken", "green"):
            yield TwoTurnTask(vf.TaskData(name=name), self.config.task)


class ChatLoop(two_turn_env.ChatLoop):
    """The chat loop of two_turn_env, whose program fails for the task "broken"."""

    async def launch(self, *arguments: Any) -> ProgramResult:
        if arguments[-1].name == "broken":  # the data of the task
            raise OSError("no database")
        return await super().launch(*arguments)


class TwoTurnConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(
        runtime=SubprocessConfig(), harness=vf.HarnessConfig(id="verifiers_v1_plugin")
    )


class TwoTurnEnv(vf.Env[TwoTurnConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn("Name a colour.")
            await interaction.turn(f"Not {task.data.name}.")
