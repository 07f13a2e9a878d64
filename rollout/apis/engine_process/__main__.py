"""python -m rollout.apis.engine_process ADDRESS MODEL_DIR: one more engine for a running fleet."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence

from rollout.apis.engine_process.run import run_engine
from rollout.config import InferenceConfig
from rollout.coordinator.security import CurveKeys, client_keys_in
from rollout.errors import ConfigError, RolloutError


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
    return parser


def _keys(given: argparse.Namespace) -> CurveKeys | None:
    if (given.key is None) != (given.server_key is None):
        raise ConfigError("--key and --server-key need each other")
    return None if given.key is None else client_keys_in(given.key, given.server_key)


def _config(text: str) -> InferenceConfig:
    try:
        return InferenceConfig(**json.loads(text))
    except (ValueError, TypeError, RolloutError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
