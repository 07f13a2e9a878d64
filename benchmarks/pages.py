"""Where the results of a benchmark go: a Markdown page for people, with a JSON file beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.machine import kind


def publish(results: dict[str, Any], page: str, name: str, folder: Path, console: Console) -> Path:
    """Write both and print the page; `console` is told where. Returns the page's path.

    `results` have the `date` and the `machine` that the file is named after.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results['date']}-{name}-{kind(results['machine'])}.md"
    path.write_text(page)
    path.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    Console().print(Markdown(page))
    console.print(f"written: {path} and its JSON", highlight=False)
    return path
