"""Handlers and bodies that the control routes of vLLM and SGLang share.

`rollout.serve.vllm.control` and `rollout.serve.sglang.control` register the handlers, and
`rollout.serve.app` registers `info_routes`. The handlers update weights through WeightTransfer and
abort requests through LiveRequests. A reply has the keys of both protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web

from rollout.serve.control.state import CONTROL
from rollout.serve.errors import ApiError
from rollout.serve.fields import Fields, neutral
from rollout.serve.openapi import installed_version
from rollout.serve.responses import json_response
from rollout.serve.state import STATE, Route, get_route


class VersionBody(Fields, kw_only=True):
    """Body of POST /update_weight_version.

    new_version: label of the version that begins.
    abort_all_requests: SGLang's field, whether all requests are aborted first.
    """

    new_version: str
    abort_all_requests: bool = False


class FinishBody(Fields, kw_only=True):
    """Body that ends an update. weight_version is the version's label, by default the tensors'
    label, else its number."""

    weight_version: str | None = None


class InfoQuery(Fields, kw_only=True):
    config_format: Annotated[Any, neutral("the answer is JSON")] = None


def info_routes() -> list[Route]:
    """Return /server_info, which both protocols have."""
    return [get_route("/server_info", server_info, "Server config", query=InfoQuery)]


def success(message: str, **fields: Any) -> web.Response:
    """Return the reply of an operation that succeeded."""
    # vLLM's clients read only the status 200.
    return json_response({"success": True, "message": message, **fields})


# ---- weights


async def begin_update(request: web.Request, body: Any) -> web.Response:
    request.app[CONTROL].transfer.begin()
    return success("an update has begun")


async def finish_update(request: web.Request, body: FinishBody) -> web.Response:
    """Let the engines load the tensors of the open update, and answer with the new version."""
    report = await request.app[CONTROL].transfer.finish(body.weight_version)
    return success(f"weights version {report.version} is served")


async def update_weight_version(request: web.Request, body: VersionBody) -> web.Response:
    """Begin a weights version with a label, but without new weights."""
    if body.abort_all_requests:
        request.app[STATE].live.abort()
    await request.app[CONTROL].transfer.relabel(body.new_version)
    return success("a version has begun", new_version=body.new_version)


async def weight_version(request: web.Request, body: Any) -> web.Response:
    return json_response({"weight_version": request.app[CONTROL].transfer.label})


def require_backend(name: str, served: Sequence[str]) -> None:
    """Raise ApiError (400) unless `name`, a torch.distributed backend, is one of `served`."""
    if name not in served:
        raise ApiError(
            400,  # clients do not try again
            f"backend={name!r} is not served here; make the group with backend='gloo', or update "
            "from a directory",
            param="backend",
        )


def port_of(port: int | str) -> int:
    """Return the number of a port, which clients can send as text. Raises ApiError for an invalid
    port."""
    text = str(port)
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) < 2**16):
        raise ApiError(
            400, f"master_port={text!r:.40} must be in [1, {2**16 - 1}]", param="master_port"
        )
    return int(text)


# ---- information


async def server_info(request: web.Request, body: Any) -> web.Response:
    """Answer with the server's config under the keys of vLLM and SGLang. The reply describes all
    engines together as one rank."""
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
