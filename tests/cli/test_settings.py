"""read_settings: types of key=value words, and the remedies of refused ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from rollout.cli.bench_serving import ServingLoad
from rollout.cli.models import LLM_HINTS, LLM_KINDS
from rollout.cli.settings import Parser, UsageError, fields_of, read_settings, value_of
from rollout.config import InferenceConfig
from rollout.serve.config import ServeConfig


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("8", int, 8),
        ("8", float, 8.0),
        ("0.5", float | None, 0.5),
        ("none", int | None, None),
        ("None", str | None, None),
        ("true", bool, True),
        ("False", bool, False),
        ("12", str, "12"),
        ("a=b", str, "a=b"),
        ('["a", "b"]', str | list[str], ["a", "b"]),
        ("[a", str | list[str], "[a"),
        ("a,b", tuple[str, ...], ("a", "b")),
        ('{"5": -1.5}', dict[int, float] | None, {"5": -1.5}),
        ('{"a": {"b": 8}}', Mapping[str, Any], {"a": {"b": 8}}),
    ],
)
def test_a_value_has_the_type_of_its_field(text: str, kind: Any, value: object) -> None:
    found = value_of("x", text, kind)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("many", int, "an integer"),
        ("1.5", int | None, "an integer or none"),
        ("yes", bool, "true or false"),
        ("[1", list[int], "JSON"),
        ("{'a': 1}", Mapping[str, Any], r'JSON, such as \{"name": 8\}'),
        ("a=1", dict[int, float] | None, r'JSON, such as \{"name": 8\} or none'),
    ],
)
def test_a_value_of_another_type_is_refused(text: str, kind: Any, wanted: str) -> None:
    with pytest.raises(UsageError, match=f"must be {wanted}$"):
        value_of("x", text, kind)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("modle=3", r"modle=3 is unknown; did you mean model\?"),
        ("max_model_len=5", "max_model_len is max_sequence_length here"),
        ("zzz=1", "zzz=1 is unknown; see --help"),
        ("model", "'model' is not a setting: settings are written key=value"),
    ],
)
def test_read_settings_refuses_a_word_that_is_not_a_setting(word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_settings([word], LLM_KINDS, hints=LLM_HINTS)


def test_each_group_gets_its_own_settings() -> None:
    found = read_settings(["a=1", "b=x", "c=2"], {"a": int, "c": float}, {"b": str, "c": int})
    assert found == [{"a": 1, "c": 2.0}, {"b": "x", "c": 2}]
    with pytest.raises(UsageError, match="a is given twice"):
        read_settings(["a=1", "a=2"], {"a": int})


def test_keys_come_from_variables_for_commands_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others can read a command line. What is given there counts all the same."""
    monkeypatch.setenv("ROLLOUT_API_KEY", "sesame")
    monkeypatch.setenv("ROLLOUT_ADMIN_KEY", "master")
    of_server, of_load = fields_of(ServeConfig), fields_of(ServingLoad)
    assert read_settings([], of_server) == [{"api_key": "sesame", "admin_key": "master"}]
    assert read_settings(["api_key=own"], of_load) == [{"api_key": "own"}]
    assert read_settings(["api_key=none"], of_load) == [{"api_key": None}]
    assert read_settings([], {"port": int}) == [{}]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, made or given."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def test_every_field_of_the_config_can_be_set() -> None:
    not_text = {"metrics_writer", "pg_collection", "mamba_inference_state_config"}
    names = {field.name for field in dataclasses.fields(InferenceConfig)}
    assert names - not_text <= set(LLM_KINDS)
    defaults = read_settings(
        [
            f"{field.name}={getattr(default := default_of(field), 'value', default)}"
            for field in dataclasses.fields(InferenceConfig)
            if field.name not in not_text
        ],
        LLM_KINDS,
    )
    assert InferenceConfig(**defaults[0]) == InferenceConfig()


def test_an_unknown_option_shows_the_form_of_a_setting() -> None:
    with pytest.raises(UsageError, match=r"--max-tokens=5 is unknown; .* written max_tokens=5"):
        Parser("x", "").parse(["--max-tokens=5"], {"max_tokens": int})
    given = Parser("x", "").parse(["a=1", "--json", "b=2"])
    assert (given.settings, given.json) == (["a=1", "b=2"], True)
