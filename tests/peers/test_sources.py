"""Which distribution of an index is taken, and what is unpacked of it."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.peers.sources import Source, SourceError, newest_source, unpack_tests


def _file(filename: str, **fields: object) -> dict[str, Any]:
    return {"filename": filename, "url": f"u/{filename}", "hashes": {"sha256": "0"}, **fields}


FILES = [
    _file("peer-3.9.0.tar.gz"),
    _file("peer-3.10.1.tar.gz"),
    _file("peer-3.11.0.tar.gz", yanked="broken"),
    _file("peer-3.12.0rc1.tar.gz"),
    _file("peer-3.13.0-py3-none-any.whl"),
    _file("peer-4.0.0.tar.gz"),
]


@pytest.mark.parametrize(
    ("version", "kind", "found"),
    [
        ("3.*", "sdist", "3.10.1"),
        ("4.*", "sdist", "4.0.0"),
        ("3.9.0", "sdist", "3.9.0"),
        ("3.*", "wheel", "3.13.0"),
    ],
)
def test_the_newest_release_of_a_version_is_taken(version: str, kind: str, found: str) -> None:
    assert newest_source(FILES, "peer", version, kind).version == found


def test_a_version_without_a_source_distribution_is_refused() -> None:
    with pytest.raises(SourceError, match=r"no sdist of peer==3\.13\.0"):
        newest_source(FILES, "peer", "3.13.0", "sdist")


NAMES = ("tests/a/test_a.py", "peer/tests/test_b.py", "setup.py")


def _source(archive: Path, sha256: str | None = None) -> Source:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive, "w") as wheel:
            for name in NAMES:
                wheel.writestr(name, "pass")
    else:
        with tarfile.open(archive, "w:gz") as sdist:
            for name in NAMES:
                member = tarfile.TarInfo(f"peer-1.0/{name}")
                member.size = 4
                sdist.addfile(member, io.BytesIO(b"pass"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Source(project="peer", version="1.0", url=archive.as_uri(), sha256=sha256 or digest)


@pytest.mark.parametrize("name", ["peer-1.0.tar.gz", "peer-1.0-py3-none-any.whl"])
@pytest.mark.parametrize(
    ("tests", "unpacked"), [("tests", "tests/a/test_a.py"), ("peer/tests", "tests/test_b.py")]
)
def test_only_the_tests_of_a_distribution_are_unpacked(
    tmp_path: Path, name: str, tests: str, unpacked: str
) -> None:
    folder = unpack_tests(_source(tmp_path / name), tests, tmp_path)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert files == {unpacked}


def test_a_file_with_another_hash_is_refused_and_asked_for_again(tmp_path: Path) -> None:
    archive = tmp_path / "peer-1.0.tar.gz"
    with pytest.raises(SourceError, match="SHA-256"):
        unpack_tests(_source(archive, sha256="0" * 64), "tests", tmp_path)
    folder = unpack_tests(_source(archive), "tests", tmp_path)
    assert (folder / NAMES[0]).exists()


def test_a_path_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "peer-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr("tests/../../../out.py", "pass")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    source = Source(project="peer", version="1.0", url=archive.as_uri(), sha256=digest)
    with pytest.raises(SourceError, match=r"out\.py"):
        unpack_tests(source, "tests", tmp_path / "home")
    assert not (tmp_path / "out.py").exists()
