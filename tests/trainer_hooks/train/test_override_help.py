"""`rollout train --help` lists every key with the value that Hydra composes, and its source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rollout.cli.main import main
from rollout.errors import ConfigError
from trainer_hooks.train.job import CONFIG_DIRECTORY, JobSettings
from trainer_hooks.train.override_help import override_help
from trainer_hooks.train.overrides import read_words


def help_of(*arguments: str) -> str:
    words = read_words(arguments, JobSettings, "train")
    return override_help(JobSettings, CONFIG_DIRECTORY, words)


def keys_of(text: str) -> dict[str, tuple[str, str]]:
    """The value and the source of each key in a help."""
    _, _, keys = text.partition("\nkeys of ")
    rows = re.findall(
        r"^  ([^=\n]+)=(.*?) +(\S+\.yaml|default|required|command line)(?::.*)?$", keys, re.M
    )
    return {key: (value, source) for key, value, source in rows}


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    else:
        yield path, values


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config-name", "demo"),
        ("--config-name", "demo", "algorithm=ppo", "mode=async"),
        ("--config-name", "smollm", "data=digits", "trainer=cpu"),
    ],
)
def test_train_help_shows_the_values_that_hydra_composes(arguments: tuple[str, ...]) -> None:
    found = keys_of(help_of(*arguments))
    _, name, *overrides = arguments
    with initialize_config_dir(str(CONFIG_DIRECTORY.resolve()), version_base="1.3"):
        composed = OmegaConf.to_container(compose(name, overrides))
    for key, value in leaves(composed):
        shown, source = found[key]
        assert shown == (value if isinstance(value, str) else json.dumps(value)), key
        assert source not in ("default", "required"), key
        assert (CONFIG_DIRECTORY / source).exists(), key


def test_train_help_of_an_incomplete_config_names_what_is_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  data= +or .*\bjsonl\b", text, re.M)
    found = keys_of(text)
    assert found["model.path"] == ("", "required")
    assert found["model.lora"] == ("null", "default")
    assert found["model.lora.rank"] == ("", "required")
    assert found["trainer.max_skipped_steps"][1] == "default"


def test_train_help_shows_overrides_and_own_configs(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nseed: 7\n")
    found = keys_of(
        help_of("--config-dir", str(tmp_path), "--config-name", "mine", "++trainer.num_steps=3")
    )
    assert found["seed"] == ("7", "mine.yaml")
    assert found["trainer.num_steps"] == ("3", "command line")
    found = keys_of(help_of("++seed=8", "++trainer.num_steps=3,4", "algorithm=ppo,grpo"))
    assert found["seed"] == ("8", "command line")
    assert found["trainer.num_steps"] == ("3,4", "command line")


def test_train_help_forgets_the_values_that_an_override_replaces() -> None:
    found = keys_of(help_of("algorithm=ppo", "++algorithm.critic=null", "~trainer.num_steps"))
    assert found["algorithm.critic"] == ("null", "command line")
    assert found["algorithm.critic.gamma"] == ("", "required")
    assert found["trainer.num_steps"] == ("", "required")
    found = keys_of(help_of("++reward.terms={a: {weight: 2.0}}"))
    assert found["reward.terms.a.weight"] == ("2.0", "command line")


@pytest.mark.parametrize("option", ["--cfg", "-c"])
def test_train_help_ignores_cfg(option: str) -> None:
    assert help_of(option, "job") == help_of()


@pytest.mark.parametrize("arguments", [("--config-name", "dmeo"), ("data=digit",)])
def test_train_help_of_an_unknown_config_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=arguments[-1].partition("=")[2] or "dmeo"):
        help_of(*arguments)
