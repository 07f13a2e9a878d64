"""vLLM's control routes: pause, sleep and weight updates. prime-rl's updates use them, too.

`rollout.serve.app` registers `vllm_routes`. The handlers call Pausing, WeightTransfer and
LiveRequests, which hold the state.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web

from rollout.engine.suspension import KV_CACHE, RESOURCES
from rollout.errors import EngineStateError
from rollout.serve.control.handlers import (
    FinishBody,
    VersionBody,
    begin_update,
    finish_update,
    port_of,
    require_backend,
    success,
    update_weight_version,
    weight_version,
)
from rollout.serve.control.pausing import PauseMode
from rollout.serve.control.process_group import Packing, packed_chunks, single_chunks
from rollout.serve.control.state import CONTROL
from rollout.serve.errors import ApiError
from rollout.serve.fields import Fields, neutral, refused
from rollout.serve.llm import ServedLLM
from rollout.serve.responses import json_response
from rollout.serve.state import STATE, Route, admin_route, get_route

# vLLM's only group has no name. Trainers of this project keep its addresses under this name.
GROUP = "weight_transfer"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_MODES = {mode.value: mode for mode in (PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP)}

PackedBuffers = Annotated[Any, neutral("it says how many buffers the sender fills in turn")]
ResetExternal = Annotated[bool | None, refused("there is no cache outside of the engines")]


class StartBody(Fields, kw_only=True):
    is_checkpoint_format: Annotated[
        Any, refused("send tensors with the names and shapes of a checkpoint", True)
    ] = None


class VllmAbortBody(Fields, kw_only=True):
    """Names of the requests to abort. All requests are aborted if `request_ids` is absent or
    empty."""

    request_ids: list[str] | None = None


class InitInfo(Fields, kw_only=True):
    """How to join the trainer's process group, as vLLM's clients send it.

    backend: torch.distributed backend. vLLM has no such field. None takes the server's
        weight_transfer_backend.
    """

    master_address: str = ""
    master_port: int | str = 0
    world_size: int = 2
    rank_offset: int = 1
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30
    backend: str | None = None

    nccl_unique_id_b64: Annotated[Any, refused("give master_address and master_port")] = None
    packed_num_buffers: PackedBuffers = None


class InitBody(Fields, kw_only=True):
    init_info: InitInfo


class UpdateInfo(Fields, kw_only=True):
    """Tensors that are broadcast now. Older trainers send `packed` here instead of in InitInfo."""

    names: list[str] = msgspec.field(default_factory=list)
    dtype_names: list[str] = msgspec.field(default_factory=list)
    shapes: list[list[int]] = msgspec.field(default_factory=list)
    packed: bool | None = None
    packed_buffer_size_bytes: int = 2**30

    packed_num_buffers: PackedBuffers = None


class UpdateBody(Fields, kw_only=True):
    """An update as vLLM's clients (`update_info`) or prime-rl (`weight_dir`) send it. `update_info`
    can be a list with one entry, because this server is one rank."""

    update_info: UpdateInfo | list[UpdateInfo] | None = None
    weight_dir: str | None = None


class CheckerBody(Fields, kw_only=True):
    """The action is "checksum" or "compare". "compare" needs `baseline`, the checksums of an
    earlier answer."""

    action: str = "checksum"
    baseline: dict[str, str] | None = None


class ResetBody(Fields, kw_only=True):
    """Fields of ResetQuery, which SkyRL sends in the body."""

    reset_running_requests: bool = False

    reset_external: ResetExternal = None


class PauseQuery(Fields, kw_only=True):
    mode: str | None = None
    clear_cache: str | None = None


class SleepQuery(Fields, kw_only=True):
    level: str | None = None
    mode: str | None = None


class WakeQuery(Fields, kw_only=True):
    """The resources to restore. `tags` can be given several times."""

    tags: str | None = None


class ResetQuery(Fields, kw_only=True):
    reset_running_requests: str | None = None

    reset_external: ResetExternal = None


class WorldSizeQuery(Fields, kw_only=True):
    include_dp: Annotated[Any, neutral("a server is one rank of a trainer's group")] = None


def vllm_routes() -> list[Route]:
    join = "Join the trainer's group"
    load = "Receive tensors that are broadcast, or load a directory"
    finish = "Let the engines load the received tensors"
    abort = "Answer requests with their tokens so far"
    return [
        admin_route("/pause", _pause, "Stop the engines at their next step", query=PauseQuery),
        admin_route("/resume", _resume, "End a pause"),
        get_route("/is_paused", _is_paused, "Whether a pause is in force"),
        admin_route("/abort_requests", _abort, abort, VllmAbortBody),
        admin_route("/sleep", _sleep, "Pause, release memory", query=SleepQuery),
        admin_route("/wake_up", _wake_up, "Restore memory and end the pause", query=WakeQuery),
        get_route("/is_sleeping", _is_sleeping, "Whether the server sleeps"),
        admin_route("/release_kv_cache_memory", _release_kv_cache, "Release the KV cache's memory"),
        admin_route(
            "/reset_prefix_cache",
            _reset_prefix_cache,
            "Drop cached prefixes",
            ResetBody,
            query=ResetQuery,
        ),
        get_route(
            "/get_world_size", _world_size, "Ranks in a trainer's group", query=WorldSizeQuery
        ),
        get_route("/weight_info", weight_version, "Label of the weights"),
        admin_route(
            "/update_weight_version", update_weight_version, "Begin a version", VersionBody
        ),
        admin_route("/weight_checker", _weight_checker, "Checksum of each weight", CheckerBody),
        admin_route(
            "/init_weight_transfer_engine", _init_transfer, join, InitBody, ends_with_client=True
        ),
        admin_route("/start_weight_update", begin_update, "Begin an update", StartBody),
        admin_route("/update_weights", _update, load, UpdateBody, ends_with_client=True),
        admin_route("/finish_weight_update", finish_update, finish, FinishBody),
    ]


# ---- pauses and memory


async def _pause(request: web.Request, body: Any) -> web.Response:
    pausing = request.app[CONTROL].pausing
    mode = _mode(request)
    await pausing.pause(mode, refuses_new=mode is not PauseMode.KEEP)
    if _flag(request, "clear_cache", default=True):
        await pausing.drop_cached_kv()
    return json_response({"status": "paused"})


async def _resume(request: web.Request, body: Any) -> web.Response:
    await request.app[CONTROL].pausing.resume()
    return json_response({"status": "resumed"})


async def _is_paused(request: web.Request, body: Any) -> web.Response:
    return json_response({"is_paused": await request.app[CONTROL].pausing.is_paused()})


async def _abort(request: web.Request, body: VllmAbortBody) -> web.Response:
    num_aborted = request.app[STATE].live.abort(body.request_ids or None)
    return json_response({"status": "aborted", "aborted": num_aborted})


async def _sleep(request: web.Request, body: Any) -> web.Response:
    level = request.query.get("level", "1")
    if level not in ("0", "1", "2"):
        raise ApiError(400, f"level={level!r} must be 0, 1 or 2", param="level")
    await request.app[CONTROL].pausing.sleep(int(level), _mode(request))
    return json_response({"status": "sleeping", "level": int(level)})


async def _wake_up(request: web.Request, body: Any) -> web.Response:
    pausing = request.app[CONTROL].pausing
    tags = request.query.getall("tags", [])
    # "scheduling" is the tag of a sleep of level 0, which releases nothing.
    await pausing.wake_up([tag for tag in tags if tag != "scheduling"] if tags else RESOURCES)
    status = "sleeping" if await pausing.is_sleeping() else "awake"
    return json_response({"status": status, "tags": tags or None})


async def _is_sleeping(request: web.Request, body: Any) -> web.Response:
    return json_response({"is_sleeping": await request.app[CONTROL].pausing.is_sleeping()})


async def _release_kv_cache(request: web.Request, body: Any) -> web.Response:
    await request.app[CONTROL].pausing.release((KV_CACHE,))
    return json_response({"status": "released"})


async def _reset_prefix_cache(request: web.Request, body: ResetBody) -> web.Response:
    even_of_running = body.reset_running_requests or _flag(request, "reset_running_requests")
    pausing = request.app[CONTROL].pausing
    is_dropped = await pausing.drop_cached_kv(even_of_running=even_of_running)
    return json_response({"success": is_dropped})


# ---- weights


async def _world_size(request: web.Request, body: Any) -> web.Response:
    # All engines together are one rank, because they share the received tensors.
    return json_response({"world_size": 1})


async def _weight_checker(request: web.Request, body: CheckerBody) -> web.Response:
    if body.action not in ("checksum", "compare"):
        raise ApiError(
            400,
            f"action={body.action!r} must be 'checksum' or 'compare'; /sleep?level=2 discards the "
            "weights",
            param="action",
        )
    if body.action == "compare" and body.baseline is None:
        raise ApiError(400, "action='compare' needs baseline: checksums", param="baseline")
    checksums = await weight_checksums(request.app[STATE].llm)
    if body.baseline is None or body.action == "checksum":
        return json_response({"checksums": checksums})
    names = checksums.keys() | body.baseline.keys()
    differing = sorted(n for n in names if checksums.get(n) != body.baseline.get(n))
    return json_response({"match": not differing, "mismatches": differing})


async def weight_checksums(llm: ServedLLM) -> dict[str, str]:
    """Return the checksum of each weight by name. Raises ApiError if engines serve different
    weights, there is no engine, or weights are released or change meanwhile."""
    found: dict[str, str] = {}
    versions: set[int] = set()
    num_weights = 1
    while len(found) < num_weights:
        try:
            pages = await llm.weight_checksums(len(found))
        except EngineStateError as error:  # the weights are released or discarded
            raise ApiError(409, str(error)) from error
        if not pages:
            raise ApiError(503, "no engine is connected to compute checksums")
        (first, page), *others = pages.items()
        for rank, other in others:
            if other != page:
                raise ApiError(500, f"engines {first} and {rank} serve different weights")
        found |= page.checksums
        versions.add(page.version)
        num_weights = page.num_weights
    if len(versions) > 1:
        raise ApiError(
            409, f"the weights changed meanwhile: versions {sorted(versions)}; ask again"
        )
    return found


async def _init_transfer(request: web.Request, body: InitBody) -> web.Response:
    info = body.init_info
    backend = info.backend or request.app[STATE].config.weight_transfer_backend or "nccl"
    require_backend(backend, served=("gloo",))  # vLLM's NCCL wire is not torch's
    await request.app[CONTROL].transfer.join(
        GROUP,
        host=info.master_address,
        port=port_of(info.master_port),
        rank=info.rank_offset,
        world_size=info.world_size,
        packing=_packing(info.packed, info.packed_buffer_size_bytes),
    )
    return success("joined the group")


async def _update(request: web.Request, body: UpdateBody) -> web.Response:
    transfer, info = request.app[CONTROL].transfer, body.update_info
    if isinstance(info, list):
        if len(info) != 1:
            raise ApiError(
                400,
                f"update_info has {len(info)} entries and needs 1: this server is one rank, "
                "however many engines it has",
                param="update_info",
            )
        (info,) = info
    if info is not None:
        packing = None
        if info.packed is not None:
            packing = _packing(info.packed, info.packed_buffer_size_bytes)
        await transfer.receive(GROUP, info.names, info.dtype_names, info.shapes, packing=packing)
        return success("the tensors were received")
    if body.weight_dir is None:
        raise ApiError(400, "neither update_info nor weight_dir is given; give one of them")
    await transfer.load(body.weight_dir, None)
    return json_response({"status": "ok"})


# ---- fields


def _mode(request: web.Request) -> PauseMode:
    name = request.query.get("mode", PauseMode.ABORT.value)
    if name not in _MODES:
        raise ApiError(400, f"mode={name!r} must be one of {list(_MODES)}", param="mode")
    return _MODES[name]


def _flag(request: web.Request, name: str, *, default: bool = False) -> bool:
    """Return a boolean of the query, or `default` if it is absent. Raises ApiError for other
    text."""
    text = request.query.get(name)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        raise ApiError(400, f"{name}={text!r} must be true or false", param=name)
    return _FLAGS[text.lower()]


def _packing(packed: bool, buffer_size_bytes: int) -> Packing:
    if buffer_size_bytes < 1:
        raise ApiError(
            400,
            f"packed_buffer_size_bytes={buffer_size_bytes} must be at least 1",
            param="packed_buffer_size_bytes",
        )
    return partial(packed_chunks, buffer_size_bytes=buffer_size_bytes) if packed else single_chunks
