"""Control: the objects that one server's control routes share.

`rollout.serve.app` makes and closes it. The control routes, `rollout.serve.health` and
`rollout.serve.metrics` read it as `request.app[CONTROL]`.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from rollout.serve.control.checkpoints import CheckpointRoots
from rollout.serve.control.operations import Operations
from rollout.serve.control.pausing import Pausing
from rollout.serve.control.weight_transfer import WeightTransfer
from rollout.serve.state import ServerState

# Seconds that operations may continue after the server has answered its requests.
_LAST_OPERATIONS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The objects that the control routes share."""

    operations: Operations
    pausing: Pausing
    transfer: WeightTransfer


CONTROL: web.AppKey[Control] = web.AppKey("control", Control)


def make_control(state: ServerState) -> Control:
    """Return the Control of a server's engines. Raises ModelError if the model's config.json is
    bad."""
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
    """Leave the trainers' process groups, and end the running operations. Calls that wait for a
    broadcast raise an error. Operations are cancelled after `_LAST_OPERATIONS_S` seconds."""
    app[CONTROL].transfer.close()
    await app[CONTROL].operations.end(_LAST_OPERATIONS_S)
