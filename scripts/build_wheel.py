"""Build the wheel with compiled CPU kernels: `make wheel`, or python -m scripts.build_wheel FOLDER.

One wheel serves all versions of Python and torch, and all x86-64 processors. The wheel has a
library of kernels for each of `library.TARGETS`, and the sources, which are compiled at first use
if no library fits. Needs x86-64 Linux and GCC 11 or Clang 12, or a later version.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel

from rollout.backends.cpu.library import FOLDER, build_bundled

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = ("rollout", "rollout_verl", "trainer_hooks", "conf")
FILES = ("pyproject.toml", "README.md", "LICENSE")
_OLDEST_GLIBC = 17  # of glibc 2.17, the oldest that manylinux names


class PlatformDistribution(setuptools.Distribution):
    """A distribution with files for one platform, although setuptools builds none of them."""

    def has_ext_modules(self) -> bool:
        return True


def main() -> None:
    """Build the wheel into the folder on the command line, and print its path and size."""
    wheel = build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve())
    print(f"{wheel}  {wheel.stat().st_size:,} bytes")


def build(target: Path) -> Path:
    """Build the wheel of this tree in the folder `target`. Returns its path.

    The tree itself is not changed. Raises SystemExit on another platform, without a compiler, or if
    the compiler refuses a target.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SystemExit("the wheel has kernels for x86-64 Linux: build it there")
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("no C compiler found: install gcc, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_sources(tree)
        try:
            libraries = [*build_bundled(tree / FOLDER.relative_to(ROOT), compiler)]
        except subprocess.CalledProcessError as error:
            needed = "GCC 11 or Clang 12 is needed"
            raise SystemExit(f"{compiler} failed; {needed}\n{error.stderr}") from error
        return _build_wheel(tree, platform_tag(libraries), target)


def copy_sources(tree: Path) -> None:
    """Copy the files from which a wheel is built into the folder `tree`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in PACKAGED:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tree)


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return the manylinux tag (PEP 600) of the newest glibc whose symbols a library uses."""
    found = {
        int(n) for path in libraries for n in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())
    }
    return f"manylinux_2_{max(found | {_OLDEST_GLIBC})}_x86_64"


def _build_wheel(tree: Path, tag: str, target: Path) -> Path:
    class TaggedWheel(bdist_wheel):
        # ctypes loads the kernels, so any version of Python 3 will do.
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", tag

    before = Path.cwd()
    os.chdir(tree)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "setup.py install is deprecated")
            setuptools.setup(
                script_args=["--quiet", "bdist_wheel", "--dist-dir", "dist"],
                distclass=PlatformDistribution,
                cmdclass={"bdist_wheel": TaggedWheel},
            )
    finally:
        os.chdir(before)
    (wheel,) = (tree / "dist").iterdir()
    target.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, target))


if __name__ == "__main__":
    main()
