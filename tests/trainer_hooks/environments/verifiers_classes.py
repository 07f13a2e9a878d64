"""Environments of each class of verifiers, as an installable package would define them.

Loaded by test_verifiers.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

NUM_ROWS = 4


def rows(question: str) -> Dataset:
    return Dataset.from_list(
        [
            {"question": f"{question} {i}", "answer": str(i), "info": {"index": i}}
            for i in range(NUM_ROWS)
        ]
    )


def text_of(messages: Any) -> str:
    return "".join(message.content or "" for message in messages if message.role == "assistant")


def vowels(completion: Any, **_: Any) -> float:
    """Return the share of vowels."""
    text = text_of(completion)
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def length(completion: Any) -> float:
    return float(len(text_of(completion)))


def knows_its_row(answer: str, info: dict[str, Any], state: Any) -> float:
    """Return 1 if the dataset's columns arrived and each turn has its tokens, else 0."""
    for step in state["trajectory"]:
        assert step["tokens"]["completion_ids"], step
    state["seen_ids"] = [list(step["tokens"]["completion_ids"]) for step in state["trajectory"]]
    state["seen_logprobs"] = [
        list(step["tokens"]["completion_logprobs"]) for step in state["trajectory"]
    ]
    return float(answer == str(info["index"]))


def rubric(*more: Any) -> vf.Rubric:
    return vf.Rubric(
        funcs=[vowels, length, knows_its_row, *more], weights=[1.0, 0.01, 0.5] + [1.0] * len(more)
    )


class SecondTurn(vf.MultiTurnEnv):
    """An environment in which the user speaks twice."""

    async def setup_state(self, state: Any) -> Any:
        state["num_answers"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        state["num_answers"] += 1
        return [{"role": "user", "content": f"Again, {state['num_answers']}!"}]


def get_weather(city: str) -> str:
    """The weather.

    Args:
        city: Its name.
    """
    return f"rain in {city}"


class Counting(vf.StatefulToolEnv):
    """A tool with an argument that the model does not see."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tools=[], **options)
        self.add_tool(self.get_weather, args_to_skip=["state"])

    def get_weather(self, city: str, state: Any) -> str:
        """The weather, once."""
        state["num_asked"] = state.get("num_asked", 0) + 1
        return f"{city}: asked {state['num_asked']} times"

    def update_tool_args(
        self, tool_name: str, tool_args: Any, messages: Any, state: Any, **_: Any
    ) -> Any:
        return {**tool_args, "state": state}


def best_of_its_group(states: list[Any]) -> list[float]:
    lengths = [len(text_of(state["completion"])) for state in states]
    return [float(each == max(lengths)) for each in lengths]


class Failing(SecondTurn):
    """An environment whose every second row fails in its second turn, by various errors."""

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        index = state["info"]["index"]
        if index == 1:
            raise vf.InfraError("the sandbox is gone")
        if index == 3:
            raise RuntimeError("a bug")
        return await super().env_response(messages, state, **options)


class Broken(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        raise OSError("no database")


class Greedy(vf.SingleTurnEnv):
    """An environment that asks for another temperature than the policy's."""

    async def get_model_response(self, *args: Any, **options: Any) -> Any:
        return await super().get_model_response(
            *args, **options, sampling_args={"temperature": 0.0}
        )


def load_environment(kind: str = "single") -> vf.Environment:
    """Return the environment of a kind, with four rows."""
    data: Any = dict(dataset=rows("What is it?"), system_prompt="Be brief.")
    if kind == "single":
        return vf.SingleTurnEnv(rubric=rubric(), **data)
    if kind == "multi":
        return SecondTurn(rubric=rubric(), max_turns=3, **data)
    if kind == "tool":
        return vf.ToolEnv(tools=[get_weather], rubric=rubric(), max_turns=3, **data)
    if kind == "stateful":
        return Counting(rubric=rubric(), max_turns=3, **data)
    if kind == "group":
        return vf.SingleTurnEnv(rubric=rubric(best_of_its_group), **data)
    if kind == "broken":
        return Broken(rubric=rubric(), **data)
    if kind == "greedy":
        return Greedy(rubric=rubric(), **data)
    assert kind == "failing"
    return Failing(rubric=rubric(), max_turns=2, **data)
