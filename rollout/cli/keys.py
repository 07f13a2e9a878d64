"""rollout keys: makes the CURVE keys of a fleet over several hosts.

`rollout.cli.main` calls `run`, which writes the keys to files in the given folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rollout.cli.settings import Parser, UsageError
from rollout.coordinator.net.key_folder import CLIENT, ENGINE, create_key_folder


def run(words: Sequence[str]) -> int:
    """Make the keys and print their folders. Returns 0. `words` are the command's arguments. Raises
    UsageError without a folder, and ConfigError if the keys cannot be made."""
    parser = Parser(
        "keys",
        "Make the keys of a fleet: rollout keys DIR [NAME ...]. DIR is for the coordinator;\n"
        f"DIR/NAME goes to the hosts of the peer NAME ({ENGINE} and {CLIENT}, if none is named).\n"
        "A second call adds peers, which a running coordinator accepts. A peer whose file is\n"
        "removed from DIR/allowed is refused when it connects again.",
    )
    given = parser.parse(words)
    if not given.settings:
        raise UsageError("give a folder for the keys: rollout keys DIR")
    folder, *names = given.settings
    peers = names or [ENGINE, CLIENT]
    create_key_folder(folder, peers)
    made = {peer: str(Path(folder, peer)) for peer in peers}
    if given.json:
        print(json.dumps({"coordinator": folder, "peers": made}))
        return 0
    print(f"coordinator: --keys {folder}")
    for peer, path in made.items():
        print(f"{peer}: copy {path} to its hosts, for --keys")
    return 0
