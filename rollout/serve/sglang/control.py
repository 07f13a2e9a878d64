"""SGLang's control routes: aborts, pauses, memory, weight updates and information.

`rollout.serve.app` registers `sglang_routes`. The handlers call Pausing, WeightTransfer and
LiveRequests, which hold the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from aiohttp import web

from rollout.backends.process_groups import group_backends
from rollout.engine.suspension import RESOURCES
from rollout.serve.control.handlers import (
    FinishBody,
    VersionBody,
    begin_update,
    finish_update,
    model_info,
    port_of,
    require_backend,
    server_info,
    success,
    update_weight_version,
    weight_version,
)
from rollout.serve.control.pausing import PauseMode
from rollout.serve.control.process_group import Packing, one_chunk, single_chunks
from rollout.serve.control.state import CONTROL
from rollout.serve.errors import ApiError, sglang_admin_form
from rollout.serve.fields import Fields, neutral, refused
from rollout.serve.responses import json_response
from rollout.serve.state import STATE, Route, admin_route, get_route

_MODES = {
    "abort": PauseMode.ABORT,
    "retract": PauseMode.RETRACT,
    "in_place": PauseMode.KEEP,
}
_PACKINGS: dict[str | None, Packing] = {
    None: single_chunks,
    "auto": single_chunks,
    "flattened_bucket": one_chunk,
}
_DEFAULT_GROUP = "weight_update_group"

CachedMemory = Annotated[Any, neutral("the engine releases cached memory by itself")]
Flushed = Annotated[Any, neutral("prefixes of another weights version are never reused")]
Models = Annotated[Any, refused("the server has one model and no draft model", "all", "target")]
Reported = Annotated[Any, neutral("only SGLang's own processes send and read it")]


class SglangAbortBody(Fields, kw_only=True):
    rid: str | None = None
    abort_all: bool = False

    abort_message: Reported = None
    finished_reason: Reported = None
    weight_versions: Reported = None


class PauseBody(Fields, kw_only=True):
    mode: str = "abort"


class MemoryBody(Fields, kw_only=True):
    """Names of the resources to release or restore. null names all of them."""

    tags: list[str] | None = None


class ContinueBody(Fields, kw_only=True):
    torch_empty_cache: CachedMemory = None


class DiskBody(Fields, kw_only=True):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False

    flush_cache: Flushed = None
    is_async: Annotated[Any, refused("the answer comes when the weights are served")] = None
    keep_pause: Annotated[Any, refused("pause before the update, and continue after it")] = None
    load_format: Annotated[
        Any, refused("checkpoints are safetensors with HF's names", "auto", "safetensors")
    ] = None
    manifest: Annotated[Any, refused("the directory's own index lists its files")] = None
    recapture_cuda_graph: Annotated[Any, neutral("captured graphs read the updated weights")] = None
    token_step: Annotated[Any, refused("name the weights by weight_version", 0)] = None
    torch_empty_cache: CachedMemory = None


class GroupBody(Fields, kw_only=True):
    master_address: str
    master_port: int | str
    world_size: int
    rank_offset: int = 1
    group_name: str = _DEFAULT_GROUP
    backend: str = "nccl"


class GroupNameBody(Fields, kw_only=True):
    group_name: str = _DEFAULT_GROUP


class DistributedBody(Fields, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = _DEFAULT_GROUP
    weight_version: str | None = None
    load_format: str | None = None
    abort_all_requests: bool = False

    flush_cache: Flushed = None
    selector: Models = None
    torch_empty_cache: CachedMemory = None


class BeginBody(Fields, kw_only=True):
    selector: Models = None


class FlushQuery(Fields, kw_only=True):
    timeout: Annotated[
        float | None, refused("a flush does not wait for requests; pause with mode=retract", 0.0)
    ] = None


class LoadsQuery(Fields, kw_only=True):
    dp_rank: Annotated[int | None, refused("a server has one rank", 0)] = None
    format: Annotated[Any, refused("GET /metrics is for Prometheus", "json")] = None
    include: Annotated[Any, neutral("all known numbers are returned")] = None


def sglang_routes() -> list[Route]:
    """Return SGLang's routes except /generate and /server_info."""
    admin = partial(admin_route, errors=sglang_admin_form)
    get = partial(get_route, errors=sglang_admin_form)
    resume = "End a pause; let the engines load the tensors that came in it"
    flush = admin("/flush_cache", _flush, "Drop cached prefixes", query=FlushQuery)
    join, receive = "Join the trainer's group", "Receive tensors that are broadcast"
    finish = "Let the engines load the received tensors"
    of_group = "/update_weights_from_distributed"
    return [
        admin(
            "/abort_request", _abort, "Answer requests with their tokens so far", SglangAbortBody
        ),
        admin("/pause_generation", _pause, "Stop the engines at their next step", PauseBody),
        admin("/continue_generation", _continue, resume, ContinueBody),
        flush,
        replace(flush, method="GET"),
        admin("/release_memory_occupation", _release, "Release memory", MemoryBody),
        admin("/resume_memory_occupation", _restore, "Restore released memory", MemoryBody),
        get("/v1/loads", _loads, "Requests that run and wait", query=LoadsQuery),
        get("/get_server_info", server_info, "Server config"),
        get("/model_info", model_info, "The model"),
        get("/get_model_info", model_info, "The model"),
        get("/get_weight_version", weight_version, "Label of the weights"),
        get("/workers", _workers, "This server, as a router lists it"),
        admin("/update_weights_from_disk", _update_from_disk, "Load a directory", DiskBody),
        admin("/init_weights_update_group", _init_group, join, GroupBody, ends_with_client=True),
        admin("/destroy_weights_update_group", _destroy_group, "Leave the group", GroupNameBody),
        admin(of_group, _update_from_distributed, receive, DistributedBody, ends_with_client=True),
        admin("/begin_weight_update", begin_update, "Begin an update", BeginBody),
        admin("/end_weight_update", finish_update, finish, FinishBody),
        admin("/update_weight_version", update_weight_version, "Begin a version", VersionBody),
    ]


