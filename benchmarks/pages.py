"""Options, progress bars and result files of the benchmark programs.

Used by most programs of this folder. `write_page` and `publish` write a Markdown page and a JSON
file beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import describe, kind
from rollout import InferenceConfig
from rollout.set_aside import set_aside

RESULTS = Path(__file__).parent / "results"


def results_parser(
    description: str | None, *, rounds: int | None = None, small: str = ""
) -> argparse.ArgumentParser:
    """Return a parser with the option --output.

    `description` is the program's docstring, of which the help shows the first line. If `rounds` is
    given, the parser also has --rounds with this default. If `small` is given, the parser also has
    --small with this help text.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=at_least_one, default=rounds)
    if small:
        parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    return parser


def at_least_one(text: str) -> int:
    """Parse an integer option. Raises ArgumentTypeError if the integer is below 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def dated(config: InferenceConfig | None = None) -> dict[str, Any]:
    """Return today's date and the machine: the first entries of a benchmark's results.

    `config` selects the backend that the machine's description names. None selects the default
    backend with one thread. Sets torch's number of threads to `config.num_threads` if given.
    """
    machine = describe(config or InferenceConfig(num_threads=1))
    return {"date": datetime.date.today().isoformat(), "machine": machine}


def progress_bar(console: Console) -> Progress:
    """Return a progress bar with the number of steps done and the elapsed time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def table_row(cells: Iterable[str]) -> str:
    """Return one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def page_path(results: dict[str, Any], name: str, folder: Path) -> Path:
    """Return the path of the page in `folder`. The date, `name` and the machine are in its name."""
    return folder / f"{results['date']}-{name}-{kind(results['machine'])}.md"


def write_page(results: dict[str, Any], page: str, path: Path) -> None:
    """Write the page to `path`, and the results to a JSON file beside it. Overwrites both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def publish(results: dict[str, Any], page: str, name: str, folder: Path, console: Console) -> None:
    """Write the page and its JSON file, print the page, and print the path to `console`.

    Renames an earlier page and JSON file of the same name.
    """
    path = page_path(results, name, folder)
    for own in (path, path.with_suffix(".json")):
        if (earlier := set_aside(own)) is not None:
            console.print(f"moved the earlier {own.name} to {earlier}", highlight=False)
    write_page(results, page, path)
    Console().print(Markdown(page))
    console.print(f"written: {path} and its JSON", highlight=False)
