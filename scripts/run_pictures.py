"""Make the docs' pictures of a run: the demo in a terminal, its report in a browser.

python scripts/run_pictures.py [overrides of the demo]
python scripts/run_pictures.py --runs DIR DIR DIR  # of finished runs of benchmarks.smollm

Run by hand when the dashboard or the report changed. The script runs the demo (some minutes) in a
temporary folder, reads the screen of its terminal, and writes dashboard.svg and report.png to
docs/images. With --runs it writes report-runs.png, and report-samples.png of the first run's last
seed. Needs pyte (pip install pyte) and chromium.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops
from rich.console import Console
from rich.text import Text

from trainer_hooks.train.report import write_report
from trainer_hooks.train.run_results import read_runs

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS, LINES = 110, 40
RUN_NAME = "pictures"
NUM_COLOURS = 128  # colours of a PNG, which halve its size
MAX_BYTES = 300_000  # limit on a PNG in docs/
PAGE_WIDTH, TALL = 1280, 6_000  # pixels. The whole report fits into TALL.
PALETTE = {"brown": "yellow", "brightbrown": "bright_yellow"}  # pyte's names of yellow


def main() -> None:
    """Make all pictures. Raises SystemExit if a program is missing or the run fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="overrides of the demo's settings")
    parser.add_argument("--step", type=int, default=60, help="show the dashboard after this step")
    parser.add_argument("--runs", nargs="+", type=Path, help="directories of finished runs")
    arguments = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("chromium was not found; it draws the report: install it")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.runs:
            draw_runs(browser, Path(folder), arguments.runs)
            return
        draw_dashboard(Path(folder), arguments.step, arguments.overrides)
        (run,) = Path(folder).glob(f"outputs/train/{RUN_NAME}/seed_*")
        report = (run / "report.html").as_uri()
        screenshot(browser, report, IMAGES / "report.png", 1100)


def draw_runs(browser: str, folder: Path, runs: list[Path]) -> None:
    """Draw the report of `runs`, and the samples of the first run's last seed."""
    page = write_report(*runs, output=folder / "runs.html")
    screenshot(browser, page.as_uri(), IMAGES / "report-runs.png", 1070)
    last = read_runs(runs[:1])[0].seeds[-1]
    page = write_report(last.directory, output=folder / "seed.html")
    screenshot(browser, page.as_uri(), IMAGES / "report-samples.png", 565, is_end=True)


def draw_dashboard(folder: Path, step: int, overrides: list[str]) -> None:
    """Run the job in `folder` in a terminal. Write its most suitable screen to dashboard.svg."""
    try:
        import pyte
    except ImportError as error:
        raise SystemExit("reading the terminal needs pyte: pip install pyte") from error
    screen = pyte.Screen(COLUMNS, LINES)
    stream, chosen, worth = pyte.ByteStream(screen), None, 0
    command = [
        sys.executable,
        "-m",
        "trainer_hooks.train",
        "--config-name",
        "demo",
        f"run_name={RUN_NAME}",
    ]
    process, terminal = start_in_terminal([*command, *overrides], folder)
    while True:
        if not select.select([terminal], [], [], 0.05)[0]:
            # The job writes nothing now, so no screen is half drawn.
            if (found := worth_showing(screen.display, step)) > worth:
                chosen, worth = text_of(screen), found
            continue
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the job has ended
            break
    if os.waitpid(process, 0)[1] or chosen is None:
        raise SystemExit("\n".join([*screen.display, f"the run failed, or has no step {step}"]))
    recorder = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    recorder.print(chosen, soft_wrap=True, end="")
    title = "rollout train --config-name demo"
    # A fixed id: the same screen gives the same file.
    recorder.save_svg(str(IMAGES / "dashboard.svg"), title=title, unique_id="dashboard")


def start_in_terminal(command: list[str], folder: Path) -> tuple[int, int]:
    """Start `command` in a pseudo-terminal. Returns its process id and the terminal's file."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        environment = {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        os.execve(command[0], command, os.environ | environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    return process, terminal


def worth_showing(lines: list[str], step: int) -> int:
    """Return how suitable the screen is for a picture, from 0 (unsuitable) to 3."""
    # 1: a dashboard after `step`, 2: and a part of the next batch, 3: and the part's reward.
    shown = "\n".join(lines)
    steps, samples = re.search(r"step (\d+)/", shown), re.search(r"(\d+) of (\d+) samples", shown)
    if steps is None or samples is None or int(steps[1]) < step:
        return 0
    is_part = 0 < int(samples[1]) < int(samples[2])
    return 1 + is_part + (is_part and "next batch" in shown)


def text_of(screen: Any) -> Text:
    """Return the dashboard on a pyte screen with its colours, from the line with the step on."""
    lines = []
    for y in range(screen.lines):
        cells = [screen.buffer[y][x] for x in range(screen.columns)]
        line = Text()
        for style, run in groupby(cells, key=style_of):
            line.append("".join(cell.data for cell in run), style=style)
        lines.append(line)
    first = next(i for i, line in enumerate(lines) if re.search(r"step \d+/", line.plain))
    while not lines[-1].plain.strip():
        lines.pop()
    return Text("\n").join(lines[first:])


def style_of(cell: Any) -> str:
    colour = PALETTE.get(cell.fg, cell.fg)
    if len(colour) == 6 and all(letter in "0123456789abcdef" for letter in colour):
        colour = f"#{colour}"
    elif colour.startswith("bright") and "_" not in colour:
        colour = colour.replace("bright", "bright_", 1)
    return f"bold {colour}" if cell.bold else colour


def screenshot(browser: str, url: str, path: Path, height: int, *, is_end: bool = False) -> None:
    """Write the first `height` pixels of the page at `url` to `path`, by a headless browser.

    `is_end`: True writes the last `height` pixels that are not empty instead.
    """
    with tempfile.TemporaryDirectory() as profile:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        size = f"--window-size={PAGE_WIDTH},{TALL if is_end else height}"
        where = (f"--user-data-dir={profile}", f"--screenshot={path}", size, url)
        subprocess.run([browser, *flags, *where], check=True, capture_output=True, timeout=120)
    if is_end:
        with Image.open(path) as image:
            page = image.convert("RGB")
        empty = Image.new("RGB", page.size, page.getpixel((0, page.height - 1)))
        _, _, _, end = ImageChops.difference(page, empty).getbbox() or (0, 0, *page.size)
        page.crop((0, end - height, page.width, end)).save(path)
    shrink(path, path)


def shrink(source: Path, target: Path) -> None:
    """Write `source` to `target` with fewer colours. Raises SystemExit if the file is too large."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(NUM_COLOURS).save(target, optimize=True)
    if target.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{target} has {target.stat().st_size:,} bytes; {MAX_BYTES:,} are allowed")


if __name__ == "__main__":
    main()
