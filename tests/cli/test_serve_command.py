"""rollout serve: its help, and mistakes that are reported before any engine starts."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import socket
from pathlib import Path

import pytest

from rollout import InferenceConfig, SamplingParams, apis
from rollout.apis.arguments import FLEET_DEFAULTS
from rollout.apis.engine_process import REGISTER_S
from rollout.cli.bench import OfflineLoad
from rollout.cli.bench_serving import ServingLoad
from rollout.cli.coordinator import CoordinatorKeywords
from rollout.cli.engine import JoinKeywords
from rollout.cli.generate import RequestKeywords
from rollout.cli.main import main
from rollout.cli.models import FleetKeywords, with_model
from rollout.cli.serve import opening
from rollout.cli.settings import help_of
from rollout.cli.top import TopSettings
from rollout.config import GIB
from rollout.control.commands import FleetResults, fleet_stats
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.models.checkpoints.directory import name_of_directory
from rollout.serve.config import ServeConfig
from rollout.telemetry import RankUse
from tests.apis.fleets import directory
from tests.serve import chat_model


class StartedError(Exception):
    """An engine would have been started."""


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Raise StartedError in place of AsyncLLM. Returns a dict that gets its last arguments."""
    given: dict[str, object] = {}

    def started(**settings: object) -> None:
        given.clear()
        given.update(settings)
        raise StartedError

    monkeypatch.setattr(apis, "AsyncLLM", started)
    return given


def test_help_lists_every_field_of_the_server_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    fields = dataclasses.fields(ServeConfig)
    assert len(fields) > 20
    for field in fields:
        (line,) = (line for line in shown.splitlines() if line.startswith(f"  {field.name}="))
        assert len(line.partition("=")[2].split()) >= 2, f"{line}: a default and what it is"
        assert len(line) <= 100
    assert "  port=8000 " in shown
    assert "  api_key=none " in shown
    assert "  protocols=openai,vllm,sglang " in shown


