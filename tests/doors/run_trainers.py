"""Start a server on a tiny random model, and run the clients of trainers against it.

Arguments: the names of those that are to run, all without any. TRL runs in this environment; the
others live in .doors/NAME, as in run.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from rollout import ServeConfig
from tests.apis.fleets import directory
from tests.doors.stub_vllm import write_stub
from tests.serve.served import served_directory

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
# What AReaL's clients import; all that it names as required does not install beside each other.
_AREAL = [
    "colorlog",
    "pybase64",
    "ray==2.57.0",
    "torchdata",
    "tenacity",
    "flask",
    "lark",
    "numba",
    "orjson",
    "einops",
    "aiofiles",
    "openai",
    "fastapi",
    "uvicorn",
    "pebble",
    "prettytable",
    "python-dotenv",
    "tensorboardx",
    "anthropic",
    "swanlab",
    "trackio",
    "math-verify",
]
# name -> what is installed for it beside what this environment has, without the requirements of
# the last one; and its script
CLIENTS: dict[str, tuple[list[str], str]] = {
    "trl": ([], "trl_trainer.py"),
    "areal": ([*_AREAL, "areal==1.0.4"], "areal_trainer.py"),
}
INSTALL_S, RUN_S = 1200, 600


def python_of(name: str) -> str:
    """The interpreter of a client's environment, on top of this one."""
    required, _ = CLIENTS[name]
    if not required:
        return sys.executable
    home = ROOT / ".doors" / name
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        (own,) = home.glob("lib/python*/site-packages")
        (own / "outer.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, *required[:-1]], check=True, timeout=INSTALL_S)
        subprocess.run([*pip, "--no-deps", required[-1]], check=True, timeout=INSTALL_S)
        (home / "installed").touch()
    return str(python)


def main(names: list[str]) -> int:
    failed = []
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as stub:
        write_stub(Path(stub))
        environment = {n: text for n, text in os.environ.items() if n != "PYTHONPATH"}
        config = ServeConfig(port=0, weight_transfer_backend="gloo", checkpoint_roots=(root,))
        server = served_directory(config)
        try:
            for name in names or CLIENTS:
                script = HERE / CLIENTS[name][1]
                command = [python_of(name), str(script), server.url, directory(), root]
                path = {"PYTHONPATH": stub} if name == "trl" else {}
                if subprocess.run(command, env=environment | path, timeout=RUN_S).returncode:
                    failed.append(name)
        finally:
            server.close()
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
