"""Parses the content of a block of tool calls: JSON, Python calls or tagged parameters.

`rollout.tool_calls.formats` chooses a Body for each format. `rollout.tool_calls.reader` parses
blocks with it. All functions are pure.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from rollout.tool_calls.scanning import BracketScan, Scan, ValueScan

# The JSON schema of each parameter: {tool name: {parameter name: schema}}.
Schemas = Mapping[str, Mapping[str, Any]]
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call as a model wrote it. `arguments` is valid JSON text. `id` is None if the model wrote
    no id."""

    name: str
    arguments: str
    id: str | None = None


class Body(Protocol):
    """The grammar of a block's content."""

    def scan(self, closes: Sequence[str], stops: Sequence[str]) -> Scan:
        """Return a scanner that finds the end of a block: at one of `closes` or before one of
        `stops`."""
        ...

    def calls(self, text: str, schemas: Schemas, name: str | None) -> list[WrittenCall]:
        """Return the calls in a block's content. Raises ValueError if it has other text than calls.
        `name` is the tool if markup before the block names it, else None."""
        ...

    def is_whole(self, text: str) -> bool:
        """Return whether the calls in `text` can be complete if the block lacks its end tag."""
        ...


def parsed(body: Body, text: str, schemas: Schemas, name: str | None) -> list[WrittenCall]:
    """Return the calls in a block's content, or [] if `body` finds other text in it. Calls that
    UTF-8 cannot encode also give []."""
    try:
        calls = body.calls(text, schemas, name)
        for call in calls:
            f"{call.name}{call.arguments}{call.id}".encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        return []
    return calls


# ---- JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBody:
    """JSON objects with a name and arguments, in a row or in a list. Some formats write a name and
    then the arguments as JSON.

    head: pattern of a name before arguments, with the group `name` and optionally the group `id`.
        None if the format has no such calls.
    tail: pattern of text that can follow the arguments.
    head_brackets: tags in a head whose brackets are no JSON.
    """

    head: str | None = None
    tail: str = ""
    head_brackets: tuple[str, ...] = ()

    def scan(self, closes: Sequence[str], stops: Sequence[str]) -> Scan:
        must_begin = not closes and self.head is None
        return BracketScan('"', closes, stops, self.head_brackets, must_begin=must_begin)

    def is_whole(self, text: str) -> bool:
        return True  # incomplete calls have unmatched brackets

    def calls(self, text: str, schemas: Schemas, name: str | None) -> list[WrittenCall]:
        text = text.strip()
        if name is not None:
            return [WrittenCall(name=name, arguments=_checked_json(text))]
        head = None if self.head is None else re.match(self.head, text)
        if head is None:
            return [_call_of(text, members) for members in _objects(text)]
        _, end = _DECODER.raw_decode(text, head.end())
        if not re.fullmatch(self.tail, text[end:].strip()):
            raise ValueError("text after the arguments")
        groups = head.groupdict()
        return [
            WrittenCall(name=groups["name"], arguments=text[head.end() : end], id=groups.get("id"))
        ]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Numbers are checked but not converted, so that 1e400 does not become infinite.
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse)
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,;]*")
_Members = dict[str, tuple[int, int]]


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "the pattern also matches the empty text"
    return match.end()


def _checked_json(text: str) -> str:
    _DECODER.decode(text)
    return text


def _objects(text: str) -> Iterator[_Members]:
    """Yield the spans of each object's values. Objects come in a row or in a list. Raises
    ValueError for any other text."""
    if not text.startswith("["):
        at = 0
        while at < len(text):
            members, at = _object(text, at)
            yield members
            at = _after(_BETWEEN, text, at)
        return
    at, is_first = _after(_SPACE, text, 1), True
    while not (is_first and text[at:] == "]"):
        members, at = _object(text, at)
        yield members
        at, is_first = _after(_SPACE, text, at), False
        if text[at:] == "]":
            return
        at = _after(_SPACE, text, _expected(",", text, at))


