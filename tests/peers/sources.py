"""Downloads distributions from PyPI, and unpacks their tests without building anything."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

INDEX = "https://pypi.org/simple"
DOWNLOAD_S = 600


class SourceError(Exception):
    """A distribution cannot be had as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A distribution: a file of an index."""

    project: str
    version: str
    url: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.project}-{self.version}"


def find_source(project: str, version: str, kind: str) -> Source:
    """Look a distribution up in the index.

    version: whole ("0.33.0"), or its first number and a star ("3.*") for the newest release of that
    number. kind: "sdist", or "wheel" for any of them: they have the same Python files.
    Raises SourceError if there is none.
    """
    request = urllib.request.Request(
        f"{INDEX}/{project}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=DOWNLOAD_S) as answer:
        return newest_source(json.load(answer)["files"], project, version, kind)


def newest_source(files: list[dict[str, Any]], project: str, version: str, kind: str) -> Source:
    """The newest of an index's files that is a distribution of `version`."""
    ending = {"sdist": r"\.tar\.gz", "wheel": r"-.+\.whl"}[kind]
    found: list[tuple[tuple[int, ...], str, Source]] = []
    for file in files:
        name = re.fullmatch(rf"{re.escape(project)}-(\d+(?:\.\d+)*){ending}", file["filename"])
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
            found.append((tuple(map(int, numbers.split("."))), file["filename"], source))
    if not found:
        raise SourceError(f"the index has no {kind} of {project}=={version}")
    return max(found, key=lambda each: each[:2])[2]


def unpack_tests(source: Source, tests: str, home: Path) -> Path:
    """Download `source`, and unpack its files below `tests` to `home/NAME/tests`.

    tests: a path in the distribution; a source distribution's begins below its one folder.
    Returns `home/NAME`. One that an earlier call has completed is kept. Raises SourceError if the
    file is not the one that the index names.
    """
    folder = home / source.name
    done = folder / ".complete"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder / PurePosixPath(source.url).name
    with urllib.request.urlopen(source.url, timeout=DOWNLOAD_S) as answer, archive.open("wb") as to:
        shutil.copyfileobj(answer, to)
    with archive.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if digest != source.sha256:
        raise SourceError(f"{source.url} has the SHA-256 {digest}, and not {source.sha256}")
    for name, content in _files(archive):
        if name.is_relative_to(tests):
            path = folder / "tests" / name.relative_to(tests)
            if not path.resolve().is_relative_to(folder.resolve()):
                raise SourceError(f"{source.url} has the path {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    archive.unlink()
    done.touch()
    return folder


def _files(archive: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The files of a wheel, or of a source distribution without the name of its one folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield PurePosixPath(name), wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in source:
            file = source.extractfile(member)
            if file is not None:
                yield PurePosixPath(*PurePosixPath(member.name).parts[1:]), file.read()
