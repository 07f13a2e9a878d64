"""Measure one GPU against its hardware limits: decode, prefill, suspend, update, generation.

    python benchmarks/gpu.py                       # 90 seconds on an H100
    python benchmarks/gpu.py --budget-s 40         # only what fits, most important parts first
    python benchmarks/gpu.py --rehearse            # tiny sizes on a CPU: shows that all parts run

A program, run by hand and by `scripts/gpu_check.py`. Each group of parts runs in a child process.
After every part the program writes a Markdown page and a JSON file: gpu.md and gpu.json in $OUT,
else files in benchmarks/results, named after the day and the device. At the end it prints the page.
Exit status: 0, 1 if a part failed or was interrupted, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_engines import Bench, Floors
from benchmarks.gpu_measures import (
    KV,
    WEIGHTS,
    measure_all_floors,
    measure_cycles,
    measure_decode,
    measure_generate,
    measure_host,
    measure_layer,
    measure_prefill,
    measure_update,
    measure_warm_up,
)
from benchmarks.gpu_parts import (
    FAILED,
    INTERRUPTED,
    MEASURED,
    Deadline,
    GroupRunner,
    Outcome,
    Part,
    Report,
    run_parts,
)
from benchmarks.gpu_shapes import PLAN, REHEARSAL, Plan
from benchmarks.pages import RESULTS, write_page
from rollout.child_process import CHILD_FLAG, run_child

BUDGET_S = 75.0  # of 90 seconds: the rest is for imports and the end of the last part
NO_DEVICE = 2
MAX_WHY = 200  # characters of an error in the page; the JSON file has the whole error

# ---- the parts


def groups_of(bench: Bench) -> dict[str, list[Part]]:
    """Return the parts of each group, most important group first."""
    plan = bench.plan
    large, small = plan.shapes
    # Updates and suspends of weights page-lock host memory for all weights, so they come after
    # decode and prefill.

    def part(group: str, step: str, what: str, measure: Callable[..., Any], *rest: Any) -> Part:
        kind = step.split()[0]
        return Part(
            name=f"{kind} {what}".strip(),
            kind=kind,
            needs_s=plan.needs_s[group, step],
            measure=partial(measure, bench, *rest),
        )

    def steps(shape: str) -> list[Part]:
        decode = partial(part, shape, "decode")
        return [
            *(decode(f"{shape}, {_rows(n)}", measure_decode, shape, n) for n in plan.batches),
            part(shape, "prefill", shape, measure_prefill, shape),
        ]

    def suspend(shape: str, what: str, owner: str) -> Part:
        step = f"suspend {'rows' if owner == KV else owner}"
        return part(shape, step, f"{shape}, {what}", measure_cycles, shape, owner)

    return {
        large: [
            part(large, "floors", "", measure_all_floors),
            *steps(large),
            suspend(large, _rows(plan.num_held_rows), KV),
            part(large, "update", large, measure_update, large),
            suspend(large, WEIGHTS, WEIGHTS),
        ],
        small: [
            part(small, "warm-up", small, measure_warm_up, small),
            *steps(small),
            part(small, "update", small, measure_update, small),
            suspend(small, WEIGHTS, WEIGHTS),
            *(part(small, "host", _rows(n), measure_host, n) for n in plan.host_batches),
        ],
        "peers": [
            *(part("peers", "layer", _rows(n), measure_layer, n) for n in plan.layer_batches),
            part(
                "peers",
                "generate",
                f"{small}, {_rows(plan.num_generate_rows)}",
                measure_generate,
            ),
        ],
    }


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


def measure_group(
    pipe: Connection,
    group: str,
    names: Sequence[str],
    floors: Mapping[str, float] | None,
    ends_at: float,
    is_rehearsal: bool,
) -> None:
    """Measure the parts `names` of a group, and report them through `pipe`. Never returns.

    Runs as the main function of a child process. `floors` has the figures of the part "floors", or
    None if that part has not run. `ends_at` is the deadline by time.monotonic.
    """
    logging.getLogger("rollout").setLevel(logging.WARNING)
    bench = Bench(
        REHEARSAL if is_rehearsal else PLAN, None if floors is None else Floors.of(floors)
    )
    pipe.send(("machine", bench.device.describe()))
    parts = [part for part in groups_of(bench)[group] if part.name in names]
    run_parts(parts, Deadline(ends_at), report=pipe.send, recover=bench.recover)
    pipe.close()
    os._exit(0)  # a regular exit may fail with a broken device


# ---- the page

US, MS, GB, TERA = 1e6, 1e3, 1e-9, 1e-12
Figures = Mapping[str, Any]
Column = tuple[str, Callable[[Figures], str]]


def _number(name: str, scale: float, form: str) -> Callable[[Figures], str]:
    """Return a function that formats the figure `name` times `scale`, or "-" if the figure is
    None."""
    return lambda f: "-" if f[name] is None else format(f[name] * scale, form)


def _pair(first: str, second: str, scale: float, form: str) -> Callable[[Figures], str]:
    left, right = _number(first, scale, form), _number(second, scale, form)
    return lambda f: f"{left(f)}, {right(f)}"


def _speeds(f: Figures, num_bytes: float) -> str:
    """Return the GB/s of a suspend and of its resume, as text."""
    return f"{num_bytes * GB / f['suspend_s']:.1f}, {num_bytes * GB / f['resume_s']:.1f}"


CAPTURES = ("captures", _number("num_graph_captures", 1, "d"))
COLUMNS: dict[str, list[Column]] = {
    "floors": [
        ("memory, GB/s", _number("memory_bytes_per_s", GB, ".0f")),
        ("read", _number("device_read_bytes_per_s", GB, ".0f")),
        ("copy there", _number("device_copy_bytes_per_s", GB, ".0f")),
        ("to device", _number("to_device_bytes_per_s", GB, ".1f")),
        ("to host", _number("to_host_bytes_per_s", GB, ".1f")),
        ("product, TFLOP/s", _number("matmul_flops_per_s", TERA, ".0f")),
    ],
    "decode": [
        ("context", _number("mean_context", 1, ".0f")),
        ("tokens/s", _number("tokens_per_s", 1, ".0f")),
        ("step, ms", _number("step_s", MS, ".2f")),
        ("floor, ms", _number("floor_s", MS, ".2f")),
        ("share", _number("share_of_floor", 1, ".2f")),
        ("CPU, ms", _number("cpu_s_per_step", MS, ".2f")),
        CAPTURES,
    ],
    "prefill": [
        ("tokens", _number("num_tokens", 1, "d")),
        ("tokens/s", _number("tokens_per_s", 1, ".0f")),
        ("TFLOP/s", _number("flops_per_s", TERA, ".0f")),
        ("share of the product", _number("share_of_floor", 1, ".2f")),
    ],
    "suspend": [
        ("GB", _number("num_bytes", GB, ".2f")),
        ("first out, in, GB/s", lambda f: _speeds(f["first"], f["num_bytes"])),
        ("later out, in, GB/s", lambda f: _speeds(f, f["num_bytes"])),
        ("times the copy", _pair("suspend_over_copy", "resume_over_copy", 1, ".2f")),
        ("next token, ms", _number("next_token_s", MS, ".1f")),
        CAPTURES,
    ],
    "update": [
        ("GB", _number("num_bytes", GB, ".2f")),
        ("first stage, s", _number("first_stage_s", 1, ".2f")),
        ("stage, s", _number("stage_s", 1, ".2f")),
        ("stall, ms", _number("stall_s", MS, ".1f")),
        ("copy there, ms", _number("copy_s", MS, ".1f")),
        ("stall / copy", _number("stall_over_copy", 1, ".2f")),
        CAPTURES,
    ],
    "warm-up": [
        ("seconds", _number("seconds", 1, ".1f")),
        CAPTURES,
    ],
    "host": [
        ("wall, ms a step", _number("wall_s_per_step", MS, ".3f")),
        ("CPU, ms", _number("cpu_s_per_step", MS, ".3f")),
        CAPTURES,
    ],
    "layer": [
        ("paged, us", lambda f: f"{f['seconds']['rollout'] * US:.0f}"),
        ("torch SDPA, us", lambda f: f"{f['seconds']['torch SDPA'] * US:.0f}"),
        ("ratio", _number("ratio", 1, ".2f")),
        ("share of reading KV", _number("share_of_floor", 1, ".2f")),
    ],
    "generate": [
        ("tokens/s", lambda f: f"{f['tokens_per_s']['rollout']:.0f}"),
        ("transformers", lambda f: f"{f['tokens_per_s']['transformers generate']:.0f}"),
        ("ratio", _number("ratio", 1, ".1f")),
    ],
}


def as_markdown(results: Mapping[str, Any]) -> str:
    """Return the results as a Markdown page."""
    machine, parts = results["machine"], results["parts"]
    versions = ", ".join(f"{name} {machine.get(name)}" for name in ("torch", "triton", "python"))
    lines = [
        f"# On a device, {results['date']}",
        "",
        f"{machine.get('device', 'unknown device')}, {versions}. Random weights. Shares are of "
        "reading weights and KV once, and of the product measured here. Captures are graphs that "
        "were captured meanwhile.",
    ]
    for kind in COLUMNS:
        measured = [part for part in parts if part["kind"] == kind and part["figures"]]
        if measured:
            lines += ["", *_table(kind, measured)]
    missing = [part for part in parts if part["status"] != MEASURED]
    lines += ["", f"{len(parts) - len(missing)} of {len(parts)} parts measured."]
    if missing:
        lines += ["", _row(["part", "outcome", "why"]), "|---|---|---|"]
        lines += [_row([p["name"], p["status"], _short(p["error"])]) for p in missing]
    return "\n".join(lines) + "\n"


def _table(kind: str, parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of the measured parts of one kind."""
    columns = COLUMNS[kind]
    head = [_row([kind, *(title for title, _ in columns)]), "|---|" + "---:|" * len(columns)]
    return head + [
        _row(
            [
                part["name"].removeprefix(kind).strip(),
                *(show(part["figures"]) for _, show in columns),
            ]
        )
        for part in parts
    ]