def _object(text: str, at: int) -> tuple[_Members, int]:
    """Return the spans of the values of the object at `at`, by key, and the index after the
    object."""
    members: _Members = {}
    at = _after(_SPACE, text, _expected("{", text, at))
    while not text.startswith("}", at):
        if members:
            at = _after(_SPACE, text, _expected(",", text, at))
        key, end = _DECODER.raw_decode(text, at)
        if not isinstance(key, str) or text[at] != '"':
            raise ValueError("a key is no string")
        start = _after(_SPACE, text, _expected(":", text, _after(_SPACE, text, end)))
        _, end = _DECODER.raw_decode(text, start)
        members[key] = (start, end)
        at = _after(_SPACE, text, end)
    return members, at + 1


def _expected(character: str, text: str, at: int) -> int:
    if not text.startswith(character, at):
        raise ValueError(f"no {character!r} at {at}")
    return at + 1


def _call_of(text: str, members: _Members) -> WrittenCall:
    def value(*keys: str) -> str:
        spans = [members[key] for key in keys if key in members]
        return text[slice(*spans[0])] if spans else "null"

    name, arguments = json.loads(value("name")), value("arguments", "parameters")
    if not isinstance(name, str):
        raise ValueError("a call without a name")
    if arguments.startswith('"'):
        arguments = _checked_json(json.loads(arguments))
    return WrittenCall(name=name, arguments="{}" if arguments == "null" else arguments)


# ---- Python


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonBody:
    """A list of calls in Python's syntax, such as `[get_weather(city="Oslo"), now()]`."""

    def scan(self, closes: Sequence[str], stops: Sequence[str]) -> Scan:
        return BracketScan("'\"", closes, stops, (), must_begin=not closes)

    def is_whole(self, text: str) -> bool:
        return True  # incomplete calls have unmatched brackets

    def calls(self, text: str, schemas: Schemas, name: str | None) -> list[WrittenCall]:
        tree = _python(text.strip())
        if not isinstance(tree, ast.List):
            raise ValueError("no list")
        return [_call_of_node(node) for node in tree.elts]


