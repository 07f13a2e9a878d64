"""Start a server on a tiny random model, and run the clients of trainers against it.

Arguments: the names of those that are to run, all without any. TRL runs in this environment; the
others live in .doors/NAME, as in run.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout import ServeConfig
from tests.apis.fleets import directory
from tests.doors.stub_vllm import write_stub
from tests.serve.served import served_directory

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
_TORCH = ["torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
# name -> what is installed for it (None: nothing), and its script
CLIENTS: dict[str, tuple[list[str] | None, str]] = {"trl": (None, "trl_trainer.py")}
INSTALL_S, RUN_S = 1200, 600


def main(names: list[str]) -> int:
    failed = []
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as stub:
        write_stub(Path(stub))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([stub, *sys.path])}
        config = ServeConfig(port=0, weight_transfer_backend="gloo", checkpoint_roots=(root,))
        server = served_directory(config)
        try:
            for name in names or CLIENTS:
                script = HERE / CLIENTS[name][1]
                command = [sys.executable, str(script), server.url, directory(), root]
                if subprocess.run(command, env=environment, timeout=RUN_S).returncode:
                    failed.append(name)
        finally:
            server.close()
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
