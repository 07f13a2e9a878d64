"""A folder with the keys of a fleet: the coordinator's pair, its allow-list, a folder per peer.

    DIR/coordinator.key_secret, DIR/coordinator.key    stay with the coordinator
    DIR/allowed/NAME.key                               allow-list: a peer without a file is refused
    DIR/NAME/own.key_secret, own.key, coordinator.key  all that the hosts of the peer NAME need

Whoever has a peer's folder can connect as that peer: protect it like a password. Used by the
commands `rollout keys`, `coordinator`, `engine` and `top`, and by users' programs.
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
    """Make the folder, for its owner only, with a pair of keys for each of `peers`.

    In an existing folder the coordinator's pair stays, and the peers are added. Raises ConfigError
    for a peer that has keys already or whose name cannot be a folder's, before it writes anything,
    and if a file cannot be written.
    """
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
    """Return the coordinator's keys in a folder that `create_key_folder` made. Raises ConfigError
    if they cannot be read."""
    root = Path(folder).resolve()
    return server_keys_in(root / f"{_COORDINATOR}.key_secret", (), root / _ALLOWED)


def peer_keys(folder: str | Path, peer: str) -> CurveKeys:
    """Return the keys of `peer`. `folder`: the whole folder, or a copy of that peer's own folder
    under any name. Raises ConfigError, with the names of the peers that it has, if it has no such
    keys."""
    root = Path(folder)
    own = root if (root / f"{_OWN}.key_secret").exists() else root / peer
    if not (own / f"{_OWN}.key_secret").exists():
        there = sorted(path.parent.name for path in root.glob(f"*/{_OWN}.key_secret"))
        raise ConfigError(
            f"{str(root)!r} has no keys of {peer!r}, only of: {', '.join(there) or 'nobody'}. "
            f"`rollout keys {root} {peer}` makes them on the coordinator's machine"
        )
    return client_keys_in(own / f"{_OWN}.key_secret", own / f"{_COORDINATOR}.key")
