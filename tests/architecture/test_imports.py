"""Imports go down floors, and some roots are seen by one package only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.architecture.imports import (
    Module,
    floor_violations,
    forbidden_import_violations,
    imports_of,
    sole_importer_violations,
    type_checking_violations,
)

MadeUp = Callable[[dict[str, str]], list[Module]]


def test_imports_only_go_down_floors(modules: list[Module]) -> None:
    violations = floor_violations(modules)
    assert not violations, "\n".join(violations)


def test_no_package_imports_a_root_forbidden_to_it(modules: list[Module]) -> None:
    violations = forbidden_import_violations(modules)
    assert not violations, "\n".join(violations)


def test_what_one_place_alone_may_import_is_imported_there_alone(modules: list[Module]) -> None:
    violations = sole_importer_violations(modules)
    assert not violations, "\n".join(violations)


def test_no_import_hides_behind_type_checking(modules: list[Module]) -> None:
    violations = type_checking_violations(modules)
    assert not violations, "\n".join(violations)


# ---- the checks themselves: each made-up tree breaks one rule


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        pytest.param(
            "rollout/worker/kv_cache.py",
            "import os\nfrom rollout.engine import state\n",
            ":2 rollout.worker (8) imports rollout.engine.state of rollout.engine (10)",
            id="climbs",
        ),
        pytest.param(
            "rollout/layers/linear.py",
            "import rollout.scheduling.queues\n",
            ":1 rollout.layers (5) imports rollout.scheduling.queues of rollout.scheduling (5)",
            id="equal floor",
        ),
        pytest.param(
            "rollout/layers/linear.py",
            "from ..worker import model_runner\n",
            ":1 rollout.layers (5) imports rollout.worker.model_runner of rollout.worker (8)",
            id="climbs by a relative import",
        ),
        pytest.param(
            "rollout/layers/__init__.py",
            "from ..worker import model_runner\n",
            ":1 rollout.layers (5) imports rollout.worker.model_runner of rollout.worker (8)",
            id="climbs from a package's __init__",
        ),
        pytest.param(
            "rollout/config.py",
            "import rollout.blocks.prefix_index\n",
            ":1 rollout.config (4) imports rollout.blocks.prefix_index of rollout.blocks (4)",
            id="config reads an equal floor",
        ),
        pytest.param(
            "rollout/errors.py",
            "def late():\n    from rollout import LLM\n",
            ":2 rollout.errors (0) imports rollout.LLM of rollout (14.5)",
            id="imports the public names from within, in a function",
        ),
        pytest.param(
            "rollout/blocks/pool.py",
            "import importlib\nimportlib.import_module('rollout.engine.loop')\n",
            ":2 rollout.blocks (4) imports rollout.engine.loop of rollout.engine (10)",
            id="climbs by import_module",
        ),
        pytest.param(
            "examples/job.py",
            "import benchmarks.generate\n",
            ":1 examples (17) imports benchmarks.generate of benchmarks (18)",
            id="an example imports a benchmark",
        ),
        pytest.param("rollout/utils.py", "", ": rollout.utils has no floor", id="no floor"),
    ],
)
def test_breach_of_the_floors_is_caught(
    made_up: MadeUp, path: str, source: str, message: str
) -> None:
    assert floor_violations(made_up({path: source})) == [path + message]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rollout/worker/kv_cache.py", "import torch\nfrom rollout.backends import base\n"),
        (
            "rollout/worker/kv_cache.py",
            "from . import layout\nfrom rollout.worker.kv_layout import Layout\n",
        ),
        ("rollout/blocks/pool.py", "from rollout.config import KVCacheManagementMode\n"),
        ("rollout/__init__.py", "from rollout.apis.llm import LLM\n"),
        ("trainer_hooks/phase.py", "from rollout import LLM\nimport rollout\n"),
        ("examples/job.py", "from trainer_hooks import policy_loss\n"),
    ],
)
def test_import_that_goes_down_passes(made_up: MadeUp, path: str, source: str) -> None:
    assert floor_violations(made_up({path: source})) == []


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("rollout/blocks/pool.py", "import torch\n", "rollout/blocks/pool.py:1 imports torch"),
        (
            "rollout/step/plan.py",
            "from torch import Tensor\n",
            "rollout/step/plan.py:1 imports torch",
        ),
        (
            "rollout/scheduling/scheduler.py",
            "def f():\n    import torch.nn as nn\n",
            "rollout/scheduling/scheduler.py:2 imports torch",
        ),
        ("rollout/text.py", "import hydra\n", "rollout/text.py:1 imports hydra"),
        (
            "rollout/apis/llm.py",
            "from omegaconf import DictConfig\n",
            "rollout/apis/llm.py:1 imports omegaconf",
        ),
        ("rollout/telemetry.py", "import wandb\n", "rollout/telemetry.py:1 imports wandb"),
        (
            "rollout/engine/loop.py",
            "from trainer_hooks.ledger import Ledger\n",
            "rollout/engine/loop.py:1 imports trainer_hooks",
        ),
    ],
)
def test_forbidden_root_is_caught(made_up: MadeUp, path: str, source: str, message: str) -> None:
    assert forbidden_import_violations(made_up({path: source})) == [message]


def test_zmq_outside_the_coordinator_is_caught(made_up: MadeUp) -> None:
    files = {
        "rollout/coordinator/coordinator.py": "import zmq\n",
        "rollout/engine/loop.py": "import zmq.asyncio\n",
        "trainer_hooks/weight_sync/shm.py": "from zmq import Context\n",
    }
    assert sole_importer_violations(made_up(files)) == [
        "rollout/engine/loop.py:1 imports zmq, which only rollout.coordinator may",
        "trainer_hooks/weight_sync/shm.py:1 imports zmq, which only rollout.coordinator may",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollout import engine\n",
        "import typing\nif typing.TYPE_CHECKING:\n    import rollout.engine\n",
    ],
)
def test_type_checking_block_is_caught(made_up: MadeUp, source: str) -> None:
    (violation,) = type_checking_violations(made_up({"rollout/worker/kv_cache.py": source}))
    assert "is imported for type checkers only" in violation


def test_folders_that_do_not_exist_have_no_modules(made_up: MadeUp) -> None:
    assert made_up({}) == []


def test_relative_imports_are_resolved_from_the_package(made_up: MadeUp) -> None:
    (module,) = made_up({"rollout/worker/__init__.py": "from . import a\nfrom .b import c\n"})
    assert [found.name for found in imports_of(module)] == [
        "rollout.worker.a",
        "rollout.worker.b.c",
    ]
