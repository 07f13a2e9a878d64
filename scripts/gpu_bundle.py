"""Fill .gpu/ with the wheels that a CUDA machine without network lacks: `make gpu-bundle`.

That machine has Python 3.12 on x86-64 Linux, torch, Triton, transformers and the usual tools. The
versions are those of constraints.txt. A second call downloads nothing that is there already.
Needs the standard library, pip, and a package index that pip is configured for.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu"
LIMIT_BYTES = 64 << 20  # what travels to such a machine

PACKAGES = (
    "antlr4-python3-runtime",
    "hydra-core",
    "msgspec",
    "omegaconf",
    "pytest-timeout",
    "pyzmq",
    "torch-memory-saver",
    # With transformers of another series these might be missing, too.
    "markdown-it-py",
    "mdurl",
    "pygments",
    "rich",
)
SOURCE_ONLY = ("antlr4-python3-runtime",)  # no wheel on PyPI: it is built here

PYTHON = (3, 12)
# The oldest and the newest system that any of the wheels is made for; 2_28 is from 2018.
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 29)))


class Wheel(NamedTuple):
    """The parts of a wheel's file name. Source: PyPA, binary distribution format."""

    name: str
    version: str
    python: frozenset[str]
    abi: frozenset[str]
    platform: frozenset[str]


def parse_wheel(file_name: str) -> Wheel:
    """Raises ValueError if it is no wheel's name."""
    parts = file_name.removesuffix(".whl").split("-")
    if not file_name.endswith(".whl") or len(parts) not in (5, 6):
        raise ValueError(f"{file_name!r} is not the name of a wheel")
    python, abi, platform = (frozenset(part.split(".")) for part in parts[-3:])
    return Wheel(normalised(parts[0]), parts[1], python, abi, platform)


def runs_there(wheel: Wheel) -> bool:
    """Whether the wheel can be installed on the machine that the bundle is for."""
    if not wheel.platform & {"any", *PLATFORMS}:
        return False
    major, minor = PYTHON
    if "none" in wheel.abi:
        return bool(wheel.python & {f"py{major}", f"cp{major}{minor}", f"py{major}{minor}"})
    if f"cp{major}{minor}" in wheel.abi:
        return f"cp{major}{minor}" in wheel.python
    older = {f"cp{major}{number}" for number in range(2, minor + 1)}
    return "abi3" in wheel.abi and bool(wheel.python & older)


def normalised(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_versions(constraints: str) -> dict[str, str]:
    """name -> version of every `name==version` line; what follows a `;` is left out."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in constraints.splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {normalised(name): version for name, version in pairs}


def requirements(constraints: str) -> dict[str, str]:
    """name -> version of all that the bundle holds. Raises ValueError for one without a pin."""
    pinned = pinned_versions(constraints)
    missing = [name for name in PACKAGES if name not in pinned]
    if missing:
        raise ValueError(f"constraints.txt pins no version of {', '.join(missing)}")
    return {name: pinned[name] for name in PACKAGES}


class Plan(NamedTuple):
    """What turns the folder's wheels into the bundle."""

    keep: list[str]
    remove: list[str]
    fetch: dict[str, str]


def make_plan(wanted: dict[str, str], file_names: Iterable[str]) -> Plan:
    """Keep one wheel that fits for each requirement, remove all others, fetch what is missing."""
    plan = Plan([], [], dict(wanted))
    for file_name in sorted(file_names):
        wheel = parse_wheel(file_name)
        if plan.fetch.get(wheel.name) == wheel.version and runs_there(wheel):
            del plan.fetch[wheel.name]
            plan.keep.append(file_name)
        else:
            plan.remove.append(file_name)
    return plan


def fetch_command(name: str, version: str, folder: Path) -> list[str]:
    """The pip call that puts the wheel into `folder`."""
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    if name in SOURCE_ONLY:
        return [*pip, "wheel", *quiet, "--wheel-dir", str(folder), f"{name}=={version}"]
    target = ["--only-binary=:all:", "--implementation=cp"]
    target += [f"--python-version={PYTHON[0]}.{PYTHON[1]}"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    return [*pip, "download", *quiet, *target, "--dest", str(folder), f"{name}=={version}"]


def table(folder: Path) -> str:
    """A line per wheel and the sum, in KiB."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.whl"))}
    rows = [f"{size / 1024:8.0f} KiB  {name}" for name, size in sizes.items()]
    return "\n".join([*rows, f"{sum(sizes.values()) / 1024:8.0f} KiB  in {folder}"])


def wheel_names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.whl")]


def main() -> int:
    """Returns the exit status: 1, after a line that says why, if the bundle is not complete."""
    FOLDER.mkdir(exist_ok=True)
    wanted = requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    plan = make_plan(wanted, wheel_names(FOLDER))
    for file_name in plan.remove:
        (FOLDER / file_name).unlink()
    for name, version in plan.fetch.items():
        print(f"fetching {name} {version}", flush=True)
        if subprocess.run(fetch_command(name, version, FOLDER)).returncode != 0:
            print(f"error: pip could not fetch {name}=={version}", file=sys.stderr)
            return 1
    missing = make_plan(wanted, wheel_names(FOLDER)).fetch
    if missing:
        print(f"error: what pip fetched does not fit: {', '.join(missing)}", file=sys.stderr)
        return 1
    print(table(FOLDER))
    num_bytes = sum(path.stat().st_size for path in FOLDER.iterdir())
    if num_bytes > LIMIT_BYTES:
        print(f"error: {num_bytes} bytes are more than {LIMIT_BYTES}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
