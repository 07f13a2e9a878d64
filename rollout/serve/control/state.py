"""Control: the objects that the control routes share, from the server's start to its end.

Used by `rollout.serve.app`, which makes and closes it. The control routes, `rollout.serve.health`
and `rollout.serve.metrics` read it from the app by the key CONTROL.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from rollout.serve.control.checkpoints import CheckpointRoots
from rollout.serve.control.operations import Operations
from rollout.serve.control.pausing import Pausing
from rollout.serve.control.weight_transfer import WeightTransfer
from rollout.serve.state import ServerState

# Seconds that operations may continue once a server has answered its requests.
_LAST_OPERATIONS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The objects that the control routes share.

    operations: the running control operations. pausing: pauses, suspends and resumes the engines.
    transfer: updates their weights.
    """

    operations: Operations
    pausing: Pausing
    transfer: WeightTransfer


CONTROL: web.AppKey[Control] = web.AppKey("control", Control)


def make_control(state: ServerState) -> Control:
    """Return the Control of a server's engines. Raises ModelError for a model directory without a
    readable config.json."""
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
    """Leave the trainers' process groups; calls that wait for a broadcast raise. Then wait for the
    running operations, and cancel operations that take longer than `_LAST_OPERATIONS_S`."""
    app[CONTROL].transfer.close()
    await app[CONTROL].operations.end(_LAST_OPERATIONS_S)
