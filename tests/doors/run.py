"""Run real clients against `rollout serve` on a tiny random model: `make test-doors`.

    python tests/doors/run.py [--record] [NAME ...]

NAME: of those in clients.py that are to run, all without any. Each has an environment and a server
of its own, or tests that run in its environment. --record: write their requests to
tests/serve/recorded, which `make test` replays.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path

from tests.doors.clients import CLIENTS, Client
from tests.doors.environments import ROOT, MissingPythonError, python_of
from tests.doors.recorder import recording
from tests.doors.server import serving
from tests.serve import chat_model

RUN_S = 1800


def main(arguments: list[str]) -> int:
    names = [each for each in arguments if each != "--record"] or list(CLIENTS)
    outcomes = {name: outcome_of(name, is_recorded="--record" in arguments) for name in names}
    print(*(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def outcome_of(name: str, *, is_recorded: bool) -> str:
    """Run one client: "passed", "skipped: ..." or "failed: ..."."""
    client = CLIENTS[name]
    try:
        python = python_of(name, client)
        if client.tests:
            subprocess.run(
                [python, "-m", "pytest", *client.tests], cwd=ROOT, check=True, timeout=RUN_S
            )
            return "passed"
        with ExitStack() as stack:
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-doors-"))
            settings = [f"model={chat_model.directory()}", "served_model_name=model"]
            settings.append("max_sequence_length=512")
            settings += [setting.format(root=root) for setting in client.server]
            url = stack.enter_context(serving(*settings))
            if is_recorded:
                url = stack.enter_context(recording(name, url, root))
            run(python, client, url, root)
    except MissingPythonError as error:
        return f"skipped: {error}"
    except (subprocess.SubprocessError, AssertionError) as error:
        traceback.print_exc()
        return f"failed: {error}"
    return "passed"


def run(python: str, client: Client, url: str, root: str) -> None:
    """Run the client's script to its end. Raises CalledProcessError, TimeoutExpired."""
    assert client.script is not None
    script = Path(__file__).parent / client.script
    # Its packages are those of its environment, not the tree's.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(script), url, chat_model.directory(), root]
    subprocess.run(command, env=environment, check=True, timeout=RUN_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
