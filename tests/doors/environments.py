"""Makes the virtual environment of a client, in FOLDER/NAME, at its first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from tests.doors.clients import Client

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 2400


class MissingPythonError(Exception):
    """There is no interpreter of the version that a client needs."""


def python_of(name: str, client: Client, folder: str = ".doors") -> str:
    """The interpreter of a client's environment. Raises MissingPythonError, CalledProcessError."""
    if client.is_layered and not client.requirements:
        return sys.executable
    home = ROOT / folder / name
    python, stamp = home / "bin" / "python", home / "installed"
    wanted = "\n".join([*client.requirements, *client.alone])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return str(python)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([_interpreter(client.python), "-m", "venv", str(home)], check=True)
    if client.is_layered:
        (own,) = home.glob("lib/python*/site-packages")
        (own / "outer.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    # The newest torch may bring gigabytes for a GPU.
    constraints = home / "constraints.txt"
    constraints.write_text(f"torch=={version('torch').partition('+')[0]}\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "-qq", "--no-cache-dir", "--no-compile"]
    pip += ["-c", str(constraints)]
    subprocess.run([*pip, *client.requirements], check=True, timeout=INSTALL_S)
    for package in client.alone:
        place = ["-e", str(ROOT)] if package == "." else [package]
        subprocess.run([*pip, "--no-deps", *place], check=True, timeout=INSTALL_S)
    stamp.write_text(wanted, encoding="utf-8")
    return str(python)


def _interpreter(wanted: str | None) -> str:
    """The path of Python `wanted`, as on the path or in pyenv; None: this one."""
    if wanted is None:
        return sys.executable
    in_pyenv = Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python")
    for place in filter(None, [shutil.which(f"python{wanted}"), *in_pyenv]):
        command = [str(place), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        # A shim of pyenv is there for versions that it does not run.
        if subprocess.run(command, capture_output=True, text=True).stdout.strip() == wanted:
            return str(place)
    raise MissingPythonError(f"needs Python {wanted}, which was not found")