def _python(text: str) -> ast.expr:
    """Return `text` as one Python expression. Raises ValueError for any other text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a string
            return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no expression: {error}") from error


def _call_of_node(node: ast.expr) -> WrittenCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call, or one whose arguments have no names")
    pairs = []
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments by **")
        pairs.append(f"{_dumped(keyword.arg)}: {_json_of(keyword.value)}")
    return WrittenCall(name=_dotted(node.func), arguments="{" + ", ".join(pairs) + "}")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("a call of no name")


_NAMED = {"true": "true", "false": "false", "null": "null"}  # as JSON writes them


def _json_of(node: ast.expr, depth: int = 0) -> str:
    """Return a Python literal as JSON. Raises ValueError for a value that JSON cannot express."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(node, ast.Constant) and (
        node.value is None or isinstance(node.value, (str, int, float))
    ):
        return _dumped(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = node.operand
        if isinstance(number, ast.Constant) and type(number.value) in (int, float):
            return "-" + _dumped(number.value)
    if isinstance(node, ast.Name) and node.id in _NAMED:
        return _NAMED[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return "[" + ", ".join(_json_of(each, depth + 1) for each in node.elts) + "]"
    if isinstance(node, ast.Dict):
        pairs = []
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                raise ValueError("a key is no string")
            pairs.append(f"{_dumped(key.value)}: {_json_of(value, depth + 1)}")
        return "{" + ", ".join(pairs) + "}"
    raise ValueError("no literal")


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# ---- tagged parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBody:
    """A tool's name, then its parameters between tags. The values have no quotes.

    call: pattern at the start of a call. Its first group is the tool's name.
    call_end: tag at the end of a call, or "" if a call ends with its block.
    key: pattern before a value. Its first group is the parameter's name.
    key_start: text with which `key` begins.
    value_end: tag after a value.
    strips_lines: whether one line break at each end of a value belongs to the tags.
    """

    call: str
    call_end: str
    key: str
    key_start: str
    value_end: str
    strips_lines: bool = False

    def scan(self, closes: Sequence[str], stops: Sequence[str]) -> Scan:
        followers = (self.key_start, *filter(None, [self.call_end]), *closes)
        return ValueScan(self.key, self.value_end, followers, closes, stops)

    def is_whole(self, text: str) -> bool:
        return bool(self.call_end) and text.rstrip().endswith(self.call_end)

    def calls(self, text: str, schemas: Schemas, name: str | None) -> list[WrittenCall]:
        calls, at = [], _after(_SPACE, text, 0)
        while at < len(text):
            match = re.compile(self.call).match(text, at)
            if match is None:
                raise ValueError("no name")
            arguments, at = self._arguments(text, match.end(), schemas.get(match[1].strip(), {}))
            calls.append(WrittenCall(name=match[1].strip(), arguments=arguments))
            at = _after(_SPACE, text, at)
        return calls

    def _arguments(self, text: str, at: int, schema: Mapping[str, Any]) -> tuple[str, int]:
        """Return the arguments of a call as JSON and the index after the call. Raises
        ValueError."""
        values: dict[str, str] = {}
        key = re.compile(self.key)
        while (match := key.match(text, at := _after(_SPACE, text, at))) is not None:
            end, at = self._value_end(text, match.end())
            values[match[1].strip()] = self._as_json(text[match.end() : end], schema, match[1])
        if at < len(text):  # the end of a block ends its call, too
            if not self.call_end or not text.startswith(self.call_end, at):
                raise ValueError("the call does not end")
            at += len(self.call_end)
        return "{" + ", ".join(f"{_dumped(k)}: {v}" for k, v in values.items()) + "}", at

    def _value_end(self, text: str, at: int) -> tuple[int, int]:
        """Return the index after the value at `at` and the index after its end tag. An end tag
        counts only before another parameter or the end of the call."""
        while (end := text.find(self.value_end, at)) >= 0:
            at = end + len(self.value_end)
            after = _after(_SPACE, text, at)
            followers = (self.key_start, self.call_end or self.key_start)
            if text.startswith(followers, after) or (after == len(text) and not self.call_end):
                return end, at
        raise ValueError("a value does not end")

    def _as_json(self, text: str, schema: Mapping[str, Any], key: str) -> str:
        if self.strips_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        return typed_json(text, schema.get(key.strip()))


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


def typed_json(text: str, schema: Any) -> str:
    """Return the text of a parameter as JSON of a type that `schema` declares. If only a string is
    declared, all text becomes a string. Otherwise JSON text is kept, without white space around it.
    JSON text of no declared type becomes a string if a string is declared. Python's spelling of a
    declared type (True, None, a list, a dict) becomes JSON. Any other text becomes a string."""
    declared = _declared_types(schema)
    if declared == {"string"}:
        return _dumped(text)
    written = _json_text(text, declared)
    if written is None:
        return _dumped(text)
    value = json.loads(written, parse_float=float, parse_int=_short_int)
    fits = any(
        isinstance(value, kinds) and (not isinstance(value, bool) or kinds == (bool,))
        for kinds in (_JSON_TYPES.get(name, (object,)) for name in declared)
    )
    return _dumped(text) if declared and not fits and "string" in declared else written


def _short_int(digits: str) -> int:
    return int(digits[:20])  # only the type matters


def _json_text(text: str, declared: set[str]) -> str | None:
    """Return `text` as JSON, or None if it is neither JSON nor Python's spelling of a declared
    type."""
    stripped = text.strip()
    with suppress(ValueError, RecursionError):
        return _checked_json(stripped)
    if stripped.lower() in ("true", "false") and "boolean" in declared:
        return stripped.lower()
    if stripped == "None" and "null" in declared:
        return "null"
    if stripped[:1] in ("[", "{") and {"array", "object"} & declared:
        with suppress(ValueError):
            return _json_of(_python(stripped))
    return None


def _declared_types(schema: Any) -> set[str]:
    """Return the names of the types that a JSON schema declares, which can be none."""
    if not isinstance(schema, dict):
        return set()
    own = schema.get("type")
    names = {own} if isinstance(own, str) else set()
    if isinstance(own, list):
        names |= {name for name in own if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        branches = schema.get(union)
        for branch in branches if isinstance(branches, list) else ():
            names |= _declared_types(branch)
    return names
