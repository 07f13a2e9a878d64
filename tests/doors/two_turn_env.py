"""A plug-in of verifiers: an environment in which the user speaks twice, and its chat loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

__all__ = ["ChatLoop", "TwoTurnEnv", "TwoTurnTaskset"]
OPENING, ANSWER = "Name a colour.", "And another one?"


class TwoTurnTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> Iterable[vf.Task]:
        for _ in range(2):
            yield vf.Task(vf.TaskData(), self.config.task)


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    """Asks the model once for each turn of the user, in this process."""

    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        messages: Any = [message_to_wire(message) for message in data.prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class TwoTurnConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(
        runtime=SubprocessConfig(), harness=vf.HarnessConfig(id="two_turn_env")
    )


class TwoTurnEnv(vf.Env[TwoTurnConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn(OPENING)
            await interaction.turn(ANSWER)
