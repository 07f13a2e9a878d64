"""`python -m rollout.coordinator --child`: runs a coordinator as the child process of an AsyncLLM.

Started by `rollout.apis.fleet_processes`. People start a coordinator with `rollout coordinator`. It
opens the coordinator's socket, and reads its arguments from the parent's pipe.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from rollout.child_process import CHILD_FLAG, run_child
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator


def _serve_parent(pipe: Connection, arguments: dict[str, Any]) -> None:
    DataParallelInferenceCoordinator.entrypoint(
        pipe, threading.Event(), tokenizer=None, **arguments
    )


if __name__ == "__main__":
    if CHILD_FLAG not in sys.argv:
        sys.exit("only an AsyncLLM starts this module; from a shell, run: rollout coordinator")
    run_child(_serve_parent)
