"""What one GPU does beside what physics allows: decode, prefill, suspend, updates, generation.

    python benchmarks/gpu.py                       # under four minutes on an H100
    python benchmarks/gpu.py --budget-s 60         # only what fits, the most wanted parts first

Writes gpu.json and gpu.md to $OUT, or a page and a JSON file named after the day and the device to
benchmarks/results; anew after every part. Exit status: 0, 1 if a part failed or was interrupted, 2
without a CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_parts import FAILED, INTERRUPTED, Deadline, Outcome, Part, run_parts
from benchmarks.gpu_plan import FULL, Measurements, Plan
from benchmarks.gpu_report import as_markdown
from benchmarks.pages import write_page

RESULTS = Path(__file__).parent / "results"
BUDGET_S = 215.0  # leaves what importing and the end of the last part take of four minutes
NO_DEVICE = 2


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no part starts later")
    arguments = parser.parse_args(argv)
    if arguments.budget_s <= 0:
        parser.error(f"--budget-s {arguments.budget_s} must be above 0")
    return arguments


def page_path(date: str, device_name: str, out: str | None) -> Path:
    """Where the Markdown page goes; its JSON file lies beside it."""
    if out:
        return Path(out) / "gpu.md"
    kind = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return RESULTS / f"{date}-gpu-{kind}.md"


def measure(
    plan: Plan, device: MeasuredDevice, budget_s: float, out: str | None, console: Console
) -> tuple[dict[str, Any], Path]:
    """Run all parts; returns the results and the path of the page."""
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": device.describe(),
        "budget_s": budget_s,
        "parts": [],
    }
    page = page_path(results["date"], results["machine"]["device"], out)
    deadline = Deadline(budget_s)
    measurements = Measurements(plan, device, deadline)
    parts = measurements.parts()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(parts))

        def before(part: Part) -> None:
            progress.update(task, description=part.name)

        def after(outcomes: list[Outcome]) -> None:
            last = outcomes[-1]
            why = f": {last.error}" if last.error else ""
            line = f"{last.name}: {last.status}, {last.seconds:.1f} s{why}"
            console.print(line, highlight=False, markup=False)
            progress.update(task, completed=len(outcomes))
            results["parts"] = [asdict(outcome) for outcome in outcomes]
            write_page(results, as_markdown(results), page)

        run_parts(
            parts, deadline, before=before, after=after, on_failure=measurements.engines.forget
        )
    return results, page


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write. Returns the exit status."""
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print(f"gpu: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return NO_DEVICE
    logging.getLogger("rollout").setLevel(logging.WARNING)
    # Ctrl-C is how gpu_check asks to sum up; a shell's background job would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(stderr=True)
    device = MeasuredDevice("cuda")
    results, page = measure(FULL, device, arguments.budget_s, os.environ.get("OUT"), console)
    Console().print(Markdown(as_markdown(results)))
    console.print(f"written: {page} and its JSON", highlight=False)
    ended_badly = any(part["status"] in (FAILED, INTERRUPTED) for part in results["parts"])
    return 1 if ended_badly else 0


if __name__ == "__main__":
    sys.exit(main())
