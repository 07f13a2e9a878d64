"""What each control command does to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import Command
from rollout.engine.engine import Engine
from rollout.errors import ProtocolError

Arguments = Mapping[str, Any]


def run_command(engine: Engine, command: Command) -> Mapping[str, Any]:
    """Do it; returns its report as plain values, empty if it has none.

    Raises ProtocolError for an argument the command does not have, and what the engine raises.
    """
    function, known = _COMMANDS[command.header]
    if unknown := command.arguments.keys() - known:
        raise ProtocolError(
            f"{command.header.name} has no argument {sorted(unknown)[0]!r}; it takes {known}"
        )
    report = function(engine, command.arguments)
    return _plain(report) if is_dataclass(report) and not isinstance(report, type) else {}


def _plain(report: Any) -> Mapping[str, Any]:
    return {k: v.name if isinstance(v, Enum) else v for k, v in asdict(report).items()}


def _set_epoch(engine: Engine, arguments: Arguments) -> None:
    if "version" not in arguments:
        raise ProtocolError("SET_GENERATION_EPOCH needs the argument 'version'")
    engine.set_generation_epoch(arguments["version"])


def _suspend(engine: Engine, arguments: Arguments) -> Any:
    return engine.suspend(
        mode=arguments.get("mode"),
        release=tuple(arguments.get("release", ("kv_cache",))),
        discard_weights=bool(arguments.get("discard_weights", False)),
    )


# The engine verb of each command, and the arguments that it takes.
_COMMANDS: dict[Headers, tuple[Callable[[Engine, Arguments], Any], tuple[str, ...]]] = {
    Headers.PAUSE: (lambda engine, _: engine.pause(), ()),
    Headers.UNPAUSE: (lambda engine, _: engine.unpause(), ()),
    Headers.SUSPEND: (_suspend, ("mode", "release", "discard_weights")),
    Headers.RESUME: (lambda engine, given: engine.resume(given.get("only")), ("only",)),
    Headers.SET_GENERATION_EPOCH: (_set_epoch, ("version",)),
    Headers.INCREMENT_STALENESS: (
        lambda engine, _: engine.set_generation_epoch(engine.weights_version + 1),
        (),
    ),
    Headers.STATS: (lambda engine, _: engine.stats(), ()),
    Headers.STOP: (lambda engine, _: engine.shutdown(), ()),
    Headers.SHUTDOWN: (lambda engine, _: engine.shutdown(), ()),
}
