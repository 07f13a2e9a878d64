"""python -m rollout.coordinator: a coordinator from a shell, or as the child of an AsyncLLM."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from rollout.child_process import CHILD_FLAG, run_child
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.security import listening_host, server_keys_in
from rollout.errors import RolloutError


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the address, and serve until a client's SHUTDOWN, SIGTERM or Ctrl-C."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        coordinator = DataParallelInferenceCoordinator(
            None,
            given.data_parallel_size,
            inference_coordinator_port=given.port,
            host=listening_host(given.host, given.port),
            advertise_host=given.advertise_host,
            curve=None if given.key is None else server_keys_in(given.key, given.client_key),
            insecure=given.insecure,
            limits=given.limits,
            **given.options,
        )
    except (RolloutError, TypeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for number in (signal.SIGINT, signal.SIGTERM):
        name = number.name
        signal.signal(number, lambda *_, name=name: coordinator.stop(f"the coordinator got {name}"))
    print(coordinator.address, flush=True)
    coordinator.start()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout.coordinator",
        description="Stand between clients and engines, until a client shuts the fleet down. "
        "Prints the address that both dial.",
    )
    parser.add_argument(
        "--host", help="listen at this name or address; without it and --port for this user only"
    )
    parser.add_argument("--advertise-host", help="name or address that others dial (--host)")
    parser.add_argument("--port", type=int, help="listen at this port, on loopback without --host")
    parser.add_argument("--key", help="file with the coordinator's secret key, of mode 0600")
    parser.add_argument(
        "--client-key",
        action="append",
        default=[],
        metavar="FILE",
        help="public key of a client or engine that may come in; once for each",
    )
    parser.add_argument("--data-parallel-size", type=int, default=1, help="engines expected (1)")
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without keys"
    )
    parser.add_argument(
        "--limits",
        type=_limits,
        metavar="JSON",
        help="fields of CoordinatorLimits, as '{\"orphan_deadline_s\": 600}'",
    )
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further arguments of DataParallelInferenceCoordinator, as "
        '\'{"block_size_tokens": 16, "enable_prefix_caching": true}\'',
    )
    return parser


def _limits(text: str) -> CoordinatorLimits:
    try:
        return CoordinatorLimits(**json.loads(text))
    except (ValueError, TypeError, RolloutError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _serve_parent(pipe: Connection, arguments: dict[str, Any]) -> None:
    DataParallelInferenceCoordinator.entrypoint(
        pipe, threading.Event(), tokenizer=None, **arguments
    )


if __name__ == "__main__":
    if CHILD_FLAG in sys.argv:
        run_child(_serve_parent)
    else:
        main()
