"""Servers for all tests of a module, each with another model behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rollout import ServeConfig
from tests.apis.fleets import directory
from tests.serve import chat_model
from tests.serve.served import CONFIG, OwnEngine, Served, served_directory
from tests.serve.test_vllm_updates import tensors_of


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with closing(served_directory()) as server:
        yield server


@pytest.fixture(scope="module")
def chat_server() -> Iterator[Served]:
    """A server of a model with a tokenizer and a chat template."""
    with closing(chat_model.served_chat(trust_request_chat_template=True)) as server:
        yield server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with weights that `checkpoint_server` may load."""
    root = tmp_path_factory.mktemp("checkpoint")
    save_file(tensors_of(0), root / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def checkpoint_server(checkpoint: Path) -> Iterator[Served]:
    make = partial(OwnEngine, directory(), None, CONFIG)
    config = ServeConfig(port=0, checkpoint_roots=(str(checkpoint),))
    with closing(Served(make, config)) as server:
        yield server
