"""FileWeightTransfer against the real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import ServeConfig, WeightUpdateError
from tests.apis.fleets import weights
from tests.serve.served import Served, served_directory
from trainer_hooks.weight_sync.file_weight_transfer import FileWeightTransfer

pytestmark = pytest.mark.distributed
BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    server = served_directory(ServeConfig(port=0, checkpoint_roots=(str(tmp_path),)))
    yield server
    server.close()


def token_ids(server: Served) -> list[int]:
    (choice,) = server.completed("/v1/completions", BODY)[0]
    ids: list[int] = choice["token_ids"]
    return ids


def test_file_weight_transfer_serves_weights_after_resume(server: Served, tmp_path: Path) -> None:
    transfer = FileWeightTransfer(server.url, tmp_path, max_shard_bytes=20_000)
    transfer.init_weight_transfer()
    first = token_ids(server)

    def push(tensors: dict[str, Any]) -> None:
        transfer.pause()
        transfer.send_weights(iter(tensors.items()))
        transfer.resume()

    push(dict(weights(1).named_parameters()))
    assert server.llm.weights_version == 1
    second = token_ids(server)
    assert second != first
    with pytest.raises(WeightUpdateError, match="answered 400: "):
        push({"model.norm.weight": torch.ones(3)})
    transfer.destroy()
    assert token_ids(server) == second, "an update that failed changes nothing"
    push(dict(weights(0).named_parameters()))
    assert token_ids(server) == first
    assert list(tmp_path.iterdir()) == []
