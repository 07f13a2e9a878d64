"""Fill .gpu/ with wheels and kernels for a CUDA machine without network: `make gpu-bundle`.

That machine has Python 3.12 on x86-64 Linux, torch, Triton, transformers and the usual tools.
`.gpu/*.whl` are wheels, in the versions of constraints.txt. `.gpu/triton` is a packed cache
(`scripts.triton_cache`) of the kernels that tests and the benchmark launch there, compiled for
sm_90. A second call downloads and compiles only what is missing. Needs gcc, pip with a package
index, and that machine's versions of Python, torch and Triton. `scripts.gpu_check` uses the bundle.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from scripts import triton_cache

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu"
TRITON = FOLDER / "triton"
LIMIT_BYTES = 64 << 20  # limit on tree and bundle together, which are copied to the machine

PACKAGES = (
    "antlr4-python3-runtime",
    "hydra-core",
    "msgspec",
    "omegaconf",
    "pyzmq",
    "torch-memory-saver",
)
LAUNCHES_PER_PROCESS = 8  # compiling 8 launches takes as long as importing torch
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
SEED = 0  # seed of the tests' random examples
SOURCE_ONLY = ("antlr4-python3-runtime",)  # PyPI has no wheel: it is built here

PYTHON = (3, 12)
# From the oldest to the newest system that a wheel may need. manylinux_2_28 is from 2018.
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 29)))


class Wheel(NamedTuple):
    """The parts of a wheel's file name. Source: PyPA, binary distribution format."""

    name: str
    version: str
    python: frozenset[str]
    abi: frozenset[str]
    platform: frozenset[str]


def parse_wheel(file_name: str) -> Wheel:
    """Split the name of a wheel. Raises ValueError if `file_name` is not the name of a wheel."""
    parts = file_name.removesuffix(".whl").split("-")
    if not file_name.endswith(".whl") or len(parts) not in (5, 6):
        raise ValueError(f"{file_name!r} is not the name of a wheel")
    python, abi, platform = (frozenset(part.split(".")) for part in parts[-3:])
    return Wheel(normalised(parts[0]), parts[1], python, abi, platform)


def runs_there(wheel: Wheel) -> bool:
    """Return whether the wheel can be installed on the machine that the bundle is for."""
    if not wheel.platform & {"any", *PLATFORMS}:
        return False
    major, minor = PYTHON
    if "none" in wheel.abi:
        return bool(wheel.python & {f"py{major}", f"cp{major}{minor}", f"py{major}{minor}"})
    if f"cp{major}{minor}" in wheel.abi:
        return f"cp{major}{minor}" in wheel.python
    older = {f"cp{major}{number}" for number in range(2, minor + 1)}
    return "abi3" in wheel.abi and bool(wheel.python & older)


def normalised(name: str) -> str:
    """Return a package's name in the form in which PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_versions(constraints: str) -> dict[str, str]:
    """Return the version of each package with a line `name==version`. Ignores text after a `;`."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in constraints.splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {normalised(name): version for name, version in pairs}


def requirements(constraints: str) -> dict[str, str]:
    """Return the pinned version of each of PACKAGES. Raises ValueError if one has no pin."""
    pinned = pinned_versions(constraints)
    missing = [name for name in PACKAGES if name not in pinned]
    if missing:
        raise ValueError(f"constraints.txt pins no version of {', '.join(missing)}")
    return {name: pinned[name] for name in PACKAGES}


class Plan(NamedTuple):
    """File names of wheels to keep and to remove, and versions to fetch, by package."""

    keep: list[str]
    remove: list[str]
    fetch: dict[str, str]


def make_plan(wanted: dict[str, str], file_names: Iterable[str]) -> Plan:
    """Return a plan that keeps one fitting wheel for each of `wanted` and fetches missing ones."""
    plan = Plan([], [], dict(wanted))
    for file_name in sorted(file_names):
        wheel = parse_wheel(file_name)
        if plan.fetch.get(wheel.name) == wheel.version and runs_there(wheel):
            del plan.fetch[wheel.name]
            plan.keep.append(file_name)
        else:
            plan.remove.append(file_name)
    return plan


