"""rollout engine: runs one engine, which connects to the coordinator at --join ADDRESS.

`rollout.cli.main` calls `run`. The engine runs in this process, and its other tensor-parallel ranks
in child processes. `run` sets up logging, and a handler of SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout import apis
from rollout.addresses import tcp_address
from rollout.cli.coordinator import address_of
from rollout.cli.logs import add_verbose, log_to_stderr
from rollout.cli.models import (
    CONFIG_HELP,
    CONFIG_KINDS,
    LLM_HINTS,
    MODEL_KINDS,
    engine_config,
    model_of,
    model_summary,
    settings_help,
    with_model,
)
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, help_of, read_settings
from rollout.coordinator.net.key_folder import ENGINE, peer_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinKeywords:
    """How an engine joins its fleet.

    weights_version: version of the weights in the model's directory.
    register_timeout_s: seconds to wait for the coordinator.
    """

    weights_version: int = 0
    register_timeout_s: float = 600.0


_KINDS: Kinds = fields_of(JoinKeywords)
BESIDE = "vllm-server"  # the engine of --beside, which the package rollout_vllm offers


def run(words: Sequence[str]) -> int:
    """Run the engine until the coordinator shuts it down. Returns 0. SIGTERM raises SystemExit,
    which disconnects the engine. Other engines then continue its requests. `words` are the
    command's arguments. Raises UsageError for wrong arguments."""
    parser = Parser(
        "engine",
        "Run one engine of a fleet, until its coordinator shuts the engines down.",
    )
    parser.epilog = settings_help("the fleet:\n" + help_of(JoinKeywords), CONFIG_HELP)
    add_verbose(parser)
    parser.add_argument(
        "--join",
        metavar="ADDRESS",
        help="the coordinator's address: tcp://HOST:PORT, ipc:// or a port",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        help="folder of this peer's keys, or the whole folder of `rollout keys`",
    )
    parser.add_argument(
        "--as",
        dest="peer",
        default=ENGINE,
        metavar="NAME",
        help=f"name of the peer whose keys are used ({ENGINE})",
    )
    parser.add_argument(
        "--beside",
        metavar="URL",
        help="run the steps in the `vllm serve` process at http://HOST:PORT: engine=vllm-server",
    )
    groups = (MODEL_KINDS, CONFIG_KINDS, _KINDS)
    given = parser.parse(words, *groups, hints=LLM_HINTS)
    of_model, fields, own = read_settings(with_model(given.settings), *groups, hints=LLM_HINTS)
    if given.join is None:
        raise UsageError(
            "give the coordinator's address, which `rollout coordinator` prints: "
            "--join tcp://HOST:PORT"
        )
    address = joined_address(given.join)
    if given.beside is not None:
        fields = with_server(fields, given.beside)
    config = engine_config(fields)
    of_model["model"] = model_of(of_model)
    curve = None if given.keys is None else peer_keys(given.keys, given.peer)
    log_to_stderr(is_verbose=given.verbose)
    if not given.json:
        summary = model_summary(of_model["model"], config)
        print(f"loading {summary}, to join {address}", file=sys.stderr, flush=True)
    # SystemExit unwinds the stack, so the engine disconnects and others continue its requests.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    joined = f"joined {address}; Ctrl-C, SIGTERM or the coordinator's end ends this engine"
    apis.run_engine(
        address,
        **of_model,
        inference_config=config,
        curve=curve,
        **own,
        on_registered=lambda: None if given.json else print(joined, file=sys.stderr, flush=True),
    )
    return 0


def with_server(fields: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return `fields` of InferenceConfig with the engine of --beside and the server's `url`. Raises
    UsageError if `fields` name another engine or server."""
    options = {"url": url, **(fields.get("engine_options") or {})}
    engine = fields.get("engine", BESIDE)
    if engine != BESIDE or options["url"] != url:
        raise UsageError(
            f"--beside {url} contradicts engine={engine}, url={options['url']}; give only one of "
            "--beside and these settings"
        )
    return {**fields, "engine": BESIDE, "engine_options": options}


def joined_address(join: str) -> str:
    """Return the address of --join, which is tcp://HOST:PORT, ipc://PATH, or a port on loopback. A
    port becomes a tcp:// address. Raises UsageError for other text."""
    if join.startswith("ipc://"):
        return join
    try:
        host, port = address_of(join)
    except UsageError:
        port = None
    if port is None:
        raise UsageError(
            f"--join {join} is not the address of a coordinator: give tcp://HOST:PORT, ipc://PATH "
            "or a port (loopback), as `rollout coordinator` prints it"
        )
    return tcp_address(host, port)
