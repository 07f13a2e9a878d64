"""vLLM's control routes: pause, sleep, weight updates; and prime-rl's updates from directories."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web

from rollout.engine.suspension import KV_CACHE, RESOURCES
from rollout.serve.control.checksums import weight_checksums
from rollout.serve.control.pausing import PauseMode
from rollout.serve.control.process_group import Packing, packed_chunks, single_chunks
from rollout.serve.control.state import CONTROL, port_of, require_backend
from rollout.serve.errors import ApiError, json_response
from rollout.serve.fields import Fields, neutral, refused
from rollout.serve.state import STATE, Route, admin_route, get_route

# vLLM has one group, without a name; ours is found in the trainer's store under this one.
GROUP = "weight_transfer"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_MODES = {mode.value: mode for mode in (PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP)}


PackedBuffers = Annotated[Any, neutral("it says how many buffers the sender fills in turn")]
ResetExternal = Annotated[bool | None, refused("there is no cache outside of the engines")]


class StartBody(Fields, kw_only=True):
    """is_checkpoint_format: whether tensors have the names and shapes of a checkpoint."""

    is_checkpoint_format: bool = True


class VllmAbortBody(Fields, kw_only=True):
    """request_ids: those to abort; all, if absent or empty."""

    request_ids: list[str] | None = None


class InitInfo(Fields, kw_only=True):
    """How to join the trainer's group. backend: an addition of ours; None takes the server's."""

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
    """Tensors that are broadcast now. packed: older trainers say it here."""

    names: list[str] = msgspec.field(default_factory=list)
    dtype_names: list[str] = msgspec.field(default_factory=list)
    shapes: list[list[int]] = msgspec.field(default_factory=list)
    packed: bool | None = None
    packed_buffer_size_bytes: int = 2**30

    packed_num_buffers: PackedBuffers = None


class UpdateBody(Fields, kw_only=True):
    """An update as vLLM's clients send it (update_info) or as prime-rl does (weight_dir).

    update_info: also a list with one entry, for the one rank of this server.
    """

    update_info: UpdateInfo | list[UpdateInfo] | None = None
    weight_dir: str | None = None


class FinishBody(Fields, kw_only=True):
    weight_version: str | None = None


class VersionBody(Fields, kw_only=True):
    """abort_all_requests: of SGLang, which has the same path."""

    new_version: str
    abort_all_requests: bool = False


class CheckerBody(Fields, kw_only=True):
    """action: "checksum", or "compare" with `baseline`, the checksums of an earlier answer."""

    action: str = "checksum"
    baseline: dict[str, str] | None = None


class ResetBody(Fields, kw_only=True):
    """SkyRL sends here what vLLM takes as query."""

    reset_running_requests: bool = False

    reset_external: ResetExternal = None


class PauseQuery(Fields, kw_only=True):
    mode: str | None = None
    clear_cache: str | None = None


class SleepQuery(Fields, kw_only=True):
    level: str | None = None
    mode: str | None = None


class WakeQuery(Fields, kw_only=True):
    """tags: may be given several times."""

    tags: str | None = None


class ResetQuery(Fields, kw_only=True):
    reset_running_requests: str | None = None

    reset_external: ResetExternal = None


class WorldSizeQuery(Fields, kw_only=True):
    include_dp: Annotated[Any, neutral("a server is one rank of a trainer's group")] = None


def vllm_routes() -> list[Route]:
    """Return the routes of the protocol."""
    return [
        admin_route("/pause", _pause, "Stop the engines at their next step", query=PauseQuery),
        admin_route("/resume", _resume, "End a pause"),
        get_route("/is_paused", _is_paused, "Whether a pause is in force"),
        admin_route(
            "/abort_requests",
            _abort,
            "Answer requests with the tokens that they have",
            body=VllmAbortBody,
        ),
        admin_route("/sleep", _sleep, "Pause, release memory", query=SleepQuery),
        admin_route("/wake_up", _wake_up, "Restore memory and end the pause", query=WakeQuery),
        get_route("/is_sleeping", _is_sleeping, "Whether the server sleeps"),
        admin_route(
            "/release_kv_cache_memory", _release_kv_cache, "Release the memory of the KV cache"
        ),
        admin_route(
            "/reset_prefix_cache",
            _reset_prefix_cache,
            "Forget cached prefixes",
            body=ResetBody,
            query=ResetQuery,
        ),
        get_route(
            "/get_world_size", _world_size, "Ranks in a trainer's group", query=WorldSizeQuery
        ),
        get_route("/weight_info", _weight_info, "Label of the weights"),
        admin_route(
            "/update_weight_version",
            _update_weight_version,
            "Begin a version without new weights",
            body=VersionBody,
        ),
        admin_route(
            "/weight_checker", _weight_checker, "Checksum of each weight", body=CheckerBody
        ),
        admin_route(
            "/init_weight_transfer_engine",
            _init_transfer,
            "Join the trainer's group",
            body=InitBody,
            ends_with_client=True,
        ),
        admin_route("/start_weight_update", _start, "Begin an update", body=StartBody),
        admin_route(
            "/update_weights",
            _update,
            "Receive tensors that are broadcast, or load a directory",
            body=UpdateBody,
            ends_with_client=True,
        ),
        admin_route(
            "/finish_weight_update",
            _finish,
            "Let the engines take the tensors that came",
            body=FinishBody,
        ),
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
    # The tag of a sleep of level 0, which releases nothing.
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
    success = await pausing.drop_cached_kv(even_of_running=even_of_running)
    return json_response({"success": success})


# ---- weights


async def _world_size(request: web.Request, body: Any) -> web.Response:
    """All engines together are one rank: they share what the server receives."""
    return json_response({"world_size": 1})


async def _weight_info(request: web.Request, body: Any) -> web.Response:
    return json_response({"weight_version": request.app[CONTROL].transfer.label})


async def _update_weight_version(request: web.Request, body: VersionBody) -> web.Response:
    if body.abort_all_requests:
        request.app[STATE].live.abort()
    await request.app[CONTROL].transfer.relabel(body.new_version)
    return json_response({"success": True, "new_version": body.new_version})


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
    return json_response({"message": "joined the group"})


async def _start(request: web.Request, body: StartBody) -> web.Response:
    if not body.is_checkpoint_format:
        raise ApiError(
            400,
            "is_checkpoint_format=false is not served; send tensors as a checkpoint has them",
            param="is_checkpoint_format",
        )
    request.app[CONTROL].transfer.begin()
    return json_response({"message": "an update has begun"})


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
        return json_response({"message": "the tensors were received"})
    if body.weight_dir is None:
        raise ApiError(400, "there is neither update_info nor weight_dir to update from")
    await transfer.load(body.weight_dir, None)
    return json_response({"status": "ok"})


async def _finish(request: web.Request, body: FinishBody) -> web.Response:
    report = await request.app[CONTROL].transfer.finish(body.weight_version)
    return json_response({"message": f"weights version {report.version} is served"})


# ---- fields


def _mode(request: web.Request) -> PauseMode:
    name = request.query.get("mode", PauseMode.ABORT.value)
    if name not in _MODES:
        raise ApiError(400, f"mode={name!r} must be one of {list(_MODES)}", param="mode")
    return _MODES[name]


def _flag(request: web.Request, name: str, *, default: bool = False) -> bool:
    """Return a truth value of the query. Raises ApiError."""
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
