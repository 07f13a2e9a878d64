"""ToolEnvironment: an environment whose methods are the model's tools.

Users derive from it, as do `examples.store` and `examples.python_tool`.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from rollout.errors import ConfigError
from rollout.tool_calls import ToolCall
from trainer_hooks.environments.protocol import (
    Environment,
    Message,
    ModelTurn,
    Step,
    ToolCallError,
    ToolSchema,
)

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "_is_tool"


def tool(method: Method) -> Method:
    """Mark a method of a ToolEnvironment as a tool.

    The model reads the method's docstring as the tool's description. The annotations define the
    arguments. Annotate a parameter as `Annotated[int, msgspec.Meta(description="...")]` to describe
    it.
    """
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolSpec:
    schema: ToolSchema
    arguments: type[msgspec.Struct]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AsyncCall:
    """A call of an async tool. The coroutine is created only when it is awaited, so that none is
    left over if an earlier call raises or the step is cancelled."""

    method: Callable[..., Awaitable[Any]]
    arguments: Mapping[str, Any]


class ToolEnvironment(Environment):
    """Calls the methods marked with `@tool` as the model asks for them.

    Several calls in one turn run in order, async calls after all others. The model reads a tool's
    result as text, or as JSON if it is no text. Arguments are checked against the annotations. The
    model also reads errors for wrong arguments and the ToolCallErrors that tools raise. A turn
    without a call ends the episode, unless `answer` is overridden.
    """

    _tool_specs: ClassVar[Mapping[str, _ToolSpec]] = {}

    def __init_subclass__(cls) -> None:
        """Collect the class's tools. Raises ConfigError for a tool without a docstring, with
        `*args` or `**kwargs`, or with annotations that JSON cannot express."""
        super().__init_subclass__()
        names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        members = {name: getattr(cls, name, None) for name in names}
        cls._tool_specs = {
            name: _spec_of(name, member)
            for name, member in members.items()
            if callable(member) and getattr(member, _MARK, False)
        }

    @property
    def tools(self) -> Sequence[ToolSchema]:  # type: ignore[override]
        """Return the schemas of all tools. Override it to offer only some of them."""
        return [spec.schema for spec in self._tool_specs.values()]

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Start the episode of a row. By default nothing happens, because there is no state."""
        return None

    def answer(self, turn: ModelTurn) -> Any:
        """Return the Step for a turn that calls no tool. By default it ends the episode. An
        override can be async."""
        return Step(is_done=True)

    def step(self, turn: ModelTurn) -> Step | Awaitable[Step]:
        """Return the results of the turn's calls as messages, or `answer(turn)` if the turn has no
        calls."""
        if not turn.tool_calls:
            answer: Step | Awaitable[Step] = self.answer(turn)
            return answer
        results = [self._result_of(call) for call in turn.tool_calls]
        if any(isinstance(result, _AsyncCall) for result in results):
            return self._when_awaited(turn.tool_calls, results)
        return _step(turn.tool_calls, results)

    async def _when_awaited(self, calls: Sequence[ToolCall], results: list[Any]) -> Step:
        for i, result in enumerate(results):
            if isinstance(result, _AsyncCall):
                try:
                    results[i] = await result.method(**result.arguments)
                except ToolCallError as error:
                    results[i] = error
        return _step(calls, results)

    def _result_of(self, call: ToolCall) -> Any:
        """Return the tool's result, an _AsyncCall for an async tool, or the error of a bad call."""
        method = getattr(self, call.name)
        try:
            kind = self._tool_specs[call.name].arguments
            converted = msgspec.convert(json.loads(call.arguments), kind)
            arguments = msgspec.structs.asdict(converted)
            if inspect.iscoroutinefunction(method):
                return _AsyncCall(method=method, arguments=arguments)
            return method(**arguments)
        except msgspec.ValidationError as error:
            return ToolCallError(str(error))
        except ToolCallError as error:
            return error


def _step(calls: Sequence[ToolCall], results: Sequence[Any]) -> Step:
    pairs = zip(calls, results, strict=True)
    return Step(
        messages=[_message(call, result) for call, result in pairs],
        num_bad_tool_calls=sum(isinstance(result, ToolCallError) for result in results),
    )


def _message(call: ToolCall, result: Any) -> Message:
    if isinstance(result, ToolCallError):
        result = f"error: {result}"
    content = result if isinstance(result, str) else msgspec.json.encode(result).decode()
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}


def _spec_of(name: str, method: Callable[..., Any]) -> _ToolSpec:
    """Return the schema and argument type of a method, from its signature. Raises ConfigError."""
    description = inspect.getdoc(method)
    if not description:
        raise ConfigError(
            f"the tool {name} has no docstring, which describes it to the model; add one"
        )
    hints = typing.get_type_hints(method, include_extras=True)
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"the tool {name} takes {parameter}; name all its parameters")
        field = (parameter.name, hints.get(parameter.name, Any))
        fields.append(
            field if parameter.default is parameter.empty else (*field, parameter.default)
        )
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    try:
        (_, components) = msgspec.json.schema_components([arguments])
    except TypeError as error:
        raise ConfigError(f"the tool {name}: {error}") from error
    parameters = {key: value for key, value in components.pop(name).items() if key != "title"}
    if components:
        parameters["$defs"] = components
    function = {"name": name, "description": description, "parameters": parameters}
    return _ToolSpec(schema={"type": "function", "function": function}, arguments=arguments)
