"""The dashboard of a run as an SVG picture.

python -m trainer_hooks.train.dashboard_picture metrics.jsonl dashboard.svg
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rollout.control.reports import EngineStats
from trainer_hooks.metrics.jsonl import read_jsonl
from trainer_hooks.train.dashboard import Dashboard

WIDTH = 110


def write_dashboard_picture(
    path: Path | str,
    rows: Iterable[Mapping[str, Any]],
    *,
    title: str = "training",
    num_steps: int | None = None,
    engines: Mapping[str, EngineStats] | None = None,
) -> None:
    """Draw to `path` (SVG) what a Dashboard shows after `rows`."""
    # A file, not a terminal: nothing is drawn before the end.
    dashboard = Dashboard(Console(file=io.StringIO()), title, num_steps)
    for row in rows:
        dashboard.show(row)
    dashboard.show_engines(engines or {})
    recorder = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    recorder.print(dashboard.render(WIDTH))
    # A fixed id: the same rows give the same file.
    recorder.save_svg(str(path), title=title, unique_id="dashboard")


def main() -> None:
    """Draw the picture named on the command line."""
    parser = argparse.ArgumentParser(description="the dashboard of a run as an SVG picture")
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of the run")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--title", default="training")
    arguments = parser.parse_args()
    write_dashboard_picture(arguments.picture, read_jsonl(arguments.metrics), title=arguments.title)


if __name__ == "__main__":
    main()
