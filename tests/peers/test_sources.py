"""Which source distribution of an index is taken, and what is unpacked of it."""

from __future__ import annotations

import hashlib
import io
import tarfile
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
    ("version", "found"), [("3.*", "3.10.1"), ("4.*", "4.0.0"), ("3.9.0", "3.9.0")]
)
def test_the_newest_release_of_a_version_is_taken(version: str, found: str) -> None:
    assert newest_source(FILES, "peer", version).version == found


def test_a_version_without_a_source_distribution_is_refused() -> None:
    with pytest.raises(SourceError, match=r"peer==3\.13\.0"):
        newest_source(FILES, "peer", "3.13.0")


def _source(tmp_path: Path, sha256: str | None = None) -> Source:
    archive = tmp_path / "peer-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("peer-1.0/tests/test_a.py", "peer-1.0/peer/tests/b.py", "peer-1.0/setup.py"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"pass"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    url = archive.as_uri()
    return Source(project="peer", version="1.0", url=url, sha256=sha256 or digest)


def test_only_the_tests_of_a_source_distribution_are_unpacked(tmp_path: Path) -> None:
    folder = unpack_tests(_source(tmp_path), tmp_path)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert files == {"tests/test_a.py"}


def test_a_file_with_another_hash_is_refused_and_asked_for_again(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="SHA-256"):
        unpack_tests(_source(tmp_path, sha256="0" * 64), tmp_path)
    assert (unpack_tests(_source(tmp_path), tmp_path) / "tests" / "test_a.py").exists()
