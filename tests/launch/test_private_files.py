"""PrivateFolder: arguments of engines are read only from files that no other user can write."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.launch.private_files import PrivateFolder
from rollout.launch.slurm import run_job
from tests.unpickled_code import RunsCode


def test_private_folder_is_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = PrivateFolder(tmp_path / "a" / "b")
        name = folder.write("engine", b"arguments")
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / name).stat().st_mode & 0o777 == 0o600
    assert PrivateFolder(folder.path).read(name) == b"arguments"
    folder.remove(name)
    folder.remove(name)
    assert not list(folder.path.iterdir())
    with pytest.raises(ConfigError, match="all ranks and nodes must see the folder"):
        folder.read(name)


def give_away(path: Path) -> None:
    os.chmod(path, 0o666 if path.is_file() else 0o777)


def let_the_group_write(path: Path) -> None:
    os.chmod(path, 0o660 if path.is_file() else 0o770)


def replace_by_a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("change", [give_away, let_the_group_write, replace_by_a_link])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_private_folder_refuses_files_that_others_can_write(
    tmp_path: Path, what: str, change: Callable[[Path], None]
) -> None:
    folder = PrivateFolder(tmp_path / "own")
    name = folder.write("engine", b"arguments")
    change(folder.path if what == "folder" else folder.path / name)
    with pytest.raises(ConfigError, match=r"other users may|is not a folder|cannot be read"):
        folder.read(name)


def test_private_folder_refuses_files_that_others_can_read(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "own")
    name = folder.write("engine", b"arguments")
    (folder.path / name).chmod(0o644)
    with pytest.raises(ConfigError, match=r"may use .*mode 0644"):
        folder.read(name)


def test_private_folder_refuses_files_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PrivateFolder(tmp_path / "own")
    name = folder.write("engine", b"arguments")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for act in (lambda: folder.read(name), lambda: PrivateFolder(folder.path)):
        with pytest.raises(ConfigError, match=r"belongs to user \d+, not to this one \(12345\)"):
            act()


@pytest.mark.parametrize("name", ["../engine", "/etc/passwd", "engine", "", "engine-" + "g" * 32])
def test_private_folder_refuses_names_outside_of_it(tmp_path: Path, name: str) -> None:
    folder = PrivateFolder(tmp_path / "own")
    (tmp_path / "engine").write_bytes(b"")
    with pytest.raises(ConfigError, match="not the name of a file that a launcher has written"):
        folder.read(name)


def test_a_job_of_slurm_unpickles_nothing_that_others_could_have_written(tmp_path: Path) -> None:
    folder, trap = PrivateFolder(tmp_path / "own"), tmp_path / "trap"
    name = folder.write("arguments", pickle.dumps(RunsCode(trap)))
    given = ("no.such.module", "tcp://127.0.0.1:1", str(folder.path), name, str(tmp_path / "mark"))
    folder.path.chmod(0o777)
    fault = run_job(*given)
    assert fault is not None
    assert "other users may write" in fault["message"]
    assert not trap.exists()
    folder.path.chmod(0o700)
    run_job(*given)
    assert trap.exists(), "the trap works where the folder is the user's own"
