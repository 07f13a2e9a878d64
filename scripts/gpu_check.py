"""Test and measure on a CUDA machine with its own Python and the bundle in .gpu/, in three calls.

    python3 scripts/gpu_check.py first        # in 330 s: facts, tests, benchmark
    python3 scripts/gpu_check.py again FILE   # in 240 s: the tests that FILE names, benchmark
    python3 scripts/gpu_check.py vllm         # in 240 s: engine="vllm", where vLLM is installed

Each part is a process group with a time limit. A part that fails, aborts, hangs or loses the device
does not affect the results of other parts. Results go to $OUT, or to outputs/gpu-check: facts.txt,
check.json, tests.jsonl (each test that ran), again.txt (node ids of failed tests, the FILE of the
second call), logs.txt, gpu.json, gpu.md and, from the second call, gpu-kernels.md. The output ends
with a summary of less than 12,000 characters. Exit status: 0 if all parts passed, 1 if a part
failed, 2 if nothing can run here.

Run by hand or by `make gpu-check`. Packages and kernels are installed in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import triton_cache
from scripts.gpu_bundle import SEED
from scripts.gpu_facts import NO_DEVICE
from scripts.gpu_processes import Clock, Part, Runner
from scripts.gpu_results import Outcome, Results, outcome_of

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / ".gpu"
RESULTS = ROOT / "outputs" / "gpu-check"

FIRST_S, AGAIN_S, VLLM_S = 330.0, 240.0, 240.0
OWN_S = 5.0  # time for this script itself, beside its parts
NUM_WORKERS = 8
SUITES = ("tests/contracts", "tests/backends")
SCENARIOS = (
    "tests/scenarios/test_on_a_device.py",
    "tests/scenarios/test_device_sharing.py",
    "tests/weights/transports/test_cuda_ipc_transport.py",
)


def first_parts(packages: Path) -> list[Part]:
    """Return the parts that check an unknown machine: facts and a smoke test before the suites."""
    on_device, metered = "device and not slow", "meters_memory"
    in_workers = f"{on_device} and not {metered}"
    return [
        facts_part(),
        install_part(packages),
        Part(name="smoke", command=python("benchmarks/gpu_kernels.py", "steps"), limit_s=45.0),
        pytest_part("kernels", SUITES, in_workers, limit_s=70.0, num_workers=NUM_WORKERS),
        pytest_part("memory", SUITES, f"{on_device} and {metered}", limit_s=30.0),
        pytest_part("scenarios", SCENARIOS, on_device, limit_s=50.0),
        benchmark_part(),
    ]


def again_parts(packages: Path, tests: Path) -> list[Part]:
    """Return the parts that run the tests in the file `tests`, the benchmark and NVIDIA's tools."""
    files, metered, kernels = files_of(tests), "meters_memory", "benchmarks/gpu_kernels.py"
    runs = [
        pytest_part(
            "again", files, f"not {metered}", limit_s=35.0, num_workers=NUM_WORKERS, only=tests
        ),
        pytest_part("memory", files, metered, limit_s=22.0, only=tests),
    ]
    tools = [
        Part(name="memcheck", command=python(kernels, "check"), limit_s=28.0),
        Part(
            name="ncu", command=python(kernels, "profile"), limit_s=20.0, pages=("gpu-kernels.md",)
        ),
    ]
    return [
        facts_part(),
        install_part(packages),
        *(runs if files else []),
        benchmark_part(),
        *(replace(part, takes_spare_time=True) for part in tools),
    ]


def vllm_parts(packages: Path) -> list[Part]:
    """Return the parts that test the engine over vLLM on one GPU: contract suite and random
    schedules."""
    suites = ("tests/contracts/test_engine_parts.py", "tests/rollout_vllm/test_random_schedules.py")
    tests = pytest_part("vllm", suites, "not slow", limit_s=190.0)
    return [
        facts_part(),
        install_part(packages),
        replace(tests, command=[*tests.command, "-k", "vllm and not ranks"]),
    ]


def facts_part() -> Part:
    return Part(name="facts", command=python("scripts/gpu_facts.py"), limit_s=20.0)