def test_help_of_reads_the_docstring_of_a_dataclass() -> None:
    lines = help_of(CoordinatorLimits).splitlines()
    (line,) = (line for line in lines if line.startswith("  heartbeat_s=1.0 "))
    assert line.endswith("time between two heartbeats of a peer")


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        ("generate", (SamplingParams, RequestKeywords, InferenceConfig, FleetKeywords)),
        ("bench", (OfflineLoad, InferenceConfig, FleetKeywords)),
        ("explain", (InferenceConfig,)),
        ("engine", (JoinKeywords, InferenceConfig)),
        ("coordinator", (CoordinatorKeywords, CoordinatorLimits)),
        ("top", (TopSettings,)),
        ("bench serving", (ServingLoad,)),
    ],
)
def test_help_of_every_command_lists_its_settings_with_defaults(
    command: str, kinds: tuple[type, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    known = set(read_line.partition("=")[0].strip() for read_line in shown.splitlines())
    objects = {"metrics_writer", "pg_collection", "mamba_inference_state_config"}
    options = {"seed", "return_log_probs", "return_prompt_tokens", "streaming"}  # of generate
    renamed = {"streaming_interval", *({"max_tokens"} if command == "generate" else ())}
    for kind in kinds:
        names = {field.name for field in dataclasses.fields(kind)}
        assert names - objects - options - renamed <= known, kind
    assert all(len(line) <= 100 for line in shown.splitlines())
    entries = re.findall(r"^  [\w.]+=\S+ {2,}", shown, re.MULTILINE)
    assert {len(entry) for entry in entries} == {36}, "their texts begin in one column"


def test_settings_of_commands_have_the_defaults_of_the_calls_that_take_them() -> None:
    of_fleet = {field.name: field.default for field in dataclasses.fields(FleetKeywords)}
    assert of_fleet == {name: FLEET_DEFAULTS[name] for name in FLEET_DEFAULTS if name != "launcher"}
    assert JoinKeywords().register_timeout_s == REGISTER_S
    parameters = inspect.signature(DataParallelInferenceCoordinator).parameters
    for field in dataclasses.fields(CoordinatorKeywords):
        if field.name not in ("data_parallel_size", "policy_options"):
            default = parameters[field.name].default
            assert getattr(default, "value", default) == field.default, field.name


def test_opening_says_what_is_loaded_and_where_the_server_listens() -> None:
    rank = RankUse(
        kv_bytes=3 * GIB,
        weights_bytes=GIB,
        **dict.fromkeys(("kv_on_host_bytes", "weights_on_host_bytes", "lora_base_bytes"), 0),
        rss_bytes=0,
        cpu_seconds=0.0,
        wait_seconds=0.0,
    )
    nothing = fleet_stats(FleetResults(state="RUNNING", weights_version=0)).together
    stats = dataclasses.replace(
        nothing,
        ranks=(rank, rank),
        num_blocks_total=100,
        block_size_tokens=16,
        max_sequence_length=512,
    )
    url, config = "http://127.0.0.1:80", ServeConfig(api_key="k")
    lines = opening(url, config, stats, {"path": "generate", "body": '{"a": 1}'}).splitlines()
    assert lines[0] == (
        "memory 2.00 GiB of weights, 6.00 GiB of KV cache (1,600 tokens; 512 at most in a sequence)"
    )
    assert lines[1:3] == [
        "API    http://127.0.0.1:80/v1",
        "watch  http://127.0.0.1:80/ (asks for the key)",
    ]
    assert lines[3].startswith('try    curl http://127.0.0.1:80/generate -H "Authorization')
    assert lines[3].endswith("""-d '{"a": 1}'""")
    assert lines[4] == "Ctrl-C to stop"
    assert opening(url, config, stats, None).splitlines() == [*lines[:3], lines[4]]


def test_name_of_directory_is_a_name_for_the_working_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "link").symlink_to("tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    assert name_of_directory(".") == name_of_directory(tmp_path / "tiny/") == "tiny"
    assert name_of_directory("../link") == "link"
    assert name_of_directory("..") == tmp_path.name


def test_max_model_len_is_the_engines_longest_sequence_too(given: dict[str, object]) -> None:
    for words, length in ((("max_model_len=64",), 64), (("max_sequence_length=32",), 32)):
        with pytest.raises(StartedError):
            main(["serve", directory(), "port=0", *words])
        assert given["max_sequence_length"] == length


def test_serve_keeps_cached_prefixes_after_their_last_user_by_default(
    given: dict[str, object],
) -> None:
    name = "prefix_caching_eviction_policy"
    for words, policy in (((), "lru"), ((f"{name}=ref_zero",), "ref_zero")):
        with pytest.raises(StartedError):
            main(["serve", directory(), "port=0", "enable_prefix_caching=true", *words])
        assert given[name] == policy


def fault_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error line of `rollout serve`, which ends before an engine starts."""
    capsys.readouterr()
    assert main(["serve", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("rollout: error: ")
    assert shown.err.count("\n") == 1
    return shown.err


def test_a_port_in_use_is_found_before_an_engine_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = fault_of(capsys, directory(), f"port={port}")
        assert f"port={port} is not a free address: " in said
        assert "in use" in said
    with pytest.raises(StartedError):
        main(["serve", directory(), f"port={port}"])


def test_an_address_of_another_machine_is_found_before_an_engine_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = ("api_key=a", "admin_key=b")
    said = fault_of(capsys, directory(), "host=no.such.invalid", "port=0", *keys)
    assert "host='no.such.invalid', port=0 is not a free address" in said


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "the chat template cannot be read"),
        ("/no/such.jinja", "chat_template='/no/such.jinja' is neither a file nor a template"),
    ],
)
def test_a_bad_template_is_found_before_an_engine_starts(
    capsys: pytest.CaptureFixture[str], template: str, message: str
) -> None:
    said = fault_of(capsys, directory(), "port=0", f"chat_template={template}")
    assert message in said


def test_a_bad_template_of_the_model_is_found_before_an_engine_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chat_model.tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{")
    (tmp_path / "config.json").write_text("{}")
    assert "the chat template cannot be read" in fault_of(capsys, str(tmp_path), "port=0")


def test_a_word_alone_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_model(["DIR", "port=1"]) == ["model=DIR", "port=1"]
    assert with_model(["port=1", "DIR"]) == ["port=1", "model=DIR"]
    assert with_model(["model=DIR"]) == ["model=DIR"]
    with pytest.raises(StartedError):
        main(["serve", directory(), "port=0"])
    assert "model=/none is not a directory" in fault_of(capsys, "/none")
    assert "model is given twice" in fault_of(capsys, directory(), f"model={directory()}")
    assert "'b' is not a setting" in fault_of(capsys, "a", "b")
    for command, *options in (
        ("generate", "--input", os.devnull),
        ("bench",),
        ("explain",),
        ("engine", "--join", "5"),
    ):
        assert main([command, "/none", *options]) == 2
        assert "model=/none is not a directory" in capsys.readouterr().err, command


def test_doors_is_taken_as_protocols_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    model = directory()
    capsys.readouterr()  # of a model that is made here
    assert main(["serve", f"model={model}", "doors=front"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "doors= is deprecated; write protocols="
    assert "protocols" in error
    assert "front" in error


def test_doors_beside_protocols_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = fault_of(capsys, directory(), "doors=openai", "protocols=vllm")
    assert "doors is the former name of protocols: give protocols alone" in said
