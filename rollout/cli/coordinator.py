"""rollout coordinator: runs a coordinator, which distributes clients' requests to engines.

`rollout.cli.main` calls `run`, which runs the coordinator in this process. Engines join by `rollout
engine`, clients by AsyncLLM.connect. `run` sets SIGINT and SIGTERM handlers and logging.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Sequence
from typing import Any

from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, read_settings
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.key_folder import coordinator_keys
from rollout.wire import DEFAULT_MAX_FRAME_BYTES

_LIMITS: Kinds = fields_of(CoordinatorLimits)
_KINDS: Kinds = {
    "data_parallel_size": int,
    "advertise_host": str | None,
    "insecure": bool,
    "deterministic_mode": bool,
    "block_size_tokens": int | None,
    "enable_prefix_caching": bool,
    "prefix_caching_coordinator_policy": str,
    "policy_options": dict[str, Any],
    "schedule_output_path": str | None,
    "max_frame_bytes": int,
}


def run(words: Sequence[str]) -> int:
    """Print the address and serve until a client sends SHUTDOWN, or until SIGTERM or Ctrl-C.
    Returns 0. words: the command's arguments. Raises UsageError for wrong arguments."""
    parser = Parser(
        "coordinator",
        "Distribute the requests of clients to engines, until a client shuts the fleet down.\n"
        "Both join by the printed address. Off loopback it needs keys: see `rollout keys`.",
    )
    parser.epilog = (
        "settings:\n"
        "  data_parallel_size=1     expected engines; more may join\n"
        "  advertise_host=NAME      host for clients and engines, with --listen tcp://0.0.0.0:5555\n"
        "  insecure=true            no keys off loopback; for closed networks alone\n"
        "  enable_prefix_caching=true, block_size_tokens=N\n"
        "                           route prompts by their prefixes, in blocks of N tokens\n"
        "  prefix_caching_coordinator_policy=NAME, policy_options=JSON\n"
        "                           the routing policy (load_balanced) and its arguments\n"
        "  deterministic_mode=true  no work before all engines have joined; ranks by their ids\n"
        "  schedule_output_path=FILE\n"
        "                           write the routing decisions to FILE\n"
        f"  max_frame_bytes={DEFAULT_MAX_FRAME_BYTES}\n"
        "                           longest message that is sent or accepted\n"
        "  and every field of CoordinatorLimits, such as orphan_deadline_s=600\n"
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="tcp://HOST:PORT or a port (loopback); if absent, a socket of this user",
    )
    parser.add_argument("--keys", metavar="DIR", help="folder made by `rollout keys`")
    given = parser.parse(words)
    options, limits = read_settings(given.settings, _KINDS, _LIMITS)
    host, port = (None, None) if given.listen is None else address_of(given.listen)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
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
