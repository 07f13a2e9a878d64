"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollout.serve.errors import ApiError, json_response
from rollout.serve.state import STATE, Route, ServerState, get_route


def model_routes() -> list[Route]:
    return [
        get_route("/v1/models", _list_models, "The models"),
        get_route("/v1/models/{name:.+}", _get_model, "One model"),
    ]


async def _list_models(request: web.Request, body: Any) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[STATE])]})


async def _get_model(request: web.Request, body: Any) -> web.Response:
    state = request.app[STATE]
    check_model(state, request.match_info["name"])
    return json_response(_model(state))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.served_name,
        "object": "model",
        "created": state.created,
        "owned_by": "rollout",
        "root": state.llm.model_directory or state.served_name,
        "parent": None,
        "max_model_len": state.max_model_len,
    }


def check_model(state: ServerState, name: str | None) -> None:
    """Raise ApiError unless `name` is absent, empty or the served one."""
    if name and name not in (state.served_name, state.llm.model_directory):
        raise ApiError(
            404,
            f"The model `{name}` does not exist; `{state.served_name}` is served.",
            param="model",
        )
