"""rollout coordinator: runs a coordinator, which distributes clients' requests to engines.

`rollout.cli.main` calls `run`. `rollout.cli.engine` uses `address_of`. The coordinator runs in this
process. Engines join by `rollout engine`, clients by AsyncLLM.connect. `run` sets up logging, and
handlers of SIGINT and SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.cli.logs import add_verbose, log_to_stderr
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, help_of, read_settings
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.key_folder import coordinator_keys
from rollout.wire import DEFAULT_MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorKeywords:
    """The keywords of DataParallelInferenceCoordinator that a command line can give.

    data_parallel_size: expected number of engines; more may join.
    advertise_host: host for clients and engines, with --listen tcp://0.0.0.0:5555.
    insecure: accept other machines without keys, for closed networks alone.
    deterministic_mode: give no work before all engines have joined, with ranks in the order of
        their ids.
    block_size_tokens: tokens of a block of a prompt's prefix.
    enable_prefix_caching: route prompts by their prefixes, in blocks of block_size_tokens.
    prefix_caching_coordinator_policy: the routing policy.
    policy_options: arguments of the policy, as JSON.
    schedule_output_path: file for the routing decisions.
    max_frame_bytes: longest message that is sent or accepted."""

    data_parallel_size: int = 1
    advertise_host: str | None = None
    insecure: bool = False
    deterministic_mode: bool = False
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    prefix_caching_coordinator_policy: str = "load_balanced"
    policy_options: dict[str, Any] = field(default_factory=dict)
    schedule_output_path: str | None = None
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES


_LIMITS: Kinds = fields_of(CoordinatorLimits)
_KINDS: Kinds = fields_of(CoordinatorKeywords)
_HINTS = {
    "host": "the option --listen tcp://HOST:PORT",
    "port": "the option --listen tcp://HOST:PORT",
    "address": "the option --listen tcp://HOST:PORT",
    "dp": "data_parallel_size",
    "dp_size": "data_parallel_size",
    "policy": "prefix_caching_coordinator_policy",
}


def run(words: Sequence[str]) -> int:
    """Print the address, and serve until a client sends a Shutdown, or until SIGTERM or Ctrl-C.
    Returns 0. `words` are the command's arguments. Raises UsageError for wrong arguments."""
    parser = Parser(
        "coordinator",
        "Distribute the requests of clients to engines, until a client shuts the fleet down.\n"
        "Both join by the printed address. Off loopback it needs keys: see `rollout keys`.",
    )
    parser.epilog = (
        f"the coordinator:\n{help_of(CoordinatorKeywords)}\n"
        f"its limits (CoordinatorLimits):\n{help_of(CoordinatorLimits)}"
    )
    add_verbose(parser)
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="tcp://HOST:PORT or a port (loopback); if absent, a socket of this user",
    )
    parser.add_argument("--keys", metavar="DIR", help="folder made by `rollout keys`")
    given = parser.parse(words, _KINDS, _LIMITS, hints=_HINTS)
    options, limits = read_settings(given.settings, _KINDS, _LIMITS, hints=_HINTS)
    host, port = (None, None) if given.listen is None else address_of(given.listen)
    log_to_stderr(is_verbose=given.verbose)
    coordinator = DataParallelInferenceCoordinator(
        None,
        options.pop("data_parallel_size", 1),
        inference_coordinator_port=port,
        host=host,
        curve=None if given.keys is None else coordinator_keys(given.keys),
        limits=CoordinatorLimits(**limits),
        **options,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        reason = f"the coordinator received {number.name}"
        signal.signal(number, lambda *_, reason=reason: coordinator.stop(reason))
    address = coordinator.address
    print(json.dumps({"address": address}) if given.json else address, flush=True)
    if not given.json:
        keys = "" if given.keys is None else " --keys DIR"
        print(
            f"an engine joins by `rollout engine DIR --join {address}{keys}`; watch by `rollout "
            f"top {address}{keys}`; Ctrl-C to stop",
            file=sys.stderr,
            flush=True,
        )
    coordinator.start()
    return 0


def address_of(listen: str) -> tuple[str, int | None]:
    """Return host and port of tcp://HOST:PORT, HOST:PORT or PORT (on 127.0.0.1). Port 0 becomes
    None, which means any free port. Raises UsageError for other text."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if "://" in host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"--listen {listen} is not an address: give tcp://HOST:PORT or a port (loopback)"
        )
    return host, int(port) or None
