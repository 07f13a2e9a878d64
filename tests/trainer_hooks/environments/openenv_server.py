"""An OpenEnv server that rewards vowels: python openenv_server.py. It prints its port first.

Started by test_openenv.
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MAX_SESSIONS = 4


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class CountingVowels(Environment):
    """A step's reward is the share of vowels in its text; an episode has three steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State(episode_id="none")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._state = State(episode_id=f"seed {seed}", step_count=0)
        return Hint(hint=f"begin {seed}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if "!" in action.text:
            raise ValueError("no exclamation marks")
        share = sum(letter in "aeiou" for letter in action.text) / max(len(action.text), 1)
        count = self._state.step_count
        return Hint(hint=f"more {count}", reward=share, done=count == 3)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(CountingVowels, Guess, Hint, max_concurrent_envs=MAX_SESSIONS)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
