"""An engine that follows the commands of the address it connects to. It does not import torch.

`python -m tests.launch.scripted_engine --child` is one, as a child of a LocalLauncher.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from rollout.child_process import run_child
from rollout.errors import ConfigError


class Words(list[str]):
    """A list that can be watched for its end."""


def run_engine(
    address: str, *, authkey: bytes, words: Words, on_registered: Callable[[], object]
) -> None:
    """Send the process id and the arguments, then follow commands: "register", "fail", "end"."""
    host, _, port = address.rpartition(":")
    with Client((host, int(port)), authkey=authkey) as line:
        line.send((os.getpid(), words))
        while (order := line.recv()) != "end":
            if order == "register":
                on_registered()
                line.send("registered")
            elif order == "refuse":
                raise ConfigError("no such model")
            else:
                raise ZeroDivisionError(order)


def _serve_parent(pipe: Connection, address: str, arguments: dict[str, Any]) -> None:
    run_engine(address, **arguments, on_registered=lambda: pipe.send("registered"))


if __name__ == "__main__":
    run_child(_serve_parent)
