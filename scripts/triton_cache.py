"""Move a Triton cache to another machine: pack it where kernels are compiled, install it there.

    python scripts/triton_cache.py install .gpu/triton FOLDER

Run programs with TRITON_CACHE_DIR=FOLDER afterwards. An entry of the cache is the folder of one
compiled kernel. Triton lists an entry's files by their absolute paths. A packed cache lists them by
name, and has only the files that a launch reads. Used by `scripts.gpu_bundle`, which packs, and
`scripts.gpu_check`, which installs. Needs only the standard library.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

GROUP = "__grp__"  # start of the name of a file that lists the files of a kernel
CHILDREN = "child_paths"  # key of that list
# Machine code, its description, and modules that launch kernels. A launch reads nothing else.
KEPT_SUFFIXES = (".cubin", ".json", ".so")


def pack(cache: Path, folder: Path, keys: Collection[str]) -> int:
    """Make `folder` the packed cache of exactly the entries `keys` of `cache`.

    Returns the number of copied entries. Entries that `folder` already has are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.name not in keys:
            shutil.rmtree(entry)
    new = sorted(set(keys) - entries(folder))
    for key in new:
        _copy_entry(cache / key, folder / key, by_name=True)
    return len(new)


def install(folder: Path, cache: Path) -> int:
    """Copy the packed entries that `cache` lacks into it, for use there. Returns their number."""
    cache.mkdir(parents=True, exist_ok=True)
    new = sorted(entries(folder) - entries(cache))
    for key in new:
        _copy_entry(folder / key, cache / key, by_name=False)
    return len(new)


def entries(cache: Path) -> set[str]:
    """Return the keys of a cache's entries, packed or not. Empty if the folder does not exist."""
    return {path.name for path in cache.iterdir() if path.is_dir()} if cache.is_dir() else set()


def num_kernels(cache: Path) -> int:
    """Return the number of compiled kernels in a cache, packed or not."""
    return sum(1 for _ in cache.glob("*/*.cubin"))


def _copy_entry(source: Path, target: Path, *, by_name: bool) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        if path.name.startswith(GROUP):
            children = json.loads(path.read_text(encoding="utf-8"))[CHILDREN]
            kept = [name for name in children if name.endswith(KEPT_SUFFIXES)]
            listed = {name: name if by_name else str(target.resolve() / name) for name in kept}
            (target / path.name).write_text(json.dumps({CHILDREN: listed}), encoding="utf-8")
        elif path.name.endswith(KEPT_SUFFIXES):
            shutil.copyfile(path, target / path.name)


def main(arguments: list[str]) -> int:
    """Install a packed cache. Returns the exit status: 0, or 2 after a message."""
    if len(arguments) != 3 or arguments[0] != "install":
        print("usage: triton_cache.py install PACKED_FOLDER CACHE_FOLDER", file=sys.stderr)
        return 2
    source, target = map(Path, arguments[1:])
    if not source.is_dir():
        print(f"error: {source} is not a folder: `make gpu-bundle` makes it", file=sys.stderr)
        return 2
    num_new = install(source, target)
    print(f"{target}: {num_new} entries installed, {num_kernels(target)} kernels in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
