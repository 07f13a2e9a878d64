"""The pages of settings say what the dataclasses and conf/ say, and leave no key out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from rollout import InferenceConfig
from rollout.errors import ConfigError
from rollout.keyword_hints import field_types
from rollout.ranges import AnyNumber, Options, PositiveInt, check_fields
from scripts.settings_pages import ABOUT, PAGES, Row, field_docs, job_page, python_rows, table
from trainer_hooks.train.config_loading import dataclass_by_name, dataclass_of
from trainer_hooks.train.job import JobSettings

ROOT = Path(__file__).parents[2]
KEY = re.compile(r"^\| `([^`]+)`", re.MULTILINE)


def sections_of(kind: type) -> Iterator[type]:
    """Yield `kind` and the dataclasses of its fields, at any depth but for an InferenceConfig's."""
    yield kind
    for each in field_types(kind).values() if kind is not InferenceConfig else ():
        part = dataclass_of(each) or dataclass_by_name(each)
        if part is not None:
            yield from sections_of(part)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_settings_pages_are_up_to_date(path: Path) -> None:
    message = "run python -m scripts.settings_pages"
    assert path.read_text(encoding="utf-8") == PAGES[path](), message


@pytest.mark.parametrize(
    "kind",
    [*ABOUT, *dict.fromkeys(sections_of(JobSettings))],
    ids=lambda kind: kind.__name__,
)
def test_a_docstring_says_what_each_setting_means(kind: type) -> None:
    docs = field_docs(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    assert {name for name in names if not docs.get(name)} == set()
    own = field_docs(type("Own", (), {"__doc__": kind.__doc__}))
    assert {name for name in own if name.islower()} - names == set()


def test_the_job_page_has_every_key_and_option_of_conf() -> None:
    keys = set(KEY.findall(job_page()))
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert path.stem in keys or path.stem == "base"
        group = "" if path.parent.name == "conf" else f"{path.parent.name}."
        text = path.read_text(encoding="utf-8")
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        prefix = "" if "@package _global_" in text else group
        # Fields of InferenceConfig that only the options of other entry configs set.
        elsewhere = {"engine.buffer_size_gb", "engine.num_threads", "engine.engine"}
        assert missing_keys(values, prefix, keys) - elsewhere == set(), path


def missing_keys(values: Any, prefix: str, keys: set[str]) -> set[str]:
    """Return the dotted keys of a config that `keys` lacks, apart from names that users choose."""
    missing = set()
    for name, value in values.items() if isinstance(values, dict) else ():
        key = f"{prefix}{name}"
        if name in ("defaults", "hydra") or key in keys:
            continue
        below = missing_keys(value, f"{key}.", keys)
        missing |= below if isinstance(value, dict) else {key}
    return missing


@dataclass(frozen=True, kw_only=True)
class Oven:
    """An oven.

    shelves: how many,
        at most.
    mode, fan: what it does | how.
    `heat`: in
    degrees.
    Raises ConfigError for a value out of range.
    """

    shelves: PositiveInt
    mode: Literal["bake", "grill"] = "bake"
    fan: bool | None = None
    heat: AnyNumber = 180.0
    options: Options = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


def test_a_table_of_settings_has_default_range_and_meaning() -> None:
    kind = type("Full", (Oven,), {"__doc__": "options: any."})
    assert table(python_rows(kind), Row("field", "default", "range", "meaning")).splitlines() == [
        "| field | default | range | meaning |",
        "|---|---|---|---|",
        "| `shelves` | required | integer >= 1 | how many, at most. |",
        "| `mode` | `'bake'` | `bake`, `grill` | what it does \\| how. |",
        "| `fan` | `None` | `True`, `False` or `None` | what it does \\| how. |",
        "| `heat` | `180.0` | number | in degrees. |",
        "| `options` | `{}` | mapping | any. |",
    ]
