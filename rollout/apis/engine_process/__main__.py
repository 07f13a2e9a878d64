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
from rollout.errors import RolloutError


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
    parser.add_argument("address", help="of the coordinator: tcp://host:port, or a port here")
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
    return parser


def _config(text: str) -> InferenceConfig:
    try:
        return InferenceConfig(**json.loads(text))
    except (ValueError, TypeError, RolloutError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
