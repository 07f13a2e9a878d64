"""Test and measure on a CUDA machine with its own Python and the wheels in .gpu/: `make gpu-check`.

Every part is tried, whatever became of those before it, and after each the report is written anew:
gpu-check.json and gpu-check.md in $OUT, or in benchmarks/results. `make gpu-check PARTS="check
profile"` runs the installation and the parts of these names, for which nine minutes may be short
beside the others. Exit status: 0 if all parts passed, 1 if one did not, 2 if this machine cannot
run them at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".gpu"
RESULTS = ROOT / "benchmarks" / "results"

TOTAL_S = 9 * 60.0
CONTRACTS_S = 150.0
OTHER_TESTS_S = 110.0
BENCHMARK_S = 4 * 60.0
INSTALL_S = 40.0
KERNELS_S = 120.0
GRACE_S = 10.0  # from the request to stop, on which pytest sums up, to the kill
TAIL_LINES = 150
NO_TESTS_COLLECTED = 5  # pytest's exit status


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command and the longest it may take."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part ended; `status` is "passed", "failed", "timed out" or "nothing to run"."""

    name: str
    status: str
    seconds: float
    exit_status: int | None
    last_lines: list[str]

    @property
    def is_good(self) -> bool:
        return self.status in ("passed", "nothing to run")


def what_is_missing(wheels: Path) -> str | None:
    """One line on why this machine cannot run the check; None if it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed for " + sys.executable
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if not list(wheels.glob("*.whl")):
        return f"{wheels} has no wheels: `make gpu-bundle` fetches them, where there is a network"
    return None


def run_part(part: Part, environment: dict[str, str]) -> Outcome:
    """Run the command in the repository root, passing its output on line by line.

    At the limit it is asked to stop, as by Ctrl-C, and then killed with all it started.
    """
    print(f"\n=== {part.name} (at most {part.limit_s:.0f} s)", flush=True)
    lines: deque[str] = deque(maxlen=TAIL_LINES)
    start = time.monotonic()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=pass_on, args=(process.stdout, lines), daemon=True)
    reader.start()
    if ended_within(process, part.limit_s):
        status = status_of(process.returncode)
    else:
        status = "timed out"
        stop(process)
    reader.join(GRACE_S)
    return Outcome(
        name=part.name,
        status=status,
        seconds=round(time.monotonic() - start, 1),
        exit_status=process.returncode,
        last_lines=list(lines),
    )


def pass_on(stream: IO[str] | None, lines: deque[str]) -> None:
    assert stream is not None
    for line in stream:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))


def ended_within(process: subprocess.Popen[str], limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop(process: subprocess.Popen[str]) -> None:
    """End the process and its children, which share its session."""
    process.send_signal(signal.SIGINT)
    ended_within(process, GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    ended_within(process, GRACE_S)


def status_of(exit_status: int | None) -> str:
    if exit_status == NO_TESTS_COLLECTED:
        return "nothing to run"
    return "passed" if exit_status == 0 else "failed"


def environment_with(packages: Path, out: Path) -> dict[str, str]:
    """The environment of every part: our packages first, each line of output at once.

    The memory saver needs nothing here: rollout hooks it into torch's allocator by itself.
    """
    paths = [str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, "OUT": str(out)}


def install_part(wheels: Path, packages: Path) -> Part:
    """Unpack the wheels into `packages`; the machine's own packages stay as they are."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--root-user-action=ignore", "--no-index", "--no-deps", "--target", str(packages)]
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    return Part(name="install", command=[*pip, *offline, *files], limit_s=INSTALL_S)


def pytest_parts(tests: Path) -> list[Part]:
    """The contracts and backends, as they are and on the device; then what else is marked gpu."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=100"]
    suites = [tests / "contracts", tests / "backends"]
    command = [*pytest, "-m", "not slow", *map(str, suites)]
    parts = [Part(name="contracts", command=command, limit_s=CONTRACTS_S)]
    others = [
        str(path)
        for path in sorted(tests.rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
        and not any(path.is_relative_to(suite) for suite in suites)
    ]
    if others:
        command = [*pytest, "-m", "gpu", *others]
        parts.append(Part(name="other gpu tests", command=command, limit_s=OTHER_TESTS_S))
    return parts


def all_parts(packages: Path) -> list[Part]:
    """In the order of their weight; the last ones have what time the others leave."""
    benchmark = [sys.executable, "benchmarks/gpu.py"]
    kernels = [sys.executable, "benchmarks/gpu_kernels.py"]
    return [
        install_part(WHEELS, packages),
        *pytest_parts(ROOT / "tests"),
        Part(name="benchmarks", command=benchmark, limit_s=BENCHMARK_S),
        Part(name="check", command=[*kernels, "check"], limit_s=KERNELS_S),
        Part(name="profile", command=[*kernels, "profile"], limit_s=KERNELS_S),
    ]


def chosen_parts(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The first part, which the others need, and those of these names; all without any.

    Raises SystemExit for a name that no part has.
    """
    if odd := set(names) - {part.name for part in parts}:
        known = ", ".join(repr(part.name) for part in parts)
        sys.exit(f"gpu-check: there is no part {min(odd)!r}; the parts are {known}")
    return [part for part in parts if not names or part is parts[0] or part.name in names]


def machine() -> dict[str, Any]:
    """What it ran on, as the report names it."""
    import torch

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table that reads well as it is."""
    rows = [f"| {o.name:<16} | {o.status:<14} | {o.seconds:>7.1f} |" for o in outcomes]
    head = f"| {'part':<16} | {'outcome':<14} | seconds |"
    return "\n".join([head, f"|{'-' * 18}|{'-' * 16}|--------:|", *rows])


def write(out: Path, described: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The report so far; replaces an earlier one."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"machine": described, "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "gpu-check.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    summary = ", ".join(f"{name} {value}" for name, value in described.items())
    page = f"# GPU check\n\n{summary}.\n\n{table(outcomes)}\n"
    (out / "gpu-check.md").write_text(page, encoding="utf-8")


def run_all(
    parts: Sequence[Part], environment: dict[str, str], out: Path, described: dict[str, Any]
) -> list[Outcome]:
    """Try every part, the later ones in what time is left of the whole."""
    end = time.monotonic() + TOTAL_S
    outcomes: list[Outcome] = []
    for part in parts:
        limit_s = max(1.0, min(part.limit_s, end - time.monotonic()))
        cut = Part(name=part.name, command=part.command, limit_s=limit_s)
        outcomes.append(run_part(cut, environment))
        write(out, described, outcomes)
    return outcomes


def main(names: Sequence[str] = ()) -> int:
    """Run all parts, or those of these names. Returns the exit status."""
    missing = what_is_missing(WHEELS)
    if missing is not None:
        print(f"gpu-check: {missing}", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or RESULTS).resolve()
    # Parts are asked to sum up by Ctrl-C, which a background job and all it starts would ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder)
        environment = environment_with(packages, out)
        parts = chosen_parts(all_parts(packages), names)
        outcomes = run_all(parts, environment, out, machine())
    print(f"\n{table(outcomes)}\n\nwritten to {out}", flush=True)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
