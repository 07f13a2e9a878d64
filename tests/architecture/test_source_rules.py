"""Device names stay in the seam, nobody hands the whole config around, files stay small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture.imports import Module
from tests.architecture.source_rules import (
    charter_violations,
    device_name_violations,
    global_violations,
    size_violations,
    whole_config_violations,
)

MadeUp = Callable[[dict[str, str]], list[Module]]


def test_only_backends_name_a_device(modules: list[Module]) -> None:
    violations = device_name_violations(modules)
    assert not violations, "\n".join(violations)


def test_only_the_wirers_name_the_whole_config(modules: list[Module]) -> None:
    violations = whole_config_violations(modules)
    assert not violations, "\n".join(violations)


def test_files_and_functions_are_small(modules: list[Module]) -> None:
    violations = size_violations(modules)
    assert not violations, "\n".join(violations)


def test_nothing_is_global(modules: list[Module]) -> None:
    violations = global_violations(modules)
    assert not violations, "\n".join(violations)


def test_every_package_states_its_charter(root: Path) -> None:
    violations = charter_violations(root)
    assert not violations, "\n".join(violations)


# ---- the checks themselves: each made-up tree breaks one rule


@pytest.mark.parametrize(
    "source",
    [
        "import triton\n",
        "import triton.language as tl\n",
        "from torch_memory_saver import region\n",
        "from torch import cuda\n",
        "import torch\ntorch.cuda.synchronize()\n",
        "device = 'cuda'\n",
        "device = 'cuda:0'\n",
        "device = f'cuda:{index}'\n",
        "dict(cuda=1)\n",
        "def f(cuda): ...\n",
    ],
)
def test_device_name_outside_the_seam_is_caught(made_up: MadeUp, source: str) -> None:
    violations = device_name_violations(made_up({"rollout/worker/kv_cache.py": source}))
    assert violations
    assert all(" names " in line for line in violations)


def test_device_name_in_the_seam_or_a_docstring_passes(made_up: MadeUp) -> None:
    files = {
        "rollout/backends/cuda/backend.py": "import triton\ndevice = 'cuda'\n",
        "rollout/worker/kv.py": '"""cuda"""\ndef f():\n    """triton"""\n    return "no cuda"\n',
        "rollout/config.py": "KINDS = ('torch_memory_saver',)\n",
    }
    assert device_name_violations(made_up(files)) == []


def test_config_may_list_the_memory_kind_but_not_import_it(made_up: MadeUp) -> None:
    violations = device_name_violations(
        made_up({"rollout/config.py": "import torch_memory_saver\n"})
    )
    assert violations == ["rollout/config.py:1 names torch_memory_saver"]


@pytest.mark.parametrize(
    ("path", "source", "num_violations"),
    [
        ("rollout/worker/kv_cache.py", "from rollout.config import InferenceConfig\n", 1),
        ("rollout/worker/kv_cache.py", "import rollout.config as c\nx = c.InferenceConfig\n", 1),
        ("rollout/worker/kv_cache.py", "def f(config: 'InferenceConfig'): ...\n", 1),
        ("rollout/engine/engine.py", "def step(self, config: InferenceConfig): ...\n", 1),
        ("rollout/engine/engine.py", "def from_model(config):\n    return InferenceConfig()\n", 1),
        (
            "rollout/engine/engine.py",
            "from rollout.config import InferenceConfig\ndef from_model(c: InferenceConfig): ...\n",
            0,
        ),
        ("rollout/engine/build.py", "from rollout.config import InferenceConfig\n", 0),
        ("rollout/apis/llm.py", "from rollout.config import InferenceConfig\n", 0),
        ("trainer_hooks/phase.py", "from rollout import InferenceConfig\n", 0),
    ],
)
def test_whole_config_is_caught_outside_the_wirers(
    made_up: MadeUp, path: str, source: str, num_violations: int
) -> None:
    assert len(whole_config_violations(made_up({path: source}))) == num_violations


def test_file_of_601_lines_is_caught(made_up: MadeUp) -> None:
    files = {
        "rollout/worker/kv_cache.py": "x = 1\n" * 601,
        "rollout/worker/kv_layout.py": "x = 1\n" * 600,
    }
    assert size_violations(made_up(files)) == ["rollout/worker/kv_cache.py: 601 lines, limit 600"]


def test_function_of_61_lines_is_caught(made_up: MadeUp) -> None:
    source = "def ok():\n" + "    x = 1\n" * 59 + "async def long():\n" + "    x = 1\n" * 60
    assert size_violations(made_up({"trainer_hooks/losses.py": source})) == [
        "trainer_hooks/losses.py:61 long: 61 lines, limit 60"
    ]


def test_global_statement_is_caught(made_up: MadeUp) -> None:
    source = "def f():\n    global a, b\n    a = b = 1\n"
    assert global_violations(made_up({"examples/job.py": source})) == [
        "examples/job.py:2 global a, b"
    ]


def test_package_without_a_charter_is_caught(made_up: MadeUp, tmp_path: Path) -> None:
    made_up(
        {
            "rollout/__init__.py": '"""The engine."""\n',
            "rollout/kv/__init__.py": "x = 1\n",
            "rollout/step/plan.py": "",
            "examples/job.py": "",
            "conf/engine/cpu.yaml": "",
        }
    )
    assert charter_violations(tmp_path) == [
        "conf/__init__.py: no charter docstring",
        "rollout/kv/__init__.py: no charter docstring",
        "rollout/step/__init__.py: no charter docstring",
    ]
