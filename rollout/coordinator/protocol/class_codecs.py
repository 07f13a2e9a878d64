"""The functions that turn one class of message into its list of fields and back.

They are written out per class and compiled once, as dataclasses do with __init__: a loop over the
fields takes three times as long, and is most of what a message costs its receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import ProtocolError

Function = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Codec:
    """From a field's value to what msgpack packs, and back. Both raise ProtocolError.

    None reaches them only if it is illegal: an optional one travels as None. `unchanged`: a
    condition on `{v}`, true only of values for which both would return `{v}` itself.
    """

    write: Function
    read: Function
    is_optional: bool = False
    unchanged: str = "False"


@dataclass(frozen=True, slots=True)
class ClassCodec:
    """An instance to the list of its fields, in their order, and back. Both raise ProtocolError."""

    write: Function
    read: Function


def class_codec(
    cls: type[Any], codecs: Mapping[str, Codec], header: int | None = None
) -> ClassCodec:
    """Return the functions for a dataclass whose fields are those of `codecs`, in this order.

    `header`: stands before the fields; its reader trusts that it does.
    """
    return ClassCodec(_writer(cls, codecs, header), _reader(cls, codecs, header))


def _writer(cls: type[Any], codecs: Mapping[str, Codec], header: int | None) -> Function:
    def refuse(instance: Any) -> None:
        raise ProtocolError(f"expected {cls.__name__}, got {type(instance).__name__}")

    gets = [f"v{index} = instance.{name}" for index, name in enumerate(codecs)]
    values = [f"v{index}" for index in range(len(codecs))]
    lines = [
        "def write(instance):",
        "    if type(instance) is not cls:",
        "        refuse(instance)",
        *(f"    {get}" for get in gets),
        *_converted(codecs, "write"),
        f"    return [{', '.join(values if header is None else [str(header), *values])}]",
    ]
    functions = {f"write{index}": codec.write for index, codec in enumerate(codecs.values())}
    return _compiled(cls, lines, codecs, {"refuse": refuse, **functions})


def _reader(cls: type[Any], codecs: Mapping[str, Codec], header: int | None) -> Function:
    num_before = 0 if header is None else 1

    def refuse(encoded: Any) -> None:
        is_list = type(encoded) is list
        found = f"{len(encoded) - num_before} fields" if is_list else type(encoded).__name__
        raise ProtocolError(f"{cls.__name__} has {len(codecs)} fields, got {found}")

    values = [f"v{index}" for index in range(len(codecs))]
    lines = [
        "def read(encoded):",
        f"    if type(encoded) is not list or len(encoded) != {len(codecs) + num_before}:",
        "        refuse(encoded)",
        f"    [{', '.join(['_'] * num_before + values)}] = encoded",
        *_converted(codecs, "read"),
        f"    return cls({', '.join(f'{name}=v{index}' for index, name in enumerate(codecs))})",
    ]
    functions = {f"read{index}": codec.read for index, codec in enumerate(codecs.values())}
    return _compiled(cls, lines, codecs, {"refuse": refuse, **functions})


def _converted(codecs: Mapping[str, Codec], function: str) -> list[str]:
    """The lines that pass each `v` through its function unless it stays as it is, and name the
    field at fault."""
    if not codecs:
        return []
    lines = ["    try:"]
    for index, codec in enumerate(codecs.values()):
        value = f"v{index}"
        unchanged = f"({codec.unchanged.format(v=value)})"
        if codec.is_optional:
            unchanged = f"({value} is None or {unchanged})"
        lines += [
            f"        if not {unchanged}:",
            f"            field = {index}",
            f"            {value} = {function}{index}({value})",
        ]
    return [*lines, "    except ProtocolError as fault:", "        raise named(field, fault)"]


def _compiled(
    cls: type[Any], lines: list[str], codecs: Mapping[str, Codec], names: Mapping[str, Any]
) -> Function:
    """The function that the lines define. They hold names and numbers of annotations only."""
    fields = list(codecs)

    def named(field: int, fault: ProtocolError) -> ProtocolError:
        error = ProtocolError(f"{cls.__name__}.{fields[field]}: {fault}")
        error.__cause__ = fault
        return error

    namespace = {"cls": cls, "named": named, "ProtocolError": ProtocolError, **names}
    exec(compile("\n".join(lines), f"<codec of {cls.__name__}>", "exec"), namespace)
    function: Function = namespace[lines[0].split()[1].split("(")[0]]
    return function
