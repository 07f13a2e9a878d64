"""SGLang's control routes: aborts, pauses, memory, weight updates and information."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from aiohttp import web

from rollout.backends.process_groups import group_backends
from rollout.engine.suspension import RESOURCES
from rollout.serve.control.pausing import PauseMode
from rollout.serve.control.process_group import Packing, one_chunk, single_chunks
from rollout.serve.control.server_info import model_info, server_info
from rollout.serve.control.state import CONTROL, port_of, require_backend
from rollout.serve.errors import ApiError, json_response, sglang_admin_form
from rollout.serve.fields import Fields, neutral, refused
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


CachedMemory = Annotated[Any, neutral("memory is released where it is known to be free")]
Flushed = Annotated[Any, neutral("the prefix cache finds nothing of another version")]
Models = Annotated[Any, refused("there is one model, and no draft", "all", "target")]
Reported = Annotated[Any, neutral("SGLang's own processes alone send and read it")]


class SglangAbortBody(Fields, kw_only=True):
    rid: str | None = None
    abort_all: bool = False

    abort_message: Reported = None
    finished_reason: Reported = None
    weight_versions: Reported = None


class PauseBody(Fields, kw_only=True):
    mode: str = "abort"


class MemoryBody(Fields, kw_only=True):
    """tags: resources; null is all."""

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
    manifest: Annotated[Any, refused("the directory's own index says what is in it")] = None
    recapture_cuda_graph: Annotated[Any, neutral("graphs read weights where they lie")] = None
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


class EndBody(Fields, kw_only=True):
    weight_version: str | None = None


class VersionBody(Fields, kw_only=True):
    new_version: str
    abort_all_requests: bool = False


class FlushQuery(Fields, kw_only=True):
    timeout: Annotated[
        float | None, refused("it waits for no request; pause them with retract", 0.0)
    ] = None


class LoadsQuery(Fields, kw_only=True):
    dp_rank: Annotated[int | None, refused("a server has one rank", 0)] = None
    format: Annotated[Any, refused("GET /metrics is for Prometheus", "json")] = None
    include: Annotated[Any, neutral("all that is known is told")] = None


def sglang_routes() -> list[Route]:
    """Return the routes of the protocol, without /generate."""
    admin = partial(admin_route, errors=sglang_admin_form)
    get = partial(get_route, errors=sglang_admin_form)
    flush = admin("/flush_cache", _flush, "Forget cached prefixes", query=FlushQuery)
    return [
        admin(
            "/abort_request",
            _abort,
            "Answer requests with the tokens that they have",
            body=SglangAbortBody,
        ),
        admin("/pause_generation", _pause, "Stop the engines at their next step", body=PauseBody),
        admin(
            "/continue_generation",
            _continue,
            "End a pause; let the engines take the tensors that came in it",
            body=ContinueBody,
        ),
        replace(flush, method="GET"),
        flush,
        admin("/release_memory_occupation", _release, "Release memory", body=MemoryBody),
        admin("/resume_memory_occupation", _restore, "Restore released memory", body=MemoryBody),
        get("/v1/loads", _loads, "Requests that run and wait", query=LoadsQuery),
        get("/get_server_info", server_info, "Server config"),
        get("/model_info", model_info, "The model"),
        get("/get_model_info", model_info, "The model"),
        get("/get_weight_version", _weight_version, "Label of the weights"),
        get("/workers", _workers, "This server, as a router lists it"),
        admin(
            "/update_weights_from_disk",
            _update_from_disk,
            "Load the weights of a directory",
            body=DiskBody,
        ),
        admin(
            "/init_weights_update_group",
            _init_group,
            "Join the trainer's group",
            body=GroupBody,
            ends_with_client=True,
        ),
        admin(
            "/destroy_weights_update_group",
            _destroy_group,
            "Leave the trainer's group",
            body=GroupNameBody,
        ),
        admin(
            "/update_weights_from_distributed",
            _update_from_distributed,
            "Receive tensors that are broadcast",
            body=DistributedBody,
            ends_with_client=True,
        ),
        admin("/begin_weight_update", _begin, "Begin an update", body=BeginBody),
        admin(
            "/end_weight_update", _end, "Let the engines take the tensors that came", body=EndBody
        ),
        admin(
            "/update_weight_version",
            _update_weight_version,
            "Begin a version without new weights",
            body=VersionBody,
        ),
    ]


def _success(message: str, **fields: Any) -> web.Response:
    return json_response({"success": True, "message": message, **fields})


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
    """Commit the tensors that came in the pause as one update. If the engines refuse it, the pause
    goes on."""
    control = request.app[CONTROL]
    if control.transfer.is_open:
        await control.transfer.finish()
    await control.pausing.resume()
    return json_response({"message": "generation goes on", "status": "ok"})


async def _flush(request: web.Request, body: Any) -> web.Response:
    if not await request.app[CONTROL].pausing.drop_cached_kv():
        raise ApiError(400, "the cache is in use by requests that run; pause them with retract")
    return web.Response(text="the cache is flushed\n")


async def _release(request: web.Request, body: MemoryBody) -> web.Response:
    await request.app[CONTROL].pausing.release(_resources(body.tags))
    return json_response(None)


async def _restore(request: web.Request, body: MemoryBody) -> web.Response:
    await request.app[CONTROL].pausing.restore(_resources(body.tags))
    return json_response(None)


def _resources(tags: Sequence[str] | None) -> Sequence[str]:
    """Return the resources that tags name. Captured graphs have no memory of their own here."""
    return [tag for tag in tags if tag != "cuda_graph"] if tags else RESOURCES


# ---- weights


async def _update_from_disk(request: web.Request, body: DiskBody) -> web.Response:
    live, control = request.app[STATE].live, request.app[CONTROL]
    if body.abort_all_requests:
        live.abort()
    num_paused = live.num_samples if control.pausing.mode is not None else 0
    await control.transfer.load(body.model_path, body.weight_version)
    return _success("the weights are updated", num_paused_requests=num_paused)


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
    return _success("joined the group")


async def _destroy_group(request: web.Request, body: GroupNameBody) -> web.Response:
    if not request.app[CONTROL].transfer.leave(body.group_name):
        raise ApiError(400, f"no group {body.group_name!r} was joined", param="group_name")
    return _success("left the group")


async def _update_from_distributed(request: web.Request, body: DistributedBody) -> web.Response:
    """Receive tensors. In a pause the first call begins an update, since its clients announce only
    the end of the pause.
    """
    control = request.app[CONTROL]
    if body.load_format not in _PACKINGS:
        control.transfer.leave(body.group_name)  # nobody knows what will be broadcast
        raise ApiError(
            400,
            f"load_format={body.load_format!r} must be one of {list(_PACKINGS)}",
            param="load_format",
        )
    if body.abort_all_requests:
        request.app[STATE].live.abort()
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
    return _success("the tensors were received")


async def _begin(request: web.Request, body: Any) -> web.Response:
    request.app[CONTROL].transfer.begin()
    return _success("an update has begun")


async def _end(request: web.Request, body: EndBody) -> web.Response:
    report = await request.app[CONTROL].transfer.finish(body.weight_version)
    return _success(f"weights version {report.version} is served")


async def _update_weight_version(request: web.Request, body: VersionBody) -> web.Response:
    if body.abort_all_requests:
        request.app[STATE].live.abort()
    await request.app[CONTROL].transfer.relabel(body.new_version)
    return _success("a version has begun", new_version=body.new_version)


# ---- information


async def _loads(request: web.Request, body: Any) -> web.Response:
    state = request.app[STATE]
    stats = await state.llm.stats()
    num_running = stats.num_running + stats.num_paused
    num_waiting = max(0, state.live.num_samples - num_running) + state.limiter.num_waiting
    load = {"dp_rank": 0, "num_running_reqs": num_running, "num_waiting_reqs": num_waiting}
    return json_response({"loads": [load]})


async def _weight_version(request: web.Request, body: Any) -> web.Response:
    return json_response({"weight_version": request.app[CONTROL].transfer.label})


async def _workers(request: web.Request, body: Any) -> web.Response:
    url = str(request.url.origin())
    return json_response({"workers": [{"id": url, "url": url}]})
