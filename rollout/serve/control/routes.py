"""The routes of the doors that control engines."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.serve.config import CONTROL_DOORS
from rollout.serve.control.server_info import info_routes
from rollout.serve.sglang.control import sglang_routes
from rollout.serve.sglang.generate import generate_routes
from rollout.serve.state import Route
from rollout.serve.vllm.control import vllm_routes


def control_routes(doors: Sequence[str]) -> list[Route]:
    """Return the routes of those of `doors` that are control doors."""
    routes = info_routes() if set(CONTROL_DOORS) & set(doors) else []
    if "vllm" in doors:
        routes += vllm_routes()
    if "sglang" in doors:
        routes += [*generate_routes(), *sglang_routes()]
    return routes
