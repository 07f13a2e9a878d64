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
    condition on `v`, true only of values for which both would return `v` itself.
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


def class_codec(cls: type[Any], codecs: Mapping[str, Codec]) -> ClassCodec:
    """Return the functions for a dataclass whose fields are those of `codecs`, in this order."""
    return ClassCodec(_writer(cls, codecs), _reader(cls, codecs))


def _writer(cls: type[Any], codecs: Mapping[str, Codec]) -> Function:
    lines = ["def write(instance):"]
    for index, (name, codec) in enumerate(codecs.items()):
        lines += [f"    v = instance.{name}", *_converted(codec, f"write{index}")]
        lines += [f"    v{index} = v"]
    lines += [f"    return [{', '.join(f'v{index}' for index in range(len(codecs)))}]"]
    functions = {
        f"write{index}": _naming(cls, name, codec.write)
        for index, (name, codec) in enumerate(codecs.items())
    }
    return _compiled(cls, lines, functions)


def _reader(cls: type[Any], codecs: Mapping[str, Codec]) -> Function:
    def refuse(encoded: Any) -> None:
        is_list = type(encoded) is list
        found = f"{len(encoded)} fields" if is_list else type(encoded).__name__
        raise ProtocolError(f"{cls.__name__} has {len(codecs)} fields, got {found}")

    lines = [
        "def read(encoded):",
        f"    if type(encoded) is not list or len(encoded) != {len(codecs)}:",
        "        refuse(encoded)",
    ]
    for index, codec in enumerate(codecs.values()):
        lines += [f"    v = encoded[{index}]", *_converted(codec, f"read{index}")]
        lines += [f"    v{index} = v"]
    values = ", ".join(f"{name}=v{index}" for index, name in enumerate(codecs))
    lines += [f"    return cls({values})"]
    functions = {
        f"read{index}": _naming(cls, name, codec.read)
        for index, (name, codec) in enumerate(codecs.items())
    }
    return _compiled(cls, lines, {"cls": cls, "refuse": refuse, **functions})


def _converted(codec: Codec, function: str) -> list[str]:
    """The lines that pass `v` through a function unless it stays as it is."""
    unchanged = f"({codec.unchanged})"
    if codec.is_optional:
        unchanged = f"(v is None or {unchanged})"
    return [f"    if not {unchanged}:", f"        v = {function}(v)"]


def _naming(cls: type[Any], name: str, function: Function) -> Function:
    """The function, with the field in its complaints."""

    def named(value: Any) -> Any:
        try:
            return function(value)
        except ProtocolError as fault:
            raise ProtocolError(f"{cls.__name__}.{name}: {fault}") from fault

    return named


def _compiled(cls: type[Any], lines: list[str], names: Mapping[str, Any]) -> Function:
    """The function that the lines define. They hold names and numbers of annotations only."""
    namespace: dict[str, Any] = dict(names)
    exec(compile("\n".join(lines), f"<codec of {cls.__name__}>", "exec"), namespace)
    function: Function = namespace[lines[0].split()[1].split("(")[0]]
    return function