def fetch_command(name: str, version: str, folder: Path) -> list[str]:
    """Return the pip command that downloads or builds the wheel in `folder`."""
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    if name in SOURCE_ONLY:
        return [*pip, "wheel", *quiet, "--wheel-dir", str(folder), f"{name}=={version}"]
    target = ["--only-binary=:all:", "--implementation=cp"]
    target += [f"--python-version={PYTHON[0]}.{PYTHON[1]}"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    return [*pip, "download", *quiet, *target, "--dest", str(folder), f"{name}=={version}"]


def table(folder: Path) -> str:
    """Return one line with the size of each wheel, and one with the sum, in KiB."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.whl"))}
    rows = [f"{size / 1024:8.0f} KiB  {name}" for name, size in sizes.items()]
    return "\n".join([*rows, f"{sum(sizes.values()) / 1024:8.0f} KiB  in {folder}"])


def wheel_names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.whl")]


class Recording(NamedTuple):
    """A program whose kernel launches are recorded, and its additional environment variables."""

    name: str
    command: list[str]
    environment: dict[str, str]


def recordings(tests: Path, launches: Path) -> list[Recording]:
    """Return the programs whose kernel launches are recorded in the file `launches`.

    The suites run in Triton's interpreter, with the seed that they have on the device, so that they
    draw the same examples. Scenarios and the benchmark run on a fake device.
    """
    pytest = [sys.executable, "-m", "pytest", "-p", "tests.recorded_launches"]
    pytest += ["-p", "no:cacheprovider", "--timeout=900"]
    suites = [str(tests / name) for name in ("contracts", "backends")]
    chosen = ["-m", "not slow", "-k", "triton and not compiles_for_an_h100", "-n", "2"]
    own = {"ROLLOUT_LAUNCHES": str(launches), "ROLLOUT_TEST_SEED": str(SEED)}
    on_device = {"ROLLOUT_LAUNCHES_DEVICE": "1"}
    benchmark = [sys.executable, "-m", "tests.backends.benchmark_launches", str(launches)]
    return [
        Recording("scenarios", [*pytest, *scenarios(tests)], own | on_device),
        Recording("benchmark", benchmark, {}),
        Recording("suites", [*pytest, *chosen, *suites], own),
    ]


def scenarios(tests: Path) -> list[str]:
    """Return the files of tests/scenarios that also run on a device."""
    files = sorted((tests / "scenarios").glob("test_*.py"))
    return [str(path) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def record(launches: Path, names: Collection[str] = ()) -> list[str]:
    """Run the recordings `names`, or all recordings if `names` is empty.

    Returns the names of failed recordings, whose launches may be incomplete.
    """
    failed = []
    for recording in recordings(ROOT / "tests", launches):
        if names and recording.name not in names:
            continue
        print(f"recording what is launched: {recording.name}", flush=True)
        environment = {**os.environ, **INTERPRETED, **recording.environment}
        if subprocess.run(recording.command, cwd=ROOT, env=environment).returncode != 0:
            failed.append(recording.name)
    return failed


class Compiled(NamedTuple):
    """Keys of the cache's entries that launches need, and names of the newly compiled kernels."""

    keys: set[str]
    names: list[str]


def compile_all(launches: Path, cache: Path) -> Compiled:
    """Compile recorded launches, in several processes. Raises RuntimeError if a process fails."""
    num_launches = len(launches.read_text(encoding="utf-8").splitlines())
    count = min(os.cpu_count() or 1, 1 + num_launches // LAUNCHES_PER_PROCESS)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.kernel_launches", str(launches)]
    processes = [
        subprocess.Popen(
            [*command, str(share), str(count)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in range(count)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("kernels could not be compiled")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return Compiled(
        {key for result in results for key in result["keys"]},
        [name for result in results for name in result["compiled"]],
    )


def pack_kernels(launches: Path, packed: Path) -> Compiled:
    """Make `packed` the packed cache of exactly these launches. Returns what was compiled."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        triton_cache.install(packed, cache)
        compiled = compile_all(launches, cache)
        triton_cache.pack(cache, packed, compiled.keys)
    return compiled


def missing_kernels(launches: Path, packed: Path) -> list[str]:
    """Return the names of the kernels that a machine with this packed cache must still compile."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        triton_cache.install(packed, cache)
        return compile_all(launches, cache).names


def fill_triton(packed: Path) -> bool:
    """Record, compile and pack all kernels. Returns False, after a message, if some are missing."""
    with tempfile.TemporaryDirectory() as folder:
        launches = Path(folder, "launches")
        failed = record(launches)
        compiled = pack_kernels(launches, packed)
        missing = missing_kernels(launches, packed)
    print(f"compiled {len(compiled.names)}; {triton_cache.num_kernels(packed)} kernels in {packed}")
    for name in failed:
        print(f"error: {name} failed: kernels that it launches may be missing", file=sys.stderr)
    if missing:
        print(f"error: packed, but compiled again: {', '.join(missing)}", file=sys.stderr)
    return not failed and not missing


def fetch_wheels() -> bool:
    """Fetch missing wheels and remove others. Returns False, after a message, on failure."""
    wanted = requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    plan = make_plan(wanted, wheel_names(FOLDER))
    for file_name in plan.remove:
        (FOLDER / file_name).unlink()
    for name, version in plan.fetch.items():
        print(f"fetching {name} {version}", flush=True)
        if subprocess.run(fetch_command(name, version, FOLDER)).returncode != 0:
            print(f"error: pip could not fetch {name}=={version}", file=sys.stderr)
            return False
    missing = make_plan(wanted, wheel_names(FOLDER)).fetch
    if missing:
        print(f"error: pip fetched wheels that do not fit: {', '.join(missing)}", file=sys.stderr)
        return False
    print(table(FOLDER))
    return True


def bytes_that_travel(root: Path) -> int:
    """Return the number of bytes of the bundle and of all files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    files = {root / name for name in listed.split("\0") if name} | set((root / ".gpu").rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def main() -> int:
    """Fill .gpu/. Returns the exit status: 1, after a message, if it is incomplete or too large."""
    FOLDER.mkdir(exist_ok=True)
    if not fetch_wheels() or not fill_triton(TRITON):
        return 1
    num_bytes = bytes_that_travel(ROOT)
    print(f"{num_bytes / 2**20:.1f} MiB with the tree, of at most {LIMIT_BYTES >> 20}")
    if num_bytes > LIMIT_BYTES:
        print(f"error: {num_bytes} bytes are more than {LIMIT_BYTES}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
