"""GET /server_info and /model_info, with the keys of vLLM and SGLang, for trainers."""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web

from rollout.serve.control.state import CONTROL
from rollout.serve.errors import json_response
from rollout.serve.fields import Fields, neutral
from rollout.serve.openapi import installed_version
from rollout.serve.state import STATE, Route, get_route


class InfoQuery(Fields, kw_only=True):
    config_format: Annotated[Any, neutral("the answer is JSON")] = None


def info_routes() -> list[Route]:
    """Return the route that both protocols have under the same path."""
    return [get_route("/server_info", server_info, "Server config", query=InfoQuery)]


async def server_info(request: web.Request, body: Any) -> web.Response:
    """Answer with the keys of vLLM and of SGLang. All engines together are one rank."""
    state, transfer = request.app[STATE], request.app[CONTROL].transfer
    backend = state.config.weight_transfer_backend
    vllm_config = {
        "model_config": {
            "model": state.served_name,
            "dtype": None if transfer.model is None else str(transfer.model.dtype),
            "max_model_len": state.max_model_len,
        },
        "weight_transfer_config": None if backend is None else {"backend": backend},
        "lora_config": None,
        "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1},
    }
    sglang_config = {
        "context_length": state.max_model_len,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,
        "enable_return_routed_experts": False,
        "version": installed_version(),
    }
    return json_response({"vllm_config": vllm_config, **sglang_config, **_model(request)})


async def model_info(request: web.Request, body: Any) -> web.Response:
    """Answer with SGLang's keys."""
    return json_response(_model(request))


def _model(request: web.Request) -> dict[str, Any]:
    state, transfer = request.app[STATE], request.app[CONTROL].transfer
    name = state.served_name
    dtype = None if transfer.model is None else str(transfer.model.dtype).removeprefix("torch.")
    return {
        "model_path": transfer.loaded_directory or name,
        "served_model_name": name,
        "tokenizer_path": state.llm.model_directory or name,
        "is_generation": True,
        "dtype": dtype,
        "weight_version": transfer.label,
    }
