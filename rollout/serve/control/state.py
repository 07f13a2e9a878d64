"""Control: what the control verbs of both protocols share."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from rollout.serve.control.checkpoints import CheckpointRoots
from rollout.serve.control.pausing import Pausing
from rollout.serve.control.weight_transfer import WeightTransfer
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
