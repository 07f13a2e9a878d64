"""python -m rollout.coordinator: a coordinator as the child of an AsyncLLM.

From a shell: rollout coordinator
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
        sys.exit("an AsyncLLM starts its coordinator so; from a shell: rollout coordinator")
    run_child(_serve_parent)
