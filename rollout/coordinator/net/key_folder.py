"""A folder with the CURVE keys of a fleet: create it, and read a coordinator's or a peer's keys.

    DIR/coordinator.key_secret, DIR/coordinator.key    stay with the coordinator
    DIR/allowed/NAME.key                               allow-list: a peer without a file is refused
    DIR/NAME/own.key_secret, own.key, coordinator.key  all that the hosts of the peer NAME need

Used by `rollout.cli.keys`, `rollout.cli.coordinator`, `rollout.cli.engine`, `rollout.cli.top` and
users' programs. Whoever has a peer's folder can connect as that peer: protect it like a password.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rollout.coordinator.net.security import (
    CurveKeys,
    CurveServerKeys,
    client_keys_in,
    create_key_files,
    server_keys_in,
)
from rollout.errors import ConfigError

ENGINE, CLIENT = "engine", "client"
_COORDINATOR, _OWN, _ALLOWED = "coordinator", "own", "allowed"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def create_key_folder(folder: str | Path, peers: Sequence[str] = (ENGINE, CLIENT)) -> None:
    """Create a folder, for its owner only, with a key pair for the coordinator and for each of
    `peers`.

    An existing folder keeps its coordinator's pair and its peers. Raises ConfigError before
    anything is written if a peer has keys already, or if a peer's name cannot be the name of a
    folder. Raises ConfigError if a file cannot be written."""
    root = Path(folder)
    for peer in peers:
        if not _NAME.fullmatch(peer) or peer in (_COORDINATOR, _ALLOWED):
            raise ConfigError(
                f"a peer cannot be called {peer!r}: use letters, digits and ._-, and neither "
                f"{_COORDINATOR!r} nor {_ALLOWED!r}"
            )
        if (root / peer).exists() or (root / _ALLOWED / f"{peer}.key").exists():
            raise ConfigError(f"{peer!r} has keys in {str(root)!r}; remove them or use a new name")
    try:
        (root / _ALLOWED).mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        if not (root / f"{_COORDINATOR}.key").exists():
            create_key_files(root, _COORDINATOR)
        for peer in peers:
            own = root / peer
            own.mkdir(mode=0o700)
            create_key_files(own, _OWN)
            shutil.copy(root / f"{_COORDINATOR}.key", own)
            # Last and atomic: the coordinator may be reading the folder.
            unseen = root / _ALLOWED / f".{peer}"
            shutil.copy(own / f"{_OWN}.key", unseen)
            os.replace(unseen, root / _ALLOWED / f"{peer}.key")
    except OSError as fault:
        raise ConfigError(f"the keys in {str(root)!r} cannot be made: {fault}") from fault


def coordinator_keys(folder: str | Path) -> CurveServerKeys:
    """Return the coordinator's keys in a folder of `create_key_folder`. Raises ConfigError if they
    cannot be read."""
    root = Path(folder).resolve()
    return server_keys_in(root / f"{_COORDINATOR}.key_secret", (), root / _ALLOWED)


def peer_keys(folder: str | Path, peer: str) -> CurveKeys:
    """Return the keys of the peer named `peer`. `folder` is a folder of `create_key_folder`, or a
    copy of the peer's own folder under any name. Raises ConfigError if the folder has no keys of
    `peer`. The error names the peers that it has."""
    root = Path(folder)
    own = root if (root / f"{_OWN}.key_secret").exists() else root / peer
    if not (own / f"{_OWN}.key_secret").exists():
        there = sorted(path.parent.name for path in root.glob(f"*/{_OWN}.key_secret"))
        raise ConfigError(
            f"{str(root)!r} has no keys of {peer!r}, only of: {', '.join(there) or 'nobody'}. "
            f"`rollout keys {root} {peer}` makes them on the coordinator's machine"
        )
    return client_keys_in(own / f"{_OWN}.key_secret", own / f"{_COORDINATOR}.key")
