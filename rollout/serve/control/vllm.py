"""vLLM's control verbs: pause, sleep, weight updates; and prime-rl's updates from directories."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from rollout.engine.suspension import KV_CACHE, OWNERS
from rollout.errors import WeightUpdateError
from rollout.serve.control.pausing import PauseMode
from rollout.serve.control.process_group import Packing, packed_chunks, single_chunks
from rollout.serve.control.state import CONTROL
from rollout.serve.errors import ApiError, json_response
from rollout.serve.limits import Access
from rollout.serve.state import STATE, Handler, Route

# vLLM has one group, without a name; ours is found in the trainer's store under this one.
GROUP = "weight_transfer"
_MODES = {mode.value: mode for mode in (PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP)}


class NoBody(msgspec.Struct):
    """A body of which nothing is read."""


class AbortBody(msgspec.Struct):
    """request_ids: those to abort; all, if absent or empty."""

    request_ids: list[str] | None = None


class InitInfo(msgspec.Struct):
    """How to join the trainer's group. backend: an addition of ours; None takes the server's."""

    master_address: str = ""
    master_port: int = 0
    world_size: int = 2
    rank_offset: int = 1
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30
    backend: str | None = None


class InitBody(msgspec.Struct):
    init_info: InitInfo


class UpdateInfo(msgspec.Struct):
    """Tensors that are broadcast now. packed: older trainers say it here."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: int = 2**30


class UpdateBody(msgspec.Struct):
    """Of vLLM's update: `update_info`. Of prime-rl's: `weight_dir`."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None


class FinishBody(msgspec.Struct):
    weight_version: str | None = None


class VersionBody(msgspec.Struct):
    new_version: str


class CheckerBody(msgspec.Struct):
    action: str = "checksum"


class ResetBody(msgspec.Struct):
    """SkyRL sends here what vLLM takes as query."""

    reset_running_requests: bool = False


def vllm_routes() -> list[Route]:
    """Return the routes of the door."""
    post, get = partial(Route, method="POST", access=Access.ADMIN), partial(Route, method="GET")
    return [
        post(path="/pause", handler=_pause, summary="Stop the engines at their next step"),
        post(path="/resume", handler=_resume, summary="End a pause"),
        get(path="/is_paused", handler=_is_paused, summary="Whether a pause is in force"),
        post(
            path="/abort_requests",
            handler=_abort,
            body=AbortBody,
            summary="Answer requests with the tokens that they have",
        ),
        post(path="/sleep", handler=_sleep, summary="Pause and release memory"),
        post(path="/wake_up", handler=_wake_up, summary="Restore memory and end the pause"),
        get(path="/is_sleeping", handler=_is_sleeping, summary="Whether the server sleeps"),
        post(
            path="/release_kv_cache_memory",
            handler=_release_kv_cache,
            summary="Release the memory of the KV cache",
        ),
        post(
            path="/reset_prefix_cache",
            handler=_reset_prefix_cache,
            body=ResetBody,
            summary="Forget cached prefixes",
        ),
        get(path="/get_world_size", handler=_world_size, summary="Ranks in a trainer's group"),
        get(path="/weight_info", handler=_weight_info, summary="Label of the weights"),
        post(
            path="/update_weight_version",
            handler=_update_weight_version,
            body=VersionBody,
            summary="Begin a version without new weights",
        ),
        post(
            path="/weight_checker",
            handler=_weight_checker,
            body=CheckerBody,
            summary="Checksum of the weights",
        ),
        post(
            path="/init_weight_transfer_engine",
            handler=_init_transfer,
            body=InitBody,
            summary="Join the trainer's group",
        ),
        post(
            path="/start_weight_update",
            handler=_start,
            summary="Begin an update",
        ),
        post(
            path="/update_weights",
            handler=_update,
            body=UpdateBody,
            summary="Receive tensors that are broadcast, or load a directory",
        ),
        post(
            path="/finish_weight_update",
            handler=_finish,
            body=FinishBody,
            summary="Let the engines take the tensors that came",
        ),
    ]
