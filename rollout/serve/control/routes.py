"""The routes of the protocols that control engines."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.serve.config import CONTROL_PROTOCOLS
from rollout.serve.control.server_info import info_routes
from rollout.serve.sglang.control import sglang_routes
from rollout.serve.sglang.generate import generate_routes
from rollout.serve.state import Route
from rollout.serve.vllm.control import vllm_routes


def control_routes(protocols: Sequence[str]) -> list[Route]:
    """Return the control routes of `protocols`."""
    routes = info_routes() if set(CONTROL_PROTOCOLS) & set(protocols) else []
    if "vllm" in protocols:
        routes += vllm_routes()
    if "sglang" in protocols:
        routes += [*generate_routes(), *sglang_routes()]
    return routes
