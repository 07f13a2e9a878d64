"""Recorded requests of real clients (tests/doors/run.py --record) get the fields that they read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve import chat_model
from tests.serve.served import Answer, Served
from tests.serve.trainer import Trainer, packed

pytestmark = pytest.mark.distributed

RECORDED = Path(__file__).parent / "recorded"
KEY = "sesame"  # of the recorded clients; those of trainers had none
# (path, the field of the body that asks for it, what a client reads then); * is each of a list.
READ = [
    ("/v1/models", "", "data.*.id"),
    ("/v1/models", "", "data.*.max_model_len"),
    ("/v1/completions", "", "choices.*.index"),
    ("/v1/completions", "", "choices.*.text"),
    ("/v1/completions", "", "choices.*.finish_reason"),
    ("/v1/completions", "logprobs", "choices.*.logprobs.tokens.*"),
    ("/v1/completions", "logprobs", "choices.*.logprobs.token_logprobs.*"),
    ("/v1/completions", "logprobs", "choices.*.logprobs.top_logprobs.*"),
    ("/v1/completions", "return_token_ids", "choices.*.token_ids.*"),
    ("/v1/completions", "return_token_ids", "choices.*.prompt_token_ids.*"),
    ("/v1/completions", "prompt_logprobs", "choices.*.prompt_logprobs.*"),
    ("/v1/chat/completions", "", "choices.*.message.role"),
    ("/v1/chat/completions", "", "choices.*.message.content"),
    ("/v1/chat/completions", "", "choices.*.finish_reason"),
    ("/v1/chat/completions", "tools", "choices.*.message.tool_calls.*.function.arguments"),
    ("/v1/chat/completions", "logprobs", "choices.*.logprobs.content.*.logprob"),
    ("/v1/chat/completions", "logprobs", "choices.*.logprobs.content.*.top_logprobs.*.token"),
    ("/v1/chat/completions", "return_token_ids", "prompt_token_ids.*"),
    ("/v1/chat/completions", "return_token_ids", "choices.*.token_ids.*"),
    ("/inference/v1/generate", "", "request_id"),
    ("/inference/v1/generate", "", "choices.*.token_ids.*"),
    ("/inference/v1/generate", "", "choices.*.finish_reason"),
    ("/inference/v1/generate", "sampling_params.logprobs", "choices.*.logprobs.content.*.token"),
    ("/inference/v1/generate", "sampling_params.logprobs", "choices.*.logprobs.content.*.logprob"),
    ("/inference/v1/generate", "sampling_params.prompt_logprobs", "prompt_logprobs.*"),
    ("/generate", "", "output_ids.*"),
    ("/generate", "", "meta_info.finish_reason.type"),
    ("/generate", "return_logprob", "meta_info.output_token_logprobs.*.*"),
    ("/generate", "logprob_start_len", "meta_info.input_token_logprobs.*.*"),
    ("/tokenize", "", "tokens.*"),
    ("/detokenize", "", "prompt"),
    ("/tokenizer_info", "", "eos_token"),
    ("/get_world_size", "", "world_size"),
    ("/is_sleeping", "", "is_sleeping"),
    ("/server_info", "", "vllm_config.model_config.dtype"),
    ("/server_info", "", "vllm_config.model_config.max_model_len"),
    ("/server_info", "", "vllm_config.weight_transfer_config.backend"),
    ("/update_weights_from_distributed", "", "success"),
    ("/init_weights_update_group", "", "success"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that clients shared with the server, as the scripts in tests/doors fill it."""
    root = tmp_path_factory.mktemp("root")
    for name in ("", "step_1", "step_2"):
        shutil.copytree(chat_model.directory(), root / name, dirs_exist_ok=True)
    torn = root / "step_2" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    return root


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    server = chat_model.served_chat(
        served_model_name="model",
        api_key=KEY,
        checkpoint_roots=(str(root),),
        weight_transfer_backend="gloo",
    )
    try:
        yield server
    finally:
        server.close()


def values_at(place: str, answer: Any) -> list[Any]:
    """All values at a path such as "choices.*.text"; a KeyError for one that lacks its place."""
    found = [answer]
    for name in place.split("."):
        found = [one for each in found for one in (each if name == "*" else [each[name]])]
    return found


def is_asked(field: str, body: Any) -> bool:
    for name in field.split(".") if field else ():
        body = (body or {}).get(name)
        if body is None or body is False:
            return False
    return True


def check_fields(exchange: dict[str, Any], answer: Answer) -> None:
    """A client finds what it reads of this answer."""
    path, body = exchange["path"].partition("?")[0], exchange["body"]
    if answer.status >= 400:
        content = answer.json()
        assert content.get("message") or content["error"]["message"]
    elif isinstance(body, dict) and body.get("stream"):
        *events, last, rest = answer.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert any(any(values_at("choices.*.finish_reason", chunk)) for chunk in chunks)
    else:
        for place in (place for at, field, place in READ if at == path and is_asked(field, body)):
            assert values_at(place, answer.json()), place


class Group:
    """The trainer's side of the groups that recorded requests make with the server."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def begin(self, exchange: dict[str, Any]) -> bool:
        """Take part in a request that needs the trainer; changes its port to a free one."""
        path, body = exchange["path"], exchange["body"]
        if exchange["status"] >= 400:
            return False
        if path == "/init_weight_transfer_engine":
            self._join("weight_transfer", body["init_info"])
        elif path == "/init_weights_update_group":
            self._join(body["group_name"], body)
        elif path == "/update_weights" and "update_info" in body:
            self._broadcast([packed(tensors_of(body["update_info"]))])
        elif path == "/update_weights_from_distributed":
            self._broadcast(tensors_of(body))
        else:
            return False
        return True

    def end(self) -> None:
        assert self._trainer is not None
        assert self._trainer.end() == ""

    def _join(self, name: str, rendezvous: dict[str, Any]) -> None:
        self.close()
        self._trainer = Trainer()
        # AReaL sends it as a text.
        rendezvous["master_port"] = type(rendezvous["master_port"])(self._trainer.port)
        self._trainer.begin_join(name, rendezvous["world_size"])

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        assert self._trainer is not None
        self._trainer.begin_broadcast(tensors)


def tensors_of(announced: dict[str, Any]) -> list[torch.Tensor]:
    """Some tensors of the shapes that a request announces."""
    return [torch.full(shape, 0.01) for shape in announced["shapes"]]


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_recorded_requests_of_a_client_get_the_fields_it_reads(
    served: Served, root: Path, name: str
) -> None:
    text = (RECORDED / f"{name}.json").read_text(encoding="utf-8")
    group = Group()
    try:
        for exchange in json.loads(text.replace("{root}", str(root))):
            has_peer = group.begin(exchange)
            headers = {"Authorization": f"Bearer {KEY}"} | exchange["headers"]
            answer = served.call(exchange["method"], exchange["path"], exchange["body"], headers)
            assert answer.status == exchange["status"], (exchange, answer.body)
            if has_peer:
                group.end()
            check_fields(exchange, answer)
    finally:
        group.close()
