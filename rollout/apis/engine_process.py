"""run_engine: runs one engine of a fleet in this process, connected to the coordinator.

`rollout.cli.engine` calls `run_engine` for `rollout engine --join`. The launchers of
`rollout.launch` run this module in child processes, for the jobs of `rollout.apis.fleet_processes`.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout.apis.engines import make_engine
from rollout.child_process import CHILD_FLAG, run_child
from rollout.config import DEFAULT_MAX_REQUESTS, InferenceConfig
from rollout.coordinator.agent.agent import EngineAgent, serve
from rollout.coordinator.net.link import Link
from rollout.coordinator.net.security import CurveKeys
from rollout.errors import ConfigError, CoordinatorLostError, ModelError, encode_error
from rollout.models.checkpoints.smollm2 import model_directory
from rollout.text import Tokenizer, tokenizer_of
from rollout.weights.transports.registry import WeightFetcher

REGISTER_S = 600.0  # default seconds to wait for the coordinator


def run_engine(
    address: int | str,
    model: str | Path | Any,
    tokenizer: Tokenizer | Any | None = None,
    inference_config: InferenceConfig | None = None,
    weights_version: int = 0,
    *,
    curve: CurveKeys | None = None,
    register_timeout_s: float = REGISTER_S,
    on_registered: Callable[[], object] = lambda: None,
) -> None:
    """Build an engine and run it for the coordinator at `address`, until SHUTDOWN arrives.

    It blocks, so call it in a process of its own. An engine can join at any time. If the fleet
    serves later weights than `weights_version`, the engine fetches them first, provided that the
    trainer keeps them.

    address: `AsyncLLM.address`, or a port on loopback.
    model, tokenizer: as for LLM.
    curve: this engine's keys; None without encryption.
    on_registered: called when the coordinator has registered the engine.

    Raises ConfigError, ModelError, and the coordinator's error if it refuses the engine. Raises
    CoordinatorLostError if there is no answer within `register_timeout_s`, or if the connection is
    lost later.
    """
    config, model = inference_config or InferenceConfig(), model_directory(model)
    engine = make_engine(model, config, tokenizer_of(model, tokenizer), weights_version)
    engine.measure_step()
    agent = EngineAgent(
        engine,
        engine_id=uuid.uuid4().bytes,
        block_size_tokens=engine.block_size_tokens,
        max_requests=config.max_requests or DEFAULT_MAX_REQUESTS,
        settings=engine.shared_settings,
        fetch=WeightFetcher(engine.weight_fetchers),
    )
    with Link(address, handshake=agent.registration, status=agent.status, curve=curve) as link:
        link.wait_registered(register_timeout_s)
        on_registered()
        serve(agent, link)


def _serve_parent(pipe: Connection, address: str, arguments: dict[str, Any]) -> None:
    """Run an engine with run_engine's `arguments`, and report its start over `pipe`. Sends
    "registered", or the ConfigError or ModelError that keeps the engine from starting. Exits
    without a traceback after such an error, and if the coordinator is lost after the start."""
    is_registered = False

    def report() -> None:
        nonlocal is_registered
        is_registered = True
        pipe.send("registered")

    try:
        run_engine(address, **arguments, on_registered=report)
    except CoordinatorLostError as error:
        if not is_registered:
            raise
        sys.exit(str(error))  # not a fault of this process: no traceback
    except (ConfigError, ModelError) as error:
        if is_registered:
            raise
        pipe.send(encode_error(error))
        sys.exit(1)  # a fault of the settings: no traceback beside the parent's error


if __name__ == "__main__":
    if CHILD_FLAG not in sys.argv:
        sys.exit("this module is for AsyncLLM; from a shell use: rollout engine --join")
    run_child(_serve_parent)
