"""ToolEnvironment: tool schemas from signatures, and calls from the model's text."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Annotated, Any

import msgspec
import pytest

from rollout.errors import ConfigError
from rollout.tool_calls import ToolCall
from trainer_hooks.environments import (
    EnvironmentFault,
    ModelTurn,
    Step,
    ToolCallError,
    ToolEnvironment,
    tool,
)
from trainer_hooks.environments.pool import HostedEnvironment


class Shelf(ToolEnvironment):
    def __init__(self) -> None:
        self.taken: list[str] = []

    @tool
    def take(self, item: str, count: Annotated[int, msgspec.Meta(ge=1)] = 1) -> str:
        """Take items off the shelf."""
        if item == "moon":
            raise ToolCallError("the moon is not on the shelf")
        self.taken += [item] * count
        return f"{count} {item}"

    @tool
    def taken_so_far(self) -> list[str]:
        """All items that were taken."""
        return self.taken

    def not_a_tool(self) -> str:
        """Only methods that are marked are tools."""
        return ""


def turn(*calls: tuple[str, str]) -> ModelTurn:
    made = [ToolCall(id=str(i), name=name, arguments=text) for i, (name, text) in enumerate(calls)]
    return ModelTurn(text="", content="", tool_calls=made)


def step(environment: Any, *calls: tuple[str, str]) -> Step:
    result = environment.step(turn(*calls))
    assert isinstance(result, Step)
    return result


def test_tool_schema_follows_the_signature() -> None:
    take, so_far = (schema["function"] for schema in Shelf().tools)
    assert take == {
        "name": "take",
        "description": "Take items off the shelf.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string"},
                "count": {"type": "integer", "minimum": 1, "default": 1},
            },
            "required": ["item"],
            "additionalProperties": False,
        },
    }
    assert so_far["name"] == "taken_so_far"


def test_tool_calls_of_a_turn_are_answered_in_order() -> None:
    shelf = Shelf()
    calls = ("take", '{"item": "pear", "count": 2}'), ("take", '{"item": "fig"}')
    answered = step(shelf, *calls, ("taken_so_far", "{}"))
    assert [message["content"] for message in answered.messages] == [
        "2 pear",
        "1 fig",
        '["pear","pear","fig"]',
    ]
    assert [message["tool_call_id"] for message in answered.messages] == ["0", "1", "2"]
    assert not answered.is_done


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"count": 2}, "missing required field `item`"),
        ({"item": 3}, "Expected `str`, got `int` - at `$.item`"),
        ({"item": "fig", "count": 0}, "Expected `int` >= 1"),
        ({"item": "fig", "colour": "red"}, "unknown field `colour`"),
        ({"item": "moon"}, "the moon is not on the shelf"),
    ],
)
def test_wrong_tool_arguments_are_reported_to_the_model(
    arguments: dict[str, Any], named: str
) -> None:
    shelf = Shelf()
    answered = step(shelf, ("take", json.dumps(arguments)))
    assert answered.messages[0]["content"].startswith("error: ")
    assert named in answered.messages[0]["content"]
    assert answered.num_bad_tool_calls == 1
    assert shelf.taken == []


def test_tool_environment_ends_after_a_turn_without_a_call() -> None:
    assert step(Shelf()).is_done


def test_async_tools_are_awaited() -> None:
    class Slow(Shelf):
        @tool
        async def wait(self, item: str) -> str:
            """Wait for an item."""
            await asyncio.sleep(0)
            if item == "sun":
                raise ToolCallError("never")
            return f"{item} came"

    calls = turn(
        ("wait", '{"item": "fig"}'), ("take", '{"item": "fig"}'), ("wait", '{"item":"sun"}')
    )
    result = Slow().step(calls)

    async def awaited() -> Step:
        assert not isinstance(result, Step)
        return await result

    answered = asyncio.run(awaited())
    contents = [message["content"] for message in answered.messages]
    assert contents == ["fig came", "1 fig", "error: never"]
    assert answered.num_bad_tool_calls == 1


def test_unreached_async_tools_leave_no_coroutine(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class Lost(Shelf):
        @tool
        async def lose(self) -> str:
            """Lose an item."""
            raise ValueError("lost")

    async def failing() -> None:
        hosted = HostedEnvironment(Lost)
        with pytest.raises(EnvironmentFault, match="lost"):
            await hosted.call("step", turn(("lose", "{}"), ("lose", "{}")), timeout_s=None)
        await hosted.close()

    asyncio.run(failing())
    gc.collect()
    assert [str(each.message) for each in recwarn] == []


def test_cancelled_step_of_async_tools_leaves_no_coroutine(
    recwarn: pytest.WarningsRecorder,
) -> None:
    has_begun, may_return = threading.Event(), threading.Event()

    class Held(Shelf):
        @tool
        def hold(self) -> str:
            """Hold an item."""
            has_begun.set()
            assert may_return.wait(60)
            return "held"

        @tool
        async def wait(self) -> str:
            """Wait."""
            return "waited"

    async def cancelled() -> None:
        hosted = HostedEnvironment(Held)
        step = hosted.call("step", turn(("hold", "{}"), ("wait", "{}")), timeout_s=None)
        task = asyncio.ensure_future(step)
        await asyncio.to_thread(has_begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_return.set()
        await hosted.close()

    asyncio.run(cancelled())
    gc.collect()
    assert [str(each.message) for each in recwarn] == []


def test_tool_without_docstring_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tool mute has no docstring"):

        class Mute(ToolEnvironment):
            @tool
            def mute(self) -> str:
                return ""


def test_tool_with_unnamed_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes \*\*anything"):

        class Open(ToolEnvironment):
            @tool
            def anything(self, **anything: int) -> str:
                """Anything."""
                return ""
