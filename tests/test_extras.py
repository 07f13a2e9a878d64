"""What runs with the base dependencies alone, and the errors that name a missing extra."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.extras import extra_needed
from scripts.check_extras import PROGRAMS
from tests.apis.fleets import directory

ROOT = Path(__file__).parents[1]
BASE = {"msgspec", "numpy", "pyzmq", "safetensors", "torch", "typing-extensions"}
# What the extras bring that this process has, and an installation without them lacks.
ABSENT = (
    *("aiohttp", "gguf", "hydra", "omegaconf", "peft", "prometheus_client", "pyarrow"),
    *("reasoning_gym", "rich", "sentencepiece", "tokenizers", "transformers", "uvloop", "wandb"),
)
WITHOUT_EXTRAS = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # importing one: ModuleNotFoundError
import rollout.models, trainer_hooks
from rollout.cli.main import main
for package in (rollout, trainer_hooks):
    for name in package.__all__:
        getattr(package, name)

spec = rollout.models.ModelSpec.from_hf_config(dict(
    model_type="qwen3", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
))
llm = rollout.LLM(spec, buffer_size_gb=0.001)
params = rollout.SamplingParams(num_tokens_to_generate=3)
(request,) = llm.generate([[1, 2, 3]], params)
print("generated", len(request.generated_tokens))
for what in (
    lambda: llm.generate([[1, 2, 3]], params, progress=True),
    lambda: llm.serve(rollout.ServeConfig(port=0), blocking=False),
    lambda: importlib.import_module("trainer_hooks.metrics").ProgressView(),
    lambda: importlib.import_module("trainer_hooks.train").Dashboard,
    lambda: importlib.import_module("trainer_hooks.environments.chat_endpoint"),
):
    try:
        what()
    except rollout.ConfigError as error:
        print(error)
llm.shutdown()
small = ("buffer_size_gb=0.001", "num_tokens_to_generate=3", "--token-ids")
print("exit code", main(["generate", sys.argv[2], *small]))
for command in ("serve", "bench", "explain", "top", "train"):
    words = [command, sys.argv[2]] if command == "serve" else [command]
    print(command, main(words), file=sys.stderr)
"""


def extras() -> dict[str, str]:
    """Return each extra of pyproject.toml with the text of its list."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return dict(
        re.findall(r"^([a-z0-9]+) = \[(.*?)\](?: *#[^\n]*)?$", table, re.MULTILINE | re.DOTALL)
    )


def test_llm_and_generate_run_without_extras_and_what_needs_one_names_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, ",".join(ABSENT), directory()],
        cwd=ROOT,
        input='{"prompt": [1, 2, 3]}',
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "generated 3"
    expected = [
        ("progress=True needs the package rich", "serve"),
        ("serving over HTTP needs the package aiohttp", "serve"),
        ("ProgressView needs the package rich", "train"),
        ("trainer_hooks.train needs the package rich", "train"),
        ("ChatEndpoint needs the package aiohttp", "serve"),
    ]
    *errors, row, exit_code = lines[1:]
    assert len(json.loads(row)["token_ids"]) == 3
    assert exit_code == "exit code 0"
    for line, (fault, extra) in zip(errors, expected, strict=True):
        assert line.startswith(f"{fault}: pip install ")
        assert line.endswith(f"(extra '{extra}')")
    for command in ("serve", "bench", "explain", "top", "train"):
        extra = "train" if command == "train" else "serve"
        error = rf"rollout: error: .* needs the package \w+: .* \(extra '{extra}'\)\n{command} 2\n"
        assert re.search(error, done.stderr), done.stderr


def test_extra_needed_leaves_a_missing_module_of_rollout_as_it_is() -> None:
    fault = pytest.raises(ModuleNotFoundError, match=r"rollout\.no_such_module")
    with fault, extra_needed("serve", "this"):
        import rollout.no_such_module  # noqa: F401


def test_extra_needed_names_an_extra_of_another_package() -> None:
    fault = pytest.raises(
        ConfigError, match=r"^rollout shine needs the package no_such: .*'shine'$"
    )
    with fault, extra_needed("shine", "rollout shine"):
        import no_such.part  # noqa: F401


def test_check_extras_has_a_program_for_each_extra_but_those_of_developers() -> None:
    assert PROGRAMS.keys() == extras().keys() - {"dev", "docs"}
    for extra, program in PROGRAMS.items():
        compile(program, extra, "exec")


def test_base_dependencies_are_six() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert base is not None
    assert set(re.findall(r'"([\w-]+)>=', base[1])) == BASE


def test_a_message_that_names_an_extra_names_packages_of_it() -> None:
    pattern = r"""pip install ([^"\n]+?) ?"?\s*"?\(extra '(\w+)'\)"""
    known, named = extras(), set()
    for folder in ("rollout", "trainer_hooks"):
        for path in (ROOT / folder).rglob("*.py"):
            for packages, extra in re.findall(pattern, path.read_text(encoding="utf-8")):
                for package in packages.replace("'", "").split():
                    named.add((extra, re.split("[<>=]", package)[0]))
    assert {extra for extra, _ in named} >= {"serve", "train", "hf", "wandb", "smollm2", "gpu"}
    for extra, package in sorted(named):
        inherited = known["hf"] if "[hf]" in known[extra] else ""
        assert f'"{package}' in known[extra] + inherited, (extra, package)
