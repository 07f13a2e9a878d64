"""Run real clients against `rollout serve` on a tiny random model: `make test-doors`.

    python tests/doors/run.py [--record] [NAME ...]

NAME: of those in clients.py that are to run, all without any. Each has an environment and a server
of its own, or tests that run in its environment. --record: write their requests to
tests/serve/recorded, which `make test` replays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.doors.clients import CLIENTS, Client
from tests.doors.environments import ROOT, MissingPythonError, python_of
from tests.doors.recorder import recording
from tests.serve import chat_model

RUN_S, EXIT_S = 1800, 60


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
            url = stack.enter_context(serving(client, root))
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


@contextmanager
def serving(client: Client, root: str) -> Iterator[str]:
    """A server for one client; yields its URL. It must end with status 0."""
    fields = [field.format(root=root) for field in client.server]
    command = [sys.executable, "-m", "rollout", "serve", "--json"]
    command += [f"model={chat_model.directory()}", "port=0", "served_model_name=model"]
    command += ["num_threads=1", "max_sequence_length=512", *fields]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line, "the server did not start"
        yield json.loads(line)["url"]
    finally:
        server.terminate()
        status = server.wait(EXIT_S)
    assert status == 0, f"the server exited with {status}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