def install_part(packages: Path) -> Part:
    """Return the part that installs the wheels into `packages`."""
    options = ["--disable-pip-version-check", "--root-user-action=ignore", "--quiet", "--no-index"]
    options += ["--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    wheels = [str(path) for path in sorted(BUNDLE.glob("*.whl"))]
    command = python("-m", "pip", "install", *options, "--target", str(packages), *wheels)
    return Part(name="install", command=command, limit_s=20.0)


def benchmark_part() -> Part:
    command = python("benchmarks/gpu.py", "--budget-s", "70")
    return Part(name="benchmark", command=command, limit_s=90.0, pages=("gpu.json", "gpu.md"))


def pytest_part(
    name: str,
    paths: Sequence[str],
    marks: str,
    *,
    limit_s: float,
    num_workers: int = 0,
    only: Path | None = None,
) -> Part:
    """Return a part that runs pytest over `paths`, in one process or in `num_workers` workers.

    `marks`: pytest's marker expression.
    `only`: file of the node ids to run. None runs all.

    A test that runs for half of `limit_s` ends its process.
    """
    options = ["-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors"]
    options += [f"--timeout={0.5 * limit_s:.0f}", "--timeout-method=thread", "-m", marks]
    if num_workers:
        options += ["-n", str(num_workers), "--max-worker-restart=1000"]
    command = python("-m", "pytest", *options, *paths)
    return Part(name=name, command=command, limit_s=limit_s, has_tests=True, only=only)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def files_of(tests: Path) -> list[str]:
    """Return the existing test files that the node ids in the file `tests` name, in their order."""
    nodeids = tests.read_text(encoding="utf-8").split("\n")
    names = dict.fromkeys(nodeid.partition("::")[0] for nodeid in nodeids if nodeid)
    return [name for name in names if (ROOT / name).is_file()]


def environment_with(scratch: Path) -> dict[str, str]:
    """Return the environment of every part, with this tree and the bundle first in PYTHONPATH."""
    paths = [str(ROOT), str(packages_in(scratch)), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "ROLLOUT_TEST_SEED": str(SEED),  # examples draw the kernels that were compiled beforehand
        "TRITON_CACHE_DIR": str(cache_in(scratch)),
        "OUT": str(scratch),
    }


def packages_in(scratch: Path) -> Path:
    return scratch / "site-packages"


def cache_in(scratch: Path) -> Path:
    return scratch / "triton"


def install_cache(cache: Path) -> None:
    """Copy the precompiled kernels to `cache`, where Triton adds the kernels that it compiles."""
    triton_cache.install(BUNDLE / "triton", cache)


def run_part(part: Part, runner: Runner, results: Results) -> Outcome:
    cache = cache_in(runner.folder)
    before = triton_cache.num_kernels(cache)
    ended = runner.run(part)
    log = runner.log_of(part)
    outcome = outcome_of(part, ended, runner.journal, log, triton_cache.num_kernels(cache) - before)
    results.add(outcome, log, [runner.folder / name for name in part.pages])
    return outcome


def run_parts(parts: Sequence[Part], runner: Runner, results: Results, total_s: float) -> int:
    """Run all parts within `total_s` seconds and print the summary. Returns the exit status.

    Only the facts are run if they show that nothing can run here.
    """
    end = runner.clock.now() + total_s - OWN_S
    for index, part in enumerate(parts):
        left_s = end - runner.clock.now() - sum(later.limit_s for later in parts[index + 1 :])
        if part.takes_spare_time and left_s > part.limit_s:
            part = replace(part, limit_s=left_s)
        outcome = run_part(part, runner, results)
        if part.name == "facts" and outcome.exit_status == NO_DEVICE:
            why = runner.log_of(part).read_text(encoding="utf-8").splitlines()[-1]
            return refuse(why)
    print(results.summary(), flush=True)
    return 0 if results.are_good else 1


def refuse(why: str) -> int:
    """Print why nothing can run, and return the exit status for it."""
    print(f"gpu-check: {why}", file=sys.stderr)
    return NO_DEVICE


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    calls = parser.add_subparsers(dest="call", required=True)
    calls.add_parser("first", help="facts, tests and the benchmark")
    calls.add_parser("vllm", help='tests of engine="vllm"')
    again = calls.add_parser("again", help="tests that failed, and the benchmark")
    again.add_argument("tests", metavar="FILE", type=Path, help="their node ids, a line each")
    arguments = parser.parse_args(argv)
    if arguments.call == "again" and not arguments.tests.is_file():
        parser.error(f"{arguments.tests} is not a file; give the again.txt of the first call")
    return arguments


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Run the parts of a call. Returns the exit status. Tests set `clock`."""
    arguments = parse_arguments(argv)
    if not list(BUNDLE.glob("*.whl")):
        return refuse(f"{BUNDLE} has no wheels: `make gpu-bundle` fetches them, with a network")
    if arguments.call == "vllm" and find_spec("vllm") is None:
        return refuse("vLLM is not installed in this Python: docs/how-to/vllm.md names the version")
    out = Path(os.environ.get("OUT") or RESULTS).resolve()
    # SIGINT tells a part to print its summary. A background job starts with SIGINT ignored,
    # and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        install_cache(cache_in(scratch))
        # The list may lie in $OUT, whose files Results deletes.
        asked = scratch / "asked.txt"
        asked.write_bytes(arguments.tests.read_bytes() if arguments.call == "again" else b"")
        results = Results(out, arguments.call, asked.read_text(encoding="utf-8").splitlines())
        runner = Runner(
            root=ROOT,
            folder=scratch,
            journal=results.journal,
            environment=environment_with(scratch),
            clock=clock or Clock(),
        )
        packages = packages_in(scratch)
        if arguments.call == "first":
            return run_parts(first_parts(packages), runner, results, FIRST_S)
        if arguments.call == "vllm":
            return run_parts(vllm_parts(packages), runner, results, VLLM_S)
        return run_parts(again_parts(packages, asked), runner, results, AGAIN_S)


if __name__ == "__main__":
    sys.exit(main())
