"""run_files: Ctrl-C, locks between jobs, and directories of earlier runs."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from rollout.errors import ConfigError
from rollout.set_aside import paths_set_aside
from trainer_hooks.metrics import JsonlWriter, ProgressView, read_jsonl
from trainer_hooks.train.config_loading import load_dataclass
from trainer_hooks.train.job import JobSettings, compose_settings
from trainer_hooks.train.run_files import (
    STOPPING,
    STOPPING_NOW,
    begin_directory,
    locked_run,
    open_logger,
    stop_on_interrupt,
    what_ran,
    write_config,
)
from trainer_hooks.train.run_results import STARTS_NAME


def test_stop_on_interrupt_announces_ctrl_c_and_lets_a_second_act_as_before() -> None:
    announced: SimpleQueue[str] = SimpleQueue()
    with stop_on_interrupt(announced.put) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        assert announced.get() == STOPPING
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert announced.get() == STOPPING_NOW
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


HOLDER = """
import sys
from pathlib import Path
from trainer_hooks.train.run_files import locked_run
with locked_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_locked_run_refuses_a_held_directory_until_its_job_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "demo" / "seed_0"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=rf"process {holder.pid} on .*{run}; .*run_name"),
            locked_run(run),
        ):
            pass
        with locked_run(run.with_name("seed_1")):  # another run of the job
            pass
        holder.kill()
    with locked_run(run):
        begin_directory(run)
    with locked_run(run):  # one that has ended leaves it free, and its folder may be renamed
        begin_directory(run)


def test_locked_run_warns_of_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked_run(tmp_path / "seed_0"):
        pass
    assert "has no locks" in caplog.text


def test_begin_directory_deletes_no_earlier_run(tmp_path: Path) -> None:
    run = tmp_path / "seed_0"
    begin_directory(run)
    for number in range(4):
        (run / "checkpoint").write_text(str(number))
        begin_directory(run)
    kept = {path.name: (path / "checkpoint").read_text() for path in tmp_path.glob("*.previous*")}
    assert kept == {
        "seed_0.previous": "0",
        "seed_0.previous-2": "1",
        "seed_0.previous-3": "2",
        "seed_0.previous-4": "3",
    }
    assert [path.name for path in paths_set_aside(run)] == [
        "seed_0.previous", "seed_0.previous-2", "seed_0.previous-3", "seed_0.previous-4",
    ]  # fmt: skip
    assert list(run.iterdir()) == []


def test_write_config_keeps_the_settings_before_a_resume_with_others(tmp_path: Path) -> None:
    first = compose_settings(["run_name=sums", "seeds=3"], "demo")
    for settings in (first, first, replace(first, seeds=4)):
        write_config(tmp_path, settings)
    read = {
        path.name: load_dataclass(JobSettings, OmegaConf.load(path)).seeds
        for path in tmp_path.iterdir()
    }
    assert read == {"config.yaml": 4, "config.yaml.previous": 3}
    assert load_dataclass(JobSettings, OmegaConf.load(tmp_path / "config.yaml.previous")) == first


def test_new_metrics_file_keeps_the_earlier_one(tmp_path: Path) -> None:
    for run in range(3):
        with closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer:
            writer.log({"run": run})
    kept = {path.name: read_jsonl(path)[0]["run"] for path in tmp_path.iterdir()}
    assert kept == {
        "metrics.jsonl": 2, "metrics.jsonl.previous": 0, "metrics.jsonl.previous-2": 1,
    }  # fmt: skip


def test_open_logger_records_each_start_of_a_run_from_its_step_on(tmp_path: Path) -> None:
    settings = compose_settings(["run_name=sums"], "demo")
    view = ProgressView(Console(quiet=True))
    for step in (None, 8, 12, 8):  # the third start's results are made again by the fourth
        open_logger(tmp_path, settings, view, step).close()
    starts = read_jsonl(tmp_path / STARTS_NAME)
    assert [row["trainer/step"] for row in starts] == [0, 8, 8]
    assert starts[0]["title"] == "GRPO with DAPO's loss, palindrome_generation"
    assert starts[0]["versions"].keys() == {"rollout", "torch", "transformers", "Python"}


def test_what_ran_has_the_command_and_the_commit_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = compose_settings([], "demo")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    script = ["/venv/bin/python", "/venv/bin/rollout", "train", "data.path=a b.jsonl"]
    monkeypatch.setattr("sys.orig_argv", script)
    ran = what_ran(settings)
    assert ran["command"] == "rollout train 'data.path=a b.jsonl'"
    assert ran["commit"] is None
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "-m", "rollout", "train"])
    assert what_ran(settings)["command"] == "python3 -m rollout train"
    name = {"GIT_AUTHOR_NAME": "a", "GIT_COMMITTER_NAME": "a", "EMAIL": "a@b"}
    Path("train.py").write_text("first")
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run(["git", *words], check=True, capture_output=True, env=os.environ | name)
    commit = what_ran(settings)["commit"]
    assert len(commit) == 40
    Path("train.py").write_text("second")
    assert what_ran(settings)["commit"] == f"{commit}-dirty"
