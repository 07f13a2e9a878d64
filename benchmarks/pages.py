"""Write a benchmark's results: a Markdown page, and a JSON file beside it. Used by benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.machine import kind


def page_path(results: dict[str, Any], name: str, folder: Path) -> Path:
    """Return the path of the page in `folder`, named after `date` and `machine` of the results."""
    return folder / f"{results['date']}-{name}-{kind(results['machine'])}.md"


def write_page(results: dict[str, Any], page: str, path: Path) -> None:
    """Write the page to `path` and the results to the JSON file beside it. Overwrites both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def publish(results: dict[str, Any], page: str, name: str, folder: Path, console: Console) -> None:
    """Write both files, print the page, and print their paths to `console`."""
    path = page_path(results, name, folder)
    write_page(results, page, path)
    Console().print(Markdown(page))
    console.print(f"written: {path} and its JSON", highlight=False)
