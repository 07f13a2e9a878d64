"""Control: the objects that the control routes of both protocols share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from rollout.serve.control.checkpoints import CheckpointRoots
from rollout.serve.control.operations import Operations
from rollout.serve.control.pausing import Pausing
from rollout.serve.control.weight_transfer import WeightTransfer
from rollout.serve.errors import ApiError
from rollout.serve.state import ServerState

# How long operations may go on once a server has answered its requests.
_LAST_OPERATIONS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    operations: Operations
    pausing: Pausing
    transfer: WeightTransfer


CONTROL: web.AppKey[Control] = web.AppKey("control", Control)


def make_control(state: ServerState) -> Control:
    """Return the control of a server's engines. Raises ModelError for a model directory without a
    readable config.json.
    """
    config = state.config
    operations = Operations()
    pausing = Pausing(state.llm, state.live, state.limiter)
    transfer = WeightTransfer(
        state.llm,
        state.labels,
        pausing,
        operations,
        CheckpointRoots(config.checkpoint_roots),
        config.weight_transfer_timeout_s,
    )
    return Control(operations=operations, pausing=pausing, transfer=transfer)


async def close_control(app: web.Application) -> None:
    """Leave the trainers' groups, since calls that wait for a broadcast would keep the server
    waiting, and wait for the operations that run.
    """
    app[CONTROL].transfer.close()
    await app[CONTROL].operations.end(_LAST_OPERATIONS_S)


def require_backend(name: str, served: Sequence[str]) -> None:
    """Raise ApiError unless groups of this backend of torch.distributed are among those `served`.

    The status is 400, so that clients do not try again.
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
    text = str(port)
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) < 2**16):
        raise ApiError(
            400, f"master_port={text!r:.40} must be in [1, {2**16 - 1}]", param="master_port"
        )
    return int(text)
