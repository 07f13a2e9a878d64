"""Downloads source distributions from PyPI, and unpacks their tests without building anything."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

INDEX = "https://pypi.org/simple"
DOWNLOAD_S = 600


class SourceError(Exception):
    """A source distribution cannot be had as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source distribution: a file of an index."""

    project: str
    version: str
    url: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.project}-{self.version}"


def find_source(project: str, version: str) -> Source:
    """Look a source distribution up in the index. `version` is whole ("0.33.0"), or its first
    number and a star ("3.*") for the newest release of that number.

    Raises SourceError if there is none.
    """
    request = urllib.request.Request(
        f"{INDEX}/{project}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=DOWNLOAD_S) as answer:
        return newest_source(json.load(answer)["files"], project, version)


def newest_source(files: list[dict[str, Any]], project: str, version: str) -> Source:
    """The newest of an index's files that is a source distribution of `version`."""
    found: list[tuple[tuple[int, ...], Source]] = []
    for file in files:
        name = re.fullmatch(rf"{re.escape(project)}-(\d+(?:\.\d+)*)\.tar\.gz", file["filename"])
        if name is None or file.get("yanked"):
            continue
        numbers = name[1]
        if numbers == version or (version.endswith("*") and numbers.startswith(version[:-1])):
            source = Source(
                project=project,
                version=numbers,
                url=file["url"],
                sha256=file["hashes"]["sha256"],
            )
            found.append((tuple(map(int, numbers.split("."))), source))
    if not found:
        raise SourceError(f"the index has no source distribution {project}=={version}")
    return max(found, key=lambda each: each[0])[1]


def unpack_tests(source: Source, home: Path) -> Path:
    """Download `source`, and unpack its folder `tests` to a folder in `home`, which is returned.

    A folder that an earlier call has completed is kept. Raises SourceError if the file is not the
    one that the index names.
    """
    folder = home / source.name
    done = folder / ".complete"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder / "source.tar.gz"
    with urllib.request.urlopen(source.url, timeout=DOWNLOAD_S) as answer, archive.open("wb") as to:
        shutil.copyfileobj(answer, to)
    with archive.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if digest != source.sha256:
        raise SourceError(f"{source.url} has the SHA-256 {digest}, and not {source.sha256}")
    with tarfile.open(archive) as members:
        for member in members:
            path = PurePosixPath(member.name)
            if path.parts[1:2] == ("tests",) and member.isfile():
                member.name = str(PurePosixPath(*path.parts[1:]))
                members.extract(member, folder, filter="data")
    archive.unlink()
    done.touch()
    return folder
