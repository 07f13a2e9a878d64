"""Write the reference pages of settings from the dataclasses and the files of conf/.

    python -m scripts.settings_pages

writes docs/reference/configuration.md (engine, request, server) and docs/reference/job-settings.md
(`rollout train`). Run by hand. A test fails if a page is out of date. A field's meaning is its
entry in its class's docstring. Its range is what its type declares (`rollout.ranges`).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra import compose, initialize_config_dir
from omegaconf import MISSING, OmegaConf

from rollout import InferenceConfig, SamplingParams, ServeConfig
from rollout.keyword_hints import field_types
from rollout.ranges import MAX_UINT64, MIN_INT64, ranges_of
from trainer_hooks.train.config_loading import as_plain, dataclass_by_name, dataclass_of
from trainer_hooks.train.job import JobSettings

_ROOT = Path(__file__).resolve().parents[1]
_CONF = _ROOT / "conf"
_REFERENCE = _ROOT / "docs" / "reference"
_ENTRIES = ("train", "smollm", "demo")
_REQUIRED = "required"
# An entry is "name: text" or "name, name: text", up to the next entry, a blank line or the errors.
# Names may be in backquotes.
_NAMES = r"`?\w+`?(?:, `?\w+`?)*: "
_ENTRY = re.compile(rf"^({_NAMES})(.*\n?(?:(?!{_NAMES}|Raises ).+\n?)*)", re.MULTILINE)
# Words of a range's text, which follows "must be " in messages -> words of a table.
_SHORTER = {
    ", in 64 bits": "",
    "a mapping from names to anything: .*$": "mapping",
    "a mapping from names to ": "mapping from names to ",
    "anything: .*$": "any",
    "a (tuple|list) of items that are each ": "list of ",
    "a (finite )?number": "number",
    "an integer": "integer",
    "a non-empty string": "text",
    "a string": "text, may be empty",
    " of at least ": " >= ",
    " above ": " > ",
    r"\(s\)": "seconds",
    r"\((GiB)\)": r"\1",
    "one of ": "",
    "True or False": "True, False",
    str(MIN_INT64): "-2^63",
    str(MAX_UINT64): "2^64 - 1",
    r"8.58993e\+09": "2^33",
    r"1e\+09": "10^9",
}
_LIST = re.compile(r"\[[^\[\]]*\]")  # of choices
_PYTHON = {"None": "None", "True": "True", "False": "False"}
_YAML = {"None": "null", "True": "true", "False": "false"}

CONFIGURATION = """\
# Configuration

This page lists the settings of an engine, of a request and of a server, with default, range and
meaning. `scripts/settings_pages.py` writes it from the dataclasses. [Job settings](job-settings.md)
lists the keys of `rollout train`.

`LLM` and `AsyncLLM` take the fields of `InferenceConfig` as keywords, too:
`LLM(model, block_size_tokens=64)`. Commands of `rollout` take the fields as `key=value`
([command line](../command_line.md)).

Refused are a value out of its range, a key that does not exist, and a field that can have no effect
on the device in use. The error names the value and the remedy.
"""
ABOUT = {
    InferenceConfig: "One engine: its memory, its scheduling, its device.",
    SamplingParams: "One request: how its tokens are drawn, when it stops, what it reports.",
    ServeConfig: "One server: its address, its keys, its protocols and limits.",
}
JOB = """\
# Job settings

