"""run_engine: an engine that dials a coordinator, from its start to its end.

From a shell: python -m rollout.apis.engine_process ADDRESS MODEL_DIR
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout.apis.arguments import config_with
from rollout.child_process import CHILD_FLAG, run_child
from rollout.config import DEFAULT_MAX_REQUESTS, InferenceConfig
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.engine_side.serve import serve
from rollout.coordinator.link import Link
from rollout.coordinator.security import CurveKeys, client_keys_in
from rollout.coordinator.weights.fetching import WeightFetcher
from rollout.engine.build import DynamicInferenceEngine
from rollout.errors import ConfigError, RolloutError
from rollout.text import Tokenizer, tokenizer_of

REGISTER_S = 600.0


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
    """Serve the coordinator at `address` with one engine, until its SHUTDOWN. Blocks.

    `address`: of an AsyncLLM, or a port on loopback. `model` and `tokenizer` as for LLM. The engine
    may come at any time: if the fleet has gone on to later weights than `weights_version`, it
    fetches those before it gets work, where the trainer keeps them. Call it in a process of its
    own: it takes all of the thread it is called in, and `on_registered` once the fleet has it.

    Raises ConfigError and ModelError, the coordinator's reason if it refuses the engine, and
    CoordinatorLostError if nobody answers within `register_timeout_s`.
    """
    config = inference_config or InferenceConfig()
    engine = DynamicInferenceEngine.from_model(
        model, config, tokenizer_of(model, tokenizer), weights_version
    )
    agent = EngineAgent(
        engine,
        engine_id=uuid.uuid4().bytes,
        block_size_tokens=engine.block_size_tokens,
        max_requests=config.max_requests or DEFAULT_MAX_REQUESTS,
        fetch=WeightFetcher(),
    )
    with Link(address, handshake=agent.registration, status=agent.status, curve=curve) as link:
        link.wait_registered(register_timeout_s)
        on_registered()
        serve(agent, link)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an engine until the coordinator's SHUTDOWN, SIGTERM or Ctrl-C."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # As an exception, so that the engine says goodbye and its requests go on elsewhere at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run_engine(
            given.address,
            given.model,
            inference_config=given.config,
            weights_version=given.weights_version,
            curve=_keys(given),
            register_timeout_s=given.register_timeout_s,
        )
    except RolloutError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout.apis.engine_process",
        description="Serve a coordinator with one engine, until it shuts its engines down.",
    )
    parser.add_argument("address", help="of the coordinator: ipc:// or tcp://host:port, or a port")
    parser.add_argument("model", help="a Hugging Face model directory")
    parser.add_argument(
        "--weights-version", type=int, default=0, help="of the weights in that directory (0)"
    )
    parser.add_argument(
        "--config",
        type=_config,
        metavar="JSON",
        help="fields of InferenceConfig, as '{\"block_size_tokens\": 16}'",
    )
    parser.add_argument("--key", help="file with this engine's secret key, of mode 0600")
    parser.add_argument("--server-key", help="file with the coordinator's public key")
    parser.add_argument(
        "--register-timeout-s",
        type=float,
        default=REGISTER_S,
        help=f"how long to dial a coordinator that does not answer ({REGISTER_S:g})",
    )
    return parser


def _keys(given: argparse.Namespace) -> CurveKeys | None:
    if (given.key is None) != (given.server_key is None):
        raise ConfigError("--key and --server-key need each other")
    return None if given.key is None else client_keys_in(given.key, given.server_key)


def _config(text: str) -> InferenceConfig:
    try:
        return config_with(None, json.loads(text))
    except (ValueError, TypeError, RolloutError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _serve_parent(pipe: Connection, address: str, arguments: dict[str, Any]) -> None:
    """`arguments`: further ones of run_engine."""
    is_registered = False

    def tell() -> None:
        nonlocal is_registered
        is_registered = True
        pipe.send("registered")

    try:
        run_engine(address, **arguments, on_registered=tell)
    except CoordinatorLostError as error:
        if not is_registered:
            raise
        sys.exit(str(error))  # not a fault of this process: no traceback


if __name__ == "__main__":
    if CHILD_FLAG in sys.argv:
        run_child(_serve_parent)
    else:
        main()
