"""Run steps of a small engine under compute-sanitizer (memory errors) or ncu (kernel times).

    python benchmarks/gpu_kernels.py check      # compute-sanitizer: fails at any memory error
    python benchmarks/gpu_kernels.py profile    # ncu: time, and shares of the device's peaks
    python benchmarks/gpu_kernels.py steps      # the steps alone, without a tool

A program, run by hand and by `scripts/gpu_check.py`. The steps cover prefill, decode, top-k and
top-p, log-probs, a suspend and an update. `profile` runs them in CUDA graphs, watches the first
launches of the attention and sampling kernels, and writes gpu-kernels.md to $OUT or to
benchmarks/results. `check` runs the steps without CUDA graphs and without torch's caching
allocator. Exit status: 0, 1 for a memory error, 5 if the tool is not installed, else the tool's own
status.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.gpu_engines import RandomWeights, pool_config, random_engine
from benchmarks.gpu_shapes import NEAR_NOTHING, PoolShape
from benchmarks.pages import RESULTS
from benchmarks.workloads import random_prompts
from rollout import InferenceConfig, SamplingParams
from rollout.models.spec import ModelSpec

NOTHING_TO_RUN = 5  # as pytest's exit status for no tests; scripts/gpu_check.py expects it
_NANOSECONDS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6}
TIME = "gpu__time_duration.sum"
MEMORY = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
METRICS = (TIME, MEMORY, COMPUTE, OCCUPANCY, REGISTERS)
# Kernels that ncu watches; it runs each of their launches several times.
KERNELS = "attention|merge|append_kv|histogram|draw"
NUM_LAUNCHES = 32
# compute-sanitizer finds no error inside segments of the caching allocator.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def steps_config(
    device: str, spec: ModelSpec = NEAR_NOTHING, *, is_eager: bool = False
) -> InferenceConfig:
    """Return the config of the engine that runs the steps. `is_eager` switches CUDA graphs off."""
    return pool_config(spec, PoolShape(num_rows=8, context_len=256), device, is_eager=is_eager)


def run_steps(
    device: str, spec: ModelSpec = NEAR_NOTHING, num_tokens: int = 12, *, is_eager: bool = False
) -> int:
    """Generate `num_tokens` for each of four prompts, with a suspend and an update in between.

    Returns the number of captured CUDA graphs. Raises RuntimeError if a request is unfinished.
    """
    config = steps_config(device, spec, is_eager=is_eager)
    engine = random_engine(spec, config, device)
    source = RandomWeights(spec, device, seed=1)
    for index, prompt in enumerate(random_prompts(spec.vocab_size, [3, 40, 100, 7])):
        is_truncated = index % 2 == 1
        sampling = SamplingParams(
            num_tokens_to_generate=num_tokens,
            ignore_eos=True,
            return_log_probs=True,
            seed=index,
            top_k=20 if is_truncated else 0,
            top_p=0.9 if is_truncated else 1.0,
        )
        engine.add_request(prompt, sampling)
    for step in range(2 * num_tokens):
        if step == num_tokens // 2:
            engine.pause()
            engine.suspend("offload")
            engine.resume()
            engine.update_weights(source)
            engine.unpause()
        if engine.has_unfinished_requests():
            engine.step()
    if engine.has_unfinished_requests():
        raise RuntimeError(f"requests are unfinished after {2 * num_tokens} steps")
    num_captures = engine.stats().num_graph_captures
    engine.pause()
    engine.shutdown()
    return num_captures


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """Figures of one kernel over all its launches.

    The percentages are shares of the device's peaks. Longer launches count more.
    """

    name: str
    num_launches: int
    microseconds: float
    memory_percent: float
    compute_percent: float
    occupancy_percent: float
    registers: int


def kernel_lines(report: Iterable[str]) -> list[KernelLine]:
    """Return the figures of each kernel in ncu's CSV output, longest time first.

    Skips lines before the header. Raises ValueError if the header is missing.
    """
    lines = iter(report)
    header = next((line for line in lines if line.startswith('"ID"')), None)
    if header is None:
        raise ValueError("ncu has written no table")
    launches: dict[str, dict[str, dict[str, float]]] = {}
    for row in csv.DictReader([header, *lines]):
        value = float(row["Metric Value"].replace(",", ""))
        if row["Metric Name"] == TIME:
            value *= _NANOSECONDS[row["Metric Unit"]]
        launches.setdefault(row["Kernel Name"], {}).setdefault(row["ID"], {})[
            row["Metric Name"]
        ] = value
    found = [_line(name, list(by_id.values())) for name, by_id in launches.items()]
    return sorted(found, key=lambda line: -line.microseconds)


def _line(name: str, launches: Sequence[Mapping[str, float]]) -> KernelLine:
    """Return the figures of a kernel. `launches` has the metrics of each launch by name."""
    total = sum(launch[TIME] for launch in launches)

    def share(metric: str) -> float:
        return sum(launch[metric] * launch[TIME] for launch in launches) / max(total, 1e-9)

    return KernelLine(
        name=name.partition("(")[0],
        num_launches=len(launches),
        microseconds=total / 1e3,
        memory_percent=share(MEMORY),
        compute_percent=share(COMPUTE),
        occupancy_percent=share(OCCUPANCY),
        registers=int(max(launch[REGISTERS] for launch in launches)),
    )


def as_markdown(lines: Sequence[KernelLine]) -> str:
    """Return a Markdown page with a row for each kernel."""
    columns = ("launches", "us", "memory, %", "compute, %", "warps, %", "registers")
    rows = [
        f"| {x.name} | {x.num_launches} | {x.microseconds:.1f} | {x.memory_percent:.0f} | "
        f"{x.compute_percent:.0f} | {x.occupancy_percent:.0f} | {x.registers} |"
        for x in lines
    ]
    head = ["# Kernels under ncu", "", "Shares of the device's peaks while a kernel runs.", ""]
    table = [f"| kernel | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns), *rows]
    return "\n".join([*head, *table, ""])


def check(tool: str = "compute-sanitizer") -> int:
    """Run the steps under compute-sanitizer, and return the exit status."""
    steps = [sys.executable, __file__, "steps", "--eager"]
    return _run(tool, ["--tool", "memcheck", "--error-exitcode", "1", *steps], UNCACHED)


def profile(out: Path, tool: str = "ncu") -> int:
    """Run the steps under ncu, write the page to `out`, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        options = ["--csv", "--log-file", str(log), "--metrics", ",".join(METRICS)]
        options += ["--graph-profiling", "node", "--target-processes", "all"]
        # Setting the clocks needs rights that a shared machine does not give.
        options += ["--clock-control", "none"]
        options += ["--kernel-name", f"regex:{KERNELS}", "--launch-count", str(NUM_LAUNCHES)]
        status = _run(tool, [*options, sys.executable, __file__, "steps"])
        if status:
            if log.exists():  # it has the reason, mostly missing rights to read the counters
                print(log.read_text(encoding="utf-8")[-2000:])
            return status
        lines = kernel_lines(log.read_text(encoding="utf-8").splitlines())
    page = as_markdown(lines)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-kernels.md").write_text(page, encoding="utf-8")
    print(page)
    return 0


def _run(
    tool: str, arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Run a tool with additional environment variables, and return its exit status.

    Returns NOTHING_TO_RUN if the tool is not installed.
    """
    path = shutil.which(tool)
    if path is None:
        print(f"{tool} is not installed")
        return NOTHING_TO_RUN
    return subprocess.run([path, *arguments], env={**os.environ, **environment}).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("check", "profile", "steps"))
    parser.add_argument("--device", default="cuda", help="device of `steps`")
    parser.add_argument("--eager", action="store_true", help="`steps` captures no step")
    given = parser.parse_args(argv)
    if given.what == "check":
        return check()
    if given.what == "profile":
        return profile(Path(os.environ.get("OUT") or RESULTS))
    print(f"steps captured: {run_steps(given.device, is_eager=given.eager)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