This page lists every setting of `rollout train`. `scripts/settings_pages.py` writes it from the
dataclasses and the files of `conf/`. A few keys are
[those that everybody sets](../how-to/own-data.md#the-keys-that-everybody-sets).

A command chooses an entry config, an option of some groups, and values of keys:

```bash
rollout train --config-name smollm algorithm=grpo trainer.num_steps=10
```

`rollout train --help`, with the same arguments, lists the values that this job would have. A list
on the command line needs quotes: `"trainer.betas=[0.9, 0.95]"`. On the command line `null` is None.
"""
ENTRY_CONFIGS = """\
## Entry configs

`--config-name` chooses one. `--config-dir` names a directory with configs of your own.
"""
GROUPS = """\
## Groups

`GROUP=OPTION` chooses a file in `conf/`, which sets keys of the group. The defaults are those of
the entry config `train`.
"""
KEYS = """\
## Keys

The defaults are those of `rollout train data=jsonl`.
"""
ENGINE = """\
The engine takes every field of [InferenceConfig](configuration.md#inferenceconfig). The job sets:
"""


class Row(NamedTuple):
    """One row of a table of settings."""

    key: str
    default: str
    range: str
    meaning: str


def field_docs(kind: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say about each field, by name."""
    return {
        name: " ".join(text.split())
        for base in reversed(kind.__mro__)
        for names, text in _ENTRY.findall(inspect.getdoc(base) or "")
        for name in re.findall(r"\w+", names)
    }


def table(rows: Sequence[Row], header: Row) -> str:
    """Return a Markdown table of `rows`, with keys and defaults as code."""
    lines = [f"| {' | '.join(header)} |", "|---|---|---|---|"]
    for row in rows:
        default = row.default if row.default == _REQUIRED else f"`{row.default}`"
        cells = (f"`{row.key}`", default, row.range, row.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def range_text(kind: type, name: str, literals: Mapping[str, str]) -> str:
    """Return the range of a field in few words. `literals`: words for None, True and False."""
    text = ranges_of(kind)[name].text()
    for pattern, replacement in _SHORTER.items():
        text = re.sub(pattern, replacement, text)
    text = _LIST.sub(_choices, text)
    return re.sub(r"\b(None|True|False)\b", lambda found: f"`{literals[found[0]]}`", text)


def _choices(found: re.Match[str]) -> str:
    try:
        choices = ast.literal_eval(found[0])
    except (SyntaxError, ValueError):
        return found[0]
    if not all(isinstance(choice, str) for choice in choices):
        return found[0]
    return ", ".join(f"`{choice}`" for choice in choices)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field, or MISSING if it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING


def python_rows(kind: type) -> list[Row]:
    docs = field_docs(kind)
    rows = []
    for field in dataclasses.fields(kind):
        default = default_of(field)
        shown = repr(default.value if isinstance(default, Enum) else default)
        shown = _REQUIRED if default == MISSING else shown
        rows.append(Row(field.name, shown, range_text(kind, field.name, _PYTHON), docs[field.name]))
    return rows


def configuration_page() -> str:
    """Return the page of InferenceConfig, SamplingParams and ServeConfig."""
    header = Row("field", "default", "range", "meaning")
    parts = [CONFIGURATION]
    for kind, about in ABOUT.items():
        parts.append(f"## {kind.__name__}\n\n{about}\n\n{table(python_rows(kind), header)}")
    return "\n".join(parts)


def comment_of(path: Path) -> str:
    """Return the comment at the top of a config file, without Hydra's directives and examples."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("# @package", "#   ")):
            lines.append(line.removeprefix("#").strip())
    return " ".join(lines).removesuffix(":").replace("<", "&lt;")


def option_table(header: str, paths: Sequence[Path], default: str) -> str:
    """Return a table of config files with the comments at their tops.

    `default`: name of the file that a job uses if the command names none.
    """
    lines = [f"| {header} | what it sets |", "|---|---|"]
    for path in paths:
        mark = " (default)" if path.stem == default else ""
        lines.append(f"| `{path.stem}`{mark} | {comment_of(path)} |")
    return "\n".join(lines) + "\n"


def job_rows(kind: type, values: Mapping[str, Any] | None, path: str) -> Iterator[Row]:
    """Yield a row for each key below `path`, where the job has the dataclass `kind`.

    An InferenceConfig has rows only for the fields that the composed config sets.
    `values`: values of the composed config at `path`, or None if it has none.
    """
    docs, types_by_name = field_docs(kind), field_types(kind)
    for field in dataclasses.fields(kind):
        if not field.init or (kind is InferenceConfig and field.name not in (values or {})):
            continue
        key = f"{path}.{field.name}" if path else field.name
        default = default_of(field)
        value = as_plain(default) if values is None else values.get(field.name, as_plain(default))
        type_ = types_by_name[field.name]
        part, named = dataclass_of(type_), dataclass_by_name(type_)
        if part is None or default is None:
            shown = _REQUIRED if value == MISSING else _shown(value)
            within = "a section" if part or named else range_text(kind, field.name, _YAML)
            yield Row(key, shown, within, docs[field.name])
        if part is not None:
            yield from job_rows(part, value if isinstance(value, Mapping) else None, key)
        elif named is not None:
            yield from job_rows(named, None, f"{key}.<name>")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def job_page() -> str:
    """Return the page of the settings of `rollout train`."""
    with initialize_config_dir(str(_CONF), version_base="1.3"):
        composed = compose("train", ["data=jsonl"], return_hydra_config=True)
        values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
    chosen = {**values["hydra"]["runtime"]["choices"], "data": ""}  # data has no default
    entries = [_CONF / f"{entry}.yaml" for entry in _ENTRIES]
    parts = [JOB, ENTRY_CONFIGS, option_table("entry", entries, "train"), GROUPS]
    for group in sorted({path.parent for path in _CONF.glob("*/*.yaml")}):
        options = option_table("option", sorted(group.glob("*.yaml")), chosen[group.name])
        parts.append(f"### {group.name}\n\n{options}")
    parts.append(KEYS)
    sections: dict[str, list[Row]] = {}
    for row in job_rows(JobSettings, values, ""):
        group_name, dot, _ = row.key.partition(".")
        sections.setdefault(group_name if dot else "the run", []).append(row)
    header = Row("key", "default", "range", "meaning")
    for name, rows in sections.items():
        about = f"{ENGINE}\n" if name == "engine" else ""
        parts.append(f"### Keys of {name}\n\n{about}{table(rows, header)}")
    return "\n".join(parts)


PAGES = {
    _REFERENCE / "configuration.md": configuration_page,
    _REFERENCE / "job-settings.md": job_page,
}


def main() -> None:
    """Write the pages."""
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
