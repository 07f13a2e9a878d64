"""Settings on the command line: words of the form key=value, read as the types of config fields.

Used by the modules of `rollout.cli` that read a command line or raise UsageError. API keys are read
from environment variables.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

from rollout.keyword_hints import field_types, is_union, remedy_of_unknown

_HELP_INDENT, _HELP_WIDTH = 36, 100
# "name: text" or "name, name: text", with the indented lines below it.
_FIELDS_IN_DOCSTRING = re.compile(r"^(\w+(?:, \w+)*): ((?:.+\n?)(?:    .*\n?)*)", re.MULTILINE)
_NONE = ("none", "null")
# Environment variables of secrets, since all users of a machine can read command lines.
_VARIABLES = {"api_key": "ROLLOUT_API_KEY", "admin_key": "ROLLOUT_ADMIN_KEY"}
_SWITCH = {"true": True, "false": False}
# Name of a setting -> the type of its values.
Kinds = Mapping[str, Any]


class UsageError(Exception):
    """A command line or input is wrong. `rollout.cli.main` reports it with exit code 2."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with `--json` and key=value settings. It raises UsageError for wrong
    words."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"rollout {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--json", action="store_true", help="results and errors as JSON")
        self.add_argument("settings", nargs="*", metavar="key=value")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse(
        self, words: Sequence[str], *groups: Kinds, hints: Mapping[str, str] | None = None
    ) -> argparse.Namespace:
        """Return the parsed options, with `settings` as a list of words. `groups` and `hints` are
        as in `read_settings`. Raises UsageError for an unknown option. The error says what to write
        instead."""
        given, unknown = self.parse_known_intermixed_args(words)
        if not unknown:
            return given
        option, _, value = unknown[0].partition("=")
        name = option.lstrip("-").replace("-", "_")
        if not value:  # it may be the next word
            after = words[list(words).index(unknown[0]) + 1 :]
            value = next((word for word in after[:1] if word[:1] != "-" and "=" not in word), "...")
        if any(name in group for group in groups):
            remedy = f"settings are written {name}={value}"
        else:
            others = _remedy(name, value, groups, hints or {})
            remedy = remedy_of_unknown(option, self._option_string_actions, others, cutoff=0.8)
        raise UsageError(f"{unknown[0]} is unknown; {remedy}")


def fields_of(kind: type, *, without: Sequence[str] = ()) -> Kinds:
    """Return the fields of a dataclass with their types, except those in `without`."""
    return {name: each for name, each in field_types(kind).items() if name not in without}


def help_of(kind: type, *, without: Sequence[str] = ()) -> str:
    """Return help text with an entry for each field of a dataclass, except those in `without`. An
    entry has the field's default, and the first sentence about the field in the class's docstring.
    Blank lines between fields in the docstring stay in the help text."""
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    described = {
        name: (number, text)
        for number, paragraph in enumerate(paragraphs)
        for names, text in _FIELDS_IN_DOCSTRING.findall(paragraph)
        for name in names.split(", ")
    }
    lines: list[str] = []
    last = None  # number of the previous field's paragraph
    for field in dataclasses.fields(kind):
        if field.name in without:
            continue
        number, text = described.get(field.name, (last, ""))
        if last not in (None, number):
            lines.append("")
        last = number
        start = f"  {f'{field.name}={_shown(field)}':<{_HELP_INDENT - 3}} "
        lines += textwrap.wrap(
            _summary(text, field.default),
            _HELP_WIDTH,
            initial_indent=start,
            subsequent_indent=" " * _HELP_INDENT,
            break_on_hyphens=False,
        ) or [start.rstrip()]
    return "\n".join(lines) + "\n"


def _summary(text: str, default: Any) -> str:
    """Return the first sentence of `text`. For the default None, add the sentence that begins with
    None."""
    first, *others = " ".join(text.split()).rstrip(".").split(". ")
    of_none = [other for other in others if other.startswith("None")] if default is None else []
    return ". ".join([first, *of_none])


def _shown(field: dataclasses.Field[Any]) -> str:
    """Return a default as the command line writes it, or "..." if it is missing or empty."""
    default = field.default
    if default is dataclasses.MISSING:
        made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        return "..." if not made else json.dumps(made)
    if isinstance(default, tuple):
        return ",".join(default) or "..."
    return str(default.value if isinstance(default, Enum) else default).lower()


def read_settings(
    words: Sequence[str], *groups: Kinds, hints: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return one dict of values by name for each group. A name in two groups goes to both.

    `hints` maps names of settings in other systems to our names, for error messages. API keys that
    are not given are read from ROLLOUT_API_KEY and ROLLOUT_ADMIN_KEY. Raises UsageError for a word
    without "=", an unknown name, a name given twice, and a value of the wrong type."""
    found: list[dict[str, Any]] = [{} for _ in groups]
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} is not a setting: settings are written key=value")
        owners = [index for index, group in enumerate(groups) if name in group]
        if not owners:
            raise _unknown(name, text, groups, hints or {})
        for index in owners:
            if name in found[index]:
                raise UsageError(f"{name} is given twice, at last as {name}={text}; give it once")
            found[index][name] = value_of(name, text, groups[index][name])
    for name, variable in _VARIABLES.items():
        for values, group in zip(found, groups, strict=True):
            if name in group and variable in os.environ:
                values.setdefault(name, os.environ[variable])
    return found


def require(values: Mapping[str, Any], name: str, example: str) -> Any:
    """Return the value of a setting that has no default. Raises UsageError if it is not given."""
    if name not in values:
        raise UsageError(f"{name} is missing; give {name}={example}")
    return values[name]


def is_setting(word: str) -> bool:
    """Return whether a word has the form key=value. A URL with "=" in its query does not."""
    return "=" in word and "://" not in word.partition("=")[0]


def value_of(name: str, text: str, kind: Any) -> Any:
    """Return `text` as a value of the type `kind`. Raises UsageError if it is not one. Lists and
    dicts are written as JSON. Tuples of strings are written as JSON or with commas. The config
    class validates JSON values, enums and paths."""
    options = typing.get_args(kind) if is_union(kind) else (kind,)
    if types.NoneType in options and text.lower() in _NONE:
        return None
    if bool in options and text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    for number in (int, float):
        if number in options:
            try:
                return number(text)
            except ValueError:
                continue
    if text[:1] in ("[", "{") and any(map(_is_container, options)):
        try:
            return json.loads(text)
        except ValueError:
            pass
    if any(option in (str, Any) or _is_enum(option) or _is_path(option) for option in options):
        return text
    if tuple[str, ...] in options:
        return tuple(text.split(","))
    raise UsageError(f"{name}={text} must be {_described(options)}")


def _unknown(name: str, text: str, groups: Sequence[Kinds], hints: Mapping[str, str]) -> UsageError:
    return UsageError(f"{name}={text} is unknown; {_remedy(name, text, groups, hints)}")


def _remedy(name: str, text: str, groups: Sequence[Kinds], hints: Mapping[str, str]) -> str:
    """Return what to write in place of an unknown setting: our name in `hints`, or the nearest
    name. If no name is near, refer to the list of all names."""
    if name in hints:
        return f"{name} is {hints[name]} here"
    known = {known for group in groups for known in group}
    if (other := name.replace("-", "_")) in known:
        return f"write {other}={text}"
    return remedy_of_unknown(name, known, "see --help", cutoff=0.6)


def _is_container(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, (list, tuple, dict, Mapping))


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_path(kind: Any) -> bool:
    return getattr(kind, "__module__", "") == "pathlib"


def _described(options: Sequence[Any]) -> str:
    names: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        types.NoneType: "none",
    }
    names |= {option: 'JSON, such as {"name": 8}' for option in options if _is_mapping(option)}
    return " or ".join(dict.fromkeys(names.get(option, "JSON") for option in options))
