"""FileWeightTransfer against a small server with the endpoints of vLLM's control API."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from rollout import WeightUpdateError
from rollout.models.checkpoints.reader import Checkpoint
from tests.loopback_server import serving
from trainer_hooks.weight_sync.file_weight_transfer import FileWeightTransfer
from trainer_hooks.weight_sync.weight_files import STABLE_FILE


class FakeServer:
    """Records its requests, and the weights in the directories that they name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.num_shards: list[int] = []
        self.refusal: str | None = None
        self.keys: set[str | None] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.answer)
        for path in ("/pause", "/resume"):
            app.router.add_post(path, self.answer)
        app.router.add_post("/update_weights", self.update)
        return app

    async def answer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        self.keys.add(request.headers.get("Authorization"))
        return web.json_response({"status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        directory = Path((await request.json())["weight_dir"])
        assert (directory / STABLE_FILE).is_file()
        if self.refusal is not None:
            return web.json_response({"error": {"message": self.refusal}}, status=400)
        checkpoint = Checkpoint.open(directory)
        self.weights.append({name: tensor.clone() for name, tensor in checkpoint.items()})
        self.num_shards.append(len(checkpoint.shards))
        return web.json_response({"status": "ok"})


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    with serving(fake.app()) as url:
        yield url


def named_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32)
    return {
        "a": base.view(4, 6),
        "b": base.view(6, 4).T,  # shares memory with a, and is not contiguous
        "c": torch.randn(3, dtype=torch.bfloat16),
    }


def test_file_weight_transfer_sends_all_tensors_between_pause_and_resume(
    fake: FakeServer, url: str, tmp_path: Path
) -> None:
    transfer = FileWeightTransfer(url, tmp_path, admin_key="master", max_shard_bytes=90)
    weights = named_tensors()
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(weights.items()))
    transfer.resume()
    transfer.destroy()
    pause = "/pause?mode=keep&clear_cache=false"
    assert fake.calls == ["/health", pause, "/update_weights", "/resume"]
    assert fake.keys == {"Bearer master"}
    (received,) = fake.weights
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert {name: t.dtype for name, t in received.items()}["c"] is torch.bfloat16
    assert fake.num_shards == [3], "of 96, 96 and 6 bytes"
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_file_weight_transfer_raises_the_servers_reason_and_leaves_no_file(
    fake: FakeServer, url: str, tmp_path: Path
) -> None:
    fake.refusal = "'lm_head.weight' is missing"
    transfer = FileWeightTransfer(url, tmp_path)
    transfer.pause()
    with pytest.raises(WeightUpdateError, match=r"answered 400: 'lm_head\.weight' is missing"):
        transfer.send_weights(named_tensors().items())
    assert list(tmp_path.iterdir()) == []
    transfer.destroy()
    assert fake.calls[-1] == "/resume", "a job that ends leaves no frozen server"


def test_send_weights_names_an_unwritable_tensor_and_gathers_the_rest(
    fake: FakeServer, url: str, tmp_path: Path
) -> None:
    gathered = []

    def weights() -> Iterator[tuple[str, Any]]:
        for name, tensor in (("a", torch.ones(2)), ("b", "text"), ("c", torch.ones(2))):
            gathered.append(name)
            yield name, tensor

    with pytest.raises(WeightUpdateError, match="'b' is a str"):
        FileWeightTransfer(url, tmp_path).send_weights(weights())
    assert gathered == ["a", "b", "c"], "other ranks wait for this one in each of them"
    twice = [("a", torch.ones(2)), ("a", torch.ones(2))]
    with pytest.raises(WeightUpdateError, match="'a' comes twice"):
        FileWeightTransfer(url, tmp_path).send_weights(twice)
    with pytest.raises(WeightUpdateError, match="cannot be written to"):
        FileWeightTransfer(url, tmp_path / "none").send_weights(twice)
    assert "/update_weights" not in fake.calls


def test_init_weight_transfer_names_a_missing_server_after_the_timeout() -> None:
    transfer = FileWeightTransfer("http://127.0.0.1:9", start_timeout_s=0.0)
    with pytest.raises(WeightUpdateError, match=r"GET http://127\.0\.0\.1:9/health got no answer"):
        transfer.init_weight_transfer()


def test_file_weight_transfer_has_the_methods_of_trls_protocol() -> None:
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    protocol = trainer.WeightTransferProtocol
    names = [name for name in vars(protocol) if not name.startswith("_")]
    assert "send_weights" in names
    for name in names:
        wanted, ours = (inspect.signature(getattr(c, name)) for c in (protocol, FileWeightTransfer))
        assert list(ours.parameters) == list(wanted.parameters), name
