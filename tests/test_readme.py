"""README.md and the pages of docs/: their lengths, and links, extras and targets that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def test_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def prose_of(page: Path) -> Iterator[str]:
    """Yield the paragraphs and list items of a page, each as one line."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\||#)", text):
        if not part.startswith("|"):
            yield " ".join(part.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paragraphs_and_list_items_are_short(page: Path) -> None:
    if page.name == "http-fields.md":
        pytest.skip("lists of names, which a script writes")
    assert [part for part in prose_of(page) if len(part) > 600] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_nothing_tells_to_install_this_package_from_an_index_where_it_is_not_ours() -> None:
    folders = ("rollout", "rollout_verl", "trainer_hooks", "examples", "benchmarks", "scripts")
    files = [path for folder in (*folders, "conf", "docs") for path in (ROOT / folder).rglob("*")]
    files += [README, ROOT / "Makefile"]
    texts = [path for path in files if path.suffix in (".py", ".md", ".yaml", ".sh", ".txt", "")]
    assert len(texts) > 300
    for path in texts:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"pip install[^\n]*rollout-engine", text), path
            assert "rollout-engine[" not in text, path


def test_extras_that_are_named_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([a-z0-9]+) = \[", table, flags=re.MULTILINE))
    sources = [*ROOT.glob("*.txt"), *PAGES, *(ROOT / ".github").rglob("*.yml")]
    for package in ("rollout", "trainer_hooks", "examples", "benchmarks", "scripts"):
        sources += (ROOT / package).rglob("*.py")
    named = {
        (path.name, extra)
        for path in sources
        for group in re.findall(
            r"(?:rollout-engine|'\.)\[([a-z0-9,]+)\]", path.read_text(encoding="utf-8")
        )
        for extra in group.split(",")
    }
    for group in re.findall(r"^EXTRAS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE):
        named |= {("Makefile", extra) for extra in group.split(",")}
    assert {extra for _, extra in named} >= {"slurm", "smollm2", "trl"}
    assert [(name, extra) for name, extra in sorted(named) if extra not in extras] == []


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    named = set()
    for path in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named |= set(re.findall(r"`make ([a-z0-9-]+)", path.read_text(encoding="utf-8")))
    for path in [*(ROOT / ".github").rglob("*.yml"), ROOT / ".ci" / "run"]:
        commands = r"^(?:\s*- run: |\s*|exec )make ([a-z0-9-]+)"
        named |= set(re.findall(commands, path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert named >= {"lint", "test", "docs", "wheel"}
    assert named - targets == set()
