"""The documentation as a site: it builds without a warning, and its tables leave no field out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rollout
import trainer_hooks
import trainer_hooks.environments
import trainer_hooks.rewards
from docs.site_hooks import on_page_content, on_page_markdown
from rollout import LLM, AsyncLLM
from trainer_hooks import doctor

ROOT = Path(__file__).parents[1]


def api_page(package: str) -> str:
    name = f"api-{package.removeprefix('trainer_hooks.').replace('_', '-')}.md"
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra 'docs'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Start in five minutes" in start
    page = (tmp_path / "reference" / "configuration" / "index.html").read_text(encoding="utf-8")
    assert "block_size_tokens" in page
    assert "https://fonts" not in start, "nothing is fetched from other sites"


@pytest.mark.parametrize(
    "package",
    [rollout, trainer_hooks, trainer_hooks.rewards, trainer_hooks.environments, doctor],
    ids=lambda each: each.__name__,
)
def test_the_page_of_a_package_has_every_public_name(package: ModuleType) -> None:
    shown = api_page(package.__name__).splitlines()
    above = set() if package in (rollout, trainer_hooks) else set(trainer_hooks.__all__)
    own = [name for name in package.__all__ if name not in above]
    assert [name for name in own if f"::: {package.__name__}.{name}" not in shown] == []


@pytest.mark.parametrize("llm", [LLM, AsyncLLM], ids=lambda llm: llm.__name__)
def test_the_page_of_the_api_has_every_public_method(llm: type) -> None:
    page = api_page("rollout")
    listed = re.search(rf"::: rollout\.{llm.__name__}\n.*members: \[(.*)\]", page)
    assert listed is not None
    kinds = [kind for kind in llm.__mro__ if kind.__module__.startswith("rollout.")]
    own = {name for kind in kinds for name in vars(kind)}
    public = {name for name in own if hasattr(llm, name) and not name.startswith("_")}
    assert set(listed[1].split(", ")) == public


def test_links_to_files_that_the_site_lacks_become_names() -> None:
    assert on_page_markdown("see [results](../benchmarks/results)") == (
        "see results (`benchmarks/results`)"
    )


def test_code_in_tables_may_break_behind_punctuation_alone() -> None:
    html = "<p><code>a_b</code></p><td><code>a_b.c=1, __x</code> a_b <code>word</code></td>"
    assert on_page_content(html) == (
        "<p><code>a_b</code></p>"
        "<td><code>a_<wbr>b.<wbr>c=<wbr>1, __<wbr>x</code> a_b <code>word</code></td>"
    )


def test_fields_in_a_docstring_become_a_list() -> None:
    html = "<p>size: how many,\n    at most.\nleft, right: margins.</p><p>Note: one\nmore.</p>"
    assert on_page_content(html) == (
        "<ul><li><code>size</code>: how many,\n    at most.</li>"
        "<li><code>left, right</code>: margins.</li></ul><p>Note: one\nmore.</p>"
    )
