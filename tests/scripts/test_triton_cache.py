"""A packed Triton cache is small, says nothing of where it was made, and works where it is put."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts.triton_cache import entries, install, main, num_kernels, pack

NAMES = ("add.cubin", "add.json")


def put_kernel(cache: Path, key: str) -> None:
    """An entry as Triton leaves it, with representations that no launch reads."""
    folder = cache / key
    folder.mkdir(parents=True)
    files = [*NAMES, "add.ttir", "add.source"]
    for name in files:
        (folder / name).write_text(f"{key} {name}")
    listed = {name: str(folder / name) for name in files}
    (folder / "__grp__add.json").write_text(json.dumps({"child_paths": listed}))


def put_launcher(cache: Path, key: str) -> None:
    (cache / key).mkdir(parents=True)
    (cache / key / "launcher.so").write_text(key)


def files_that_triton_reads(cache: Path, key: str) -> dict[str, str]:
    """By the list of a kernel's files, as Triton's cache manager does."""
    listed = json.loads((cache / key / "__grp__add.json").read_text())["child_paths"]
    return {name: Path(path).read_text() for name, path in listed.items()}


def test_what_was_packed_is_read_where_it_is_installed_when_its_origin_is_gone(
    tmp_path: Path,
) -> None:
    made, packed, installed = (tmp_path / name for name in ("made", "packed", "installed"))
    put_kernel(made, "A")
    put_launcher(made, "B")
    assert pack(made, packed, {"A", "B"}) == 2
    shutil.rmtree(made)
    assert str(tmp_path) not in (packed / "A" / "__grp__add.json").read_text()
    assert install(packed, installed) == 2
    shutil.rmtree(packed)
    assert files_that_triton_reads(installed, "A") == {name: f"A {name}" for name in NAMES}
    assert (installed / "B" / "launcher.so").read_text() == "B"
    assert {path.name for path in (installed / "A").iterdir()} == {*NAMES, "__grp__add.json"}


def test_pack_adds_what_is_new_and_removes_what_is_no_longer_used(tmp_path: Path) -> None:
    made, packed = tmp_path / "made", tmp_path / "packed"
    for key in "ABC":
        put_kernel(made, key)
    assert pack(made, packed, {"A", "B"}) == 2
    assert pack(made, packed, {"A", "C"}) == 1
    assert entries(packed) == {"A", "C"}
    assert num_kernels(packed) == 2
    assert pack(made, packed, {"A", "C"}) == 0


def test_an_installed_cache_packs_to_the_same_bytes(tmp_path: Path) -> None:
    made, *packed, installed = (tmp_path / name for name in ("made", "first", "second", "there"))
    put_kernel(made, "A")
    pack(made, packed[0], {"A"})
    install(packed[0], installed)
    pack(installed, packed[1], {"A"})
    first, second = ({p.name: p.read_bytes() for p in (f / "A").iterdir()} for f in packed)
    assert first == second


def test_install_leaves_what_is_there(tmp_path: Path) -> None:
    packed, cache = tmp_path / "packed", tmp_path / "cache"
    put_launcher(packed, "A")
    put_launcher(packed, "B")
    install(packed, cache)
    (cache / "A" / "launcher.so").write_text("compiled here")
    put_launcher(cache, "C")
    assert install(packed, cache) == 0
    assert (cache / "A" / "launcher.so").read_text() == "compiled here"
    assert entries(cache) == {"A", "B", "C"}


def test_the_command_names_what_it_installed_or_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_kernel(tmp_path / "packed", "A")
    folders = [str(tmp_path / name) for name in ("packed", "cache")]
    assert main(["install", *folders]) == 0
    assert "1 entries installed, 1 kernels in all" in capsys.readouterr().out
    assert main(["install", str(tmp_path / "none"), folders[1]]) == 2
    assert "make gpu-bundle" in capsys.readouterr().err
    assert main(["remove"]) == 2