# The last characters of an error name its stack frames.
def _short(why: str) -> str:
    """Return an error text, without its middle if the text is longer than MAX_WHY characters."""
    return why if len(why) <= MAX_WHY else f"{why[: MAX_WHY // 2]} ... {why[-MAX_WHY // 2 :]}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("\n", " ").replace("|", "/") for cell in cells) + " |"


# ---- a run


def page_path(date: str, device_name: str, out: str | None) -> Path:
    """Return the path of the Markdown page. The JSON file has the same path with suffix .json."""
    if out:
        return Path(out) / "gpu.md"
    kind = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return RESULTS / f"{date}-gpu-{kind}.md"


class Run:
    """A run of all groups of parts, and its results so far.

    `out` is the folder of the files, or None for benchmarks/results.
    """

    def __init__(self, plan: Plan, budget_s: float, out: str | None) -> None:
        self._deadline = Deadline.after(budget_s)
        self._plan, self._out = plan, out
        self.results: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "machine": {},
            "budget_s": budget_s,
            "parts": [],
        }

    @property
    def page(self) -> Path:
        """Path of the Markdown page."""
        device_name = self.results["machine"].get("device", "unknown device")
        return page_path(self.results["date"], device_name, self._out)

    def measure(self) -> None:
        """Run all groups. Writes the page and the JSON file again after every part."""
        runner = GroupRunner(
            "benchmarks.gpu",
            self._deadline,
            arguments=self._arguments,
            before=lambda name: print(f"gpu: {name} ...", file=sys.stderr, flush=True),
            after=self._add,
            others=self._describe,
        )
        runner.run(groups_of(Bench(self._plan)))

    def _arguments(self, group: str, names: list[str]) -> Sequence[Any]:
        """Return the arguments of `measure_group` after the pipe."""
        floors = [p["figures"] for p in self.results["parts"] if p["kind"] == "floors"]
        is_rehearsal = self._plan is REHEARSAL
        return group, names, next(iter(floors), None), self._deadline.ends_at, is_rehearsal

    def _describe(self, report: Report) -> None:
        self.results["machine"] = report[1]

    def _add(self, outcome: Outcome) -> None:
        self.results["parts"].append(asdict(outcome))
        why = f": {outcome.error}" if outcome.error else ""
        line = f"gpu: {outcome.name}: {outcome.status}, {outcome.seconds:.1f} s{why}"
        print(line, file=sys.stderr, flush=True)
        write_page(self.results, as_markdown(self.results), self.page)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no part starts later")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in tiny sizes")
    arguments = parser.parse_args(argv)
    if not arguments.budget_s > 0:
        parser.error(f"--budget-s {arguments.budget_s} must be above 0")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all parts, write and print the results, and return the exit status."""
    arguments = parse_arguments(argv)
    if not arguments.rehearse and not torch.cuda.is_available():
        print(f"gpu: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return NO_DEVICE
    # scripts/gpu_check.py sends SIGINT to end the run early; background jobs of a shell ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = REHEARSAL if arguments.rehearse else PLAN
    run = Run(plan, arguments.budget_s, os.environ.get("OUT"))
    run.measure()
    print(f"gpu: written to {run.page} and its JSON", file=sys.stderr)
    print(as_markdown(run.results), end="")
    ended_badly = any(p["status"] in (FAILED, INTERRUPTED) for p in run.results["parts"])
    return 1 if ended_badly else 0


if __name__ == "__main__":
    if sys.argv[1:] == [CHILD_FLAG]:
        run_child(measure_group)
    else:
        sys.exit(main())
