"""Control: what the control verbs of both protocols share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from rollout.serve.control.checkpoints import CheckpointRoots
from rollout.serve.control.pausing import Pausing
from rollout.serve.control.weight_transfer import WeightTransfer
from rollout.serve.errors import ApiError
from rollout.serve.state import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    pausing: Pausing
    transfer: WeightTransfer


CONTROL: web.AppKey[Control] = web.AppKey("control", Control)


def make_control(state: ServerState) -> Control:
    """Return the control of a server's engines. Raises ModelError for a model directory without a
    readable config.json.
    """
    config = state.config
    pausing = Pausing(state.llm, state.live, state.turnstile)
    transfer = WeightTransfer(
        state.llm,
        state.labels,
        pausing,
        CheckpointRoots(config.checkpoint_roots),
        config.weight_transfer_timeout_s,
    )
    return Control(pausing=pausing, transfer=transfer)


async def close_control(app: web.Application) -> None:
    """Leave the trainers' groups: calls that wait for a broadcast would keep the server waiting."""
    app[CONTROL].transfer.close()


def require_backend(name: str, served: Sequence[str]) -> None:
    """Raise ApiError unless groups of this backend of torch.distributed are among those `served`.

    The status is one that says that trying again is of no use.
    """
    if name not in served:
        raise ApiError(
            400,
            f"backend={name!r} is not served here; make the group with backend='gloo', or update "
            "from a directory",
            param="backend",
        )


def port_of(port: int | str) -> int:
    """Return a port that a client may send as a text. Raises ApiError."""
    try:
        return int(port)
    except ValueError:
        raise ApiError(400, f"master_port={port!r} must be a number", param="master_port") from None
