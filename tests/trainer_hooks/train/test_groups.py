"""Config groups: each loads as its dataclass, and jobs compose their configs from any directory."""

import inspect
import re
import shlex
from argparse import ArgumentParser
from dataclasses import is_dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rollout.config import KVCacheManagementMode
from rollout.errors import ConfigError
from rollout.keyword_hints import field_types
from tests.processes import run_program
from trainer_hooks.producer import AsyncRolloutProducer
from trainer_hooks.train.config_loading import load_dataclass
from trainer_hooks.train.hydra_job import wandb_names
from trainer_hooks.train.job import CONFIG_DIRECTORY, JobSettings, compose_settings
from trainer_hooks.train.overrides import checked_overrides
from trainer_hooks.train.settings import ProducerSettings, WeightSyncSettings

OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONFIG_DIRECTORY.resolve().glob("*/*.yaml")
)


def composed(*overrides: str, config_name: str = "demo") -> Any:
    with initialize_config_dir(str(CONFIG_DIRECTORY.resolve()), version_base="1.3"):
        return compose(config_name, overrides=list(overrides))


JOB_GROUPS = {name: kind for name, kind in field_types(JobSettings).items() if is_dataclass(kind)}
ASYNC_GROUPS = {
    "producer": ProducerSettings,
    "weight_sync": WeightSyncSettings,
}

ROOT = Path(__file__).parents[3]
_COMMAND = re.compile(r"^(?:rollout train|torchrun .*-m trainer_hooks\.train) (.*)$", re.MULTILINE)
# Commands of the docs without those that stand for several jobs or leave something out.
DOCUMENTED = sorted(
    command
    for page in (ROOT / "docs").rglob("*.md")
    for command in _COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", " "))
    if "--multirun" not in command and "..." not in command
)

# What an option leaves to the user, by group or by group and option.
REWARD = "++reward.terms.own.path=mine:score"
OWN_WORK = ["++model.path=DIR", "data.path=FILE", REWARD]
LEFT_OPEN = {
    "data": OWN_WORK,
    "data=palindrome": [],
    "data=mixture": [*OWN_WORK[::2], "data.sources={one: {kind: jsonl, path: FILE}}"],
    "model=checkpoint": ["++model.path=DIR"],
    "reward=terms": [REWARD],
    "data=environment": [
        "++model.path=DIR",
        "environment=verifiers",
        "environment.options.name=NAME",
    ],
    "launcher": ["num_engines=1"],
    "environment=python": ["++environment.path=mine:Shop"],
    "environment=verifiers": ["environment.options.name=NAME"],
    "environment=verifiers_v1": ["environment.options.name=NAME"],
    "environment=openenv": [
        "environment.options.base_url=URL",
        "environment.options.action_field=text",
    ],
}


@pytest.mark.drawn(12)
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_config_of_every_group_loads_as_its_dataclass(group: str, option: str) -> None:
    if group in JOB_GROUPS:
        chosen = f"{group}={option}"
        entry = "train" if group == "data" and option != "palindrome" else "demo"
        left_open = LEFT_OPEN.get(chosen, LEFT_OPEN.get(group, []))
        config = composed(chosen, *left_open, config_name=entry)
        settings = getattr(load_dataclass(JobSettings, config), group)
        assert isinstance(settings, JOB_GROUPS[group])
    if group in ASYNC_GROUPS:
        # Alone, so that nothing of the job fills in what the option itself lacks.
        config = composed(f"+{group}@alone={option}")
        assert isinstance(load_dataclass(ASYNC_GROUPS[group], config.alone), ASYNC_GROUPS[group])


@pytest.mark.drawn(4)
@pytest.mark.parametrize("command", DOCUMENTED)
def test_rollout_train_accepts_the_settings_of_each_documented_command(command: str) -> None:
    parser = ArgumentParser()
    parser.add_argument("--config-name", default="train")
    parser.add_argument("--config-dir", type=ROOT.joinpath)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(shlex.split(command, comments=True))
    compose_settings(given.overrides, given.config_name, given.config_dir)


def test_config_groups_and_dataclasses_of_job_settings_match() -> None:
    groups = {group for group, _ in OPTIONS}
    assert groups == {*JOB_GROUPS, *JobSettings.PRESETS}


@pytest.mark.parametrize(
    ("overrides", "num_engines", "mode", "bound"),
    [
        (["mode=colocated"], 0, "suspend", 1),
        (["mode=sync"], 0, "suspend", 0),
        (["mode=async"], 1, "in_flight", 1),
        (["mode=async", "num_engines=3", "weight_sync=suspend"], 3, "suspend", 1),
        (["mode=sync", "producer=dynamic_sampling"], 0, "suspend", 1),
    ],
)
def test_mode_sets_keys_of_other_groups_and_overrides_win(
    overrides: list[str], num_engines: int, mode: str, bound: int
) -> None:
    settings = load_dataclass(JobSettings, composed(*checked_overrides(overrides, JobSettings)))
    assert settings.num_engines == num_engines
    assert settings.weight_sync.mode == mode
    assert settings.producer.max_staleness_versions == bound


def test_data_group_changes_no_other_group() -> None:
    own = ["++model.path=DIR", "data.path=FILE", REWARD]
    jsonl, python = (
        OmegaConf.to_container(composed(f"data={kind}", *own, config_name="train"))
        for kind in ("jsonl", "python")
    )
    assert jsonl["data"].pop("kind") == "jsonl"
    assert python["data"].pop("kind") == "python"
    assert jsonl == python


@pytest.mark.parametrize(("group", "kind"), ASYNC_GROUPS.items())
def test_unknown_key_of_producer_or_weight_sync_is_refused(group: str, kind: type) -> None:
    with pytest.raises(ConfigError, match="unknown config key nonsense"):
        load_dataclass(kind, {"nonsense": 1})