# ---- requests, pauses, memory


async def _abort(request: web.Request, body: SglangAbortBody) -> web.Response:
    if not body.abort_all and not body.rid:
        raise ApiError(400, "give rid, or abort_all", param="rid")
    request.app[STATE].live.abort(None if body.abort_all else [body.rid or ""])
    return web.Response()


async def _pause(request: web.Request, body: PauseBody) -> web.Response:
    if body.mode not in _MODES:
        raise ApiError(400, f"mode={body.mode!r} must be one of {list(_MODES)}", param="mode")
    await request.app[CONTROL].pausing.pause(_MODES[body.mode])
    return json_response({"message": "generation is paused", "status": "ok"})


async def _continue(request: web.Request, body: Any) -> web.Response:
    """Commit the tensors that arrived during the pause, then end the pause. If the engines refuse
    the tensors, answer with the error and keep the pause."""
    control = request.app[CONTROL]
    if control.transfer.is_open:
        await control.transfer.finish()
    await control.pausing.resume()
    return json_response({"message": "generation continues", "status": "ok"})


async def _flush(request: web.Request, body: Any) -> web.Response:
    if not await request.app[CONTROL].pausing.drop_cached_kv():
        raise ApiError(400, "running requests use the cache; pause them with mode=retract first")
    return web.Response(text="the cache is flushed\n")


async def _release(request: web.Request, body: MemoryBody) -> web.Response:
    await request.app[CONTROL].pausing.release(_resources(body.tags))
    return json_response(None)


async def _restore(request: web.Request, body: MemoryBody) -> web.Response:
    await request.app[CONTROL].pausing.restore(_resources(body.tags))
    return json_response(None)


def _resources(tags: Sequence[str] | None) -> Sequence[str]:
    """Return the resources that `tags` name, or all resources if there are no tags."""
    # Captured graphs have no separate memory here.
    return [tag for tag in tags if tag != "cuda_graph"] if tags else RESOURCES


# ---- weights


async def _update_from_disk(request: web.Request, body: DiskBody) -> web.Response:
    live, control = request.app[STATE].live, request.app[CONTROL]
    if body.abort_all_requests:
        live.abort()
    num_paused = live.num_unfinished_samples if control.pausing.mode is not None else 0
    await control.transfer.load(body.model_path, body.weight_version)
    return success("the weights are updated", num_paused_requests=num_paused)


async def _init_group(request: web.Request, body: GroupBody) -> web.Response:
    require_backend(body.backend, served=group_backends())
    await request.app[CONTROL].transfer.join(
        body.group_name,
        host=body.master_address,
        port=port_of(body.master_port),
        rank=body.rank_offset,
        world_size=body.world_size,
        packing=single_chunks,
        backend=body.backend,
    )
    return success("joined the group")


async def _destroy_group(request: web.Request, body: GroupNameBody) -> web.Response:
    if not request.app[CONTROL].transfer.leave(body.group_name):
        raise ApiError(400, f"no group {body.group_name!r} was joined", param="group_name")
    return success("left the group")


async def _update_from_distributed(request: web.Request, body: DistributedBody) -> web.Response:
    """Receive tensors. During a pause the first call begins an update, which `_continue`
    commits."""
    control = request.app[CONTROL]
    if body.load_format not in _PACKINGS:
        control.transfer.leave(body.group_name)  # the size of the broadcasts is unknown
        raise ApiError(
            400,
            f"load_format={body.load_format!r} must be one of {list(_PACKINGS)}",
            param="load_format",
        )
    if body.abort_all_requests:
        request.app[STATE].live.abort()
    # SGLang's clients mark the end of an update only by the end of the pause.
    if control.pausing.mode is not None and not control.transfer.is_open:
        control.transfer.begin()
    await control.transfer.receive(
        body.group_name,
        body.names,
        body.dtypes,
        body.shapes,
        packing=_PACKINGS[body.load_format],
        label=body.weight_version,
    )
    return success("the tensors were received")


# ---- information


async def _loads(request: web.Request, body: Any) -> web.Response:
    state = request.app[STATE]
    stats = await state.llm.stats()
    num_running = stats.num_running + stats.num_paused
    num_waiting = (
        max(0, state.live.num_unfinished_samples - num_running) + state.limiter.num_waiting
    )
    load = {"dp_rank": 0, "num_running_reqs": num_running, "num_waiting_reqs": num_waiting}
    return json_response({"loads": [load]})


async def _workers(request: web.Request, body: Any) -> web.Response:
    url = str(request.url.origin())
    return json_response({"workers": [{"id": url, "url": url}]})
