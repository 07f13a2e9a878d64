"""Writing a benchmark's results: a Markdown page for people, with a JSON file beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.machine import kind


def page_path(results: dict[str, Any], name: str, folder: Path) -> Path:
    """The page is named after the `date` and the `machine` of its results."""
    return folder / f"{results['date']}-{name}-{kind(results['machine'])}.md"


def write_page(results: dict[str, Any], page: str, path: Path) -> None:
    """Write both files, in place of earlier ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def publish(results: dict[str, Any], page: str, name: str, folder: Path, console: Console) -> None:
    """Write both files, print the page, and print their paths to `console`."""
    path = page_path(results, name, folder)
    write_page(results, page, path)
    Console().print(Markdown(page))
    console.print(f"written: {path} and its JSON", highlight=False)