def test_producer_settings_are_parameters_of_async_rollout_producer() -> None:
    parameters = set(inspect.signature(AsyncRolloutProducer.__init__).parameters)
    assert set(field_types(ProducerSettings)) <= parameters


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            ProducerSettings,
            {"max_staleness_versions": -1},
            "max_staleness_versions=-1 must",
        ),
        (ProducerSettings, {"max_attempts": 0}, "max_attempts=0 must be .*at least 1"),
        (ProducerSettings, {"max_refills": 3}, "drop_zero_variance"),
        (WeightSyncSettings, {"mode": "in_flight", "release": ["kv_cache"]}, "frees nothing"),
        (WeightSyncSettings, {"mode": "suspend", "release": ["graphs"]}, "graphs"),
        (WeightSyncSettings, {"mode": "sometimes"}, "mode='sometimes'"),
    ],
)
def test_contradicting_producer_and_weight_sync_settings_are_refused(
    kind: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataclass(kind, values)


def test_engine_group_loads_as_inference_config() -> None:
    settings = load_dataclass(JobSettings, composed("engine.kv_cache_management_mode=recompute"))
    assert settings.engine.kv_cache_management_mode is KVCacheManagementMode.RECOMPUTE


JOB = """
from trainer_hooks.train.job import CONFIG_DIRECTORY, JobSettings
from rollout.errors import ConfigError
from trainer_hooks import ProducerError
from trainer_hooks.environments import EnvironmentFailed
from trainer_hooks.train.hydra_job import given_overrides, run_hydra_job, wandb_names

def report(settings):
    print("group_size", settings.algorithm.group_size)
    print("given", *given_overrides())
    print("wandb", *wandb_names(settings.run_name, "seed_0"))
    if settings.run_name == "unfit":
        raise ConfigError("the checkpoint is of another model")
    if settings.run_name == "unlucky":
        raise EnvironmentFailed("no rollout of store has succeeded")
    if settings.run_name == "unmade":
        raise ProducerError("a batch needed more than max_refills=4 replacements")

try:
    run_hydra_job(report, JobSettings, config_path=str(CONFIG_DIRECTORY), config_name="demo")
except ConfigError as error:
    raise SystemExit(f"refused: {error}")
"""


def run_job(directory: Path, *arguments: str) -> CompletedProcess[str]:
    """Run a job of its own config in `directory`, in a process of its own."""
    return run_program(JOB, list(arguments), directory)


def test_run_hydra_job_ends_for_an_unknown_key_with_the_nearest_one(tmp_path: Path) -> None:
    job = run_job(tmp_path, "engine.block_size=16")
    assert job.returncode == 1
    assert job.stderr.strip() == (
        "refused: unknown config key engine.block_size; block_size (vLLM) is "
        "engine.block_size_tokens here"
    )
    assert list(tmp_path.iterdir()) == []


def test_run_hydra_job_ends_with_the_message_of_a_config_error(tmp_path: Path) -> None:
    job = run_job(tmp_path, "run_name=unfit")
    assert job.returncode == 1
    assert job.stderr.strip() == "rollout: error: the checkpoint is of another model"


def test_run_hydra_job_ends_with_the_message_of_environment_failed(tmp_path: Path) -> None:
    job = run_job(tmp_path, "run_name=unlucky")
    assert job.returncode == 1
    assert job.stderr.strip() == "rollout: error: no rollout of store has succeeded"


def test_run_hydra_job_ends_with_the_message_of_producer_error(tmp_path: Path) -> None:
    job = run_job(tmp_path, "run_name=unmade")
    assert job.returncode == 1
    assert job.stderr.strip() == (
        "rollout: error: a batch needed more than max_refills=4 replacements"
    )


def test_run_hydra_job_names_our_key_for_one_of_another_system(tmp_path: Path) -> None:
    job = run_job(tmp_path, "num_generations=4")
    assert job.returncode == 1
    assert job.stderr.strip() == (
        "refused: unknown config key num_generations; num_generations (TRL) is "
        "algorithm.group_size here"
    )


def test_multirun_passes_overrides_to_every_job_in_any_directory(tmp_path: Path) -> None:
    sizes, high = "algorithm.group_size=4,6", "algorithm.loss.epsilon_high=0.4"
    job = run_job(tmp_path, "run_name=sweep", "--multirun", sizes, high)
    assert job.returncode == 0, job.stderr
    assert re.findall(r"group_size (\d)", job.stdout) == ["4", "6"]
    shared = "run_name=sweep algorithm.group_size={} algorithm.loss.epsilon_high=0.4"
    assert re.findall("given (.+)", job.stdout) == [shared.format(size) for size in (4, 6)]
    names = "sweep-{0}-seed_0-run_name=sweep,algorithm.group_size={1},{2}"
    assert re.findall(r"wandb (\S+) (\S+)", job.stdout) == [
        (names.format(number, size, high), "sweep-multirun") for number, size in ((0, 4), (1, 6))
    ]
    sweep = tmp_path / "outputs" / "train" / "sweep-multirun"
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1"]


def test_wandb_names_of_a_single_job_come_from_its_run_name() -> None:
    assert wandb_names("demo", "seed_3") == ("demo-seed_3", "demo")


def test_launcher_with_num_engines_0_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="RayLauncher with num_engines=0: there is nothing to start"
    ):
        load_dataclass(JobSettings, composed("launcher=ray"))
    settings = load_dataclass(JobSettings, composed("launcher=ray", "num_engines=2"))
    assert settings.launcher.options["num_cpus"] == 1
