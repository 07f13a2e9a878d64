"""What the server tells of itself, in the words of vLLM and of SGLang: trainers check it first."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from aiohttp import web

from rollout.serve.control.state import CONTROL
from rollout.serve.errors import json_response
from rollout.serve.state import STATE, Route, ServerState


def info_routes() -> list[Route]:
    """Return the routes that both protocols have under the same paths."""
    return [
        Route(method="GET", path="/server_info", handler=_server_info, summary="Server config"),
    ]


async def _server_info(request: web.Request, body: Any) -> web.Response:
    """The keys of vLLM's and of SGLang's answer. All engines together are one rank."""
    state, transfer = request.app[STATE], request.app[CONTROL].transfer
    dtype = None if transfer.model is None else str(transfer.model.dtype)
    return json_response(_vllm_info(state, dtype) | sglang_info(state, dtype, transfer.label))


def _vllm_info(state: ServerState, dtype: str | None) -> dict[str, Any]:
    backend = state.config.weight_transfer_backend
    config = {
        "model_config": {
            "model": state.served_name,
            "dtype": dtype,
            "max_model_len": state.max_model_len,
        },
        "weight_transfer_config": None if backend is None else {"backend": backend},
        "lora_config": None,
        "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1},
    }
    return {"vllm_config": config}


def sglang_info(state: ServerState, dtype: str | None, label: str) -> dict[str, Any]:
    """The keys that clients of SGLang read, of its server and its model."""
    path = state.llm.model_directory or state.served_name
    return {
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": state.served_name,
        "is_generation": True,
        "context_length": state.max_model_len,
        "dtype": None if dtype is None else dtype.removeprefix("torch."),
        "weight_version": label,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,
        "enable_return_routed_experts": False,
        "version": importlib.metadata.version("rollout"),
    }
