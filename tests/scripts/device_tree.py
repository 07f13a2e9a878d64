"""A small tree in which scripts/gpu_check.py runs whole, on a machine that has a fake device.

The script, its modules, the journal, the marks, pytest, xdist and pip are the real ones. The tests
and the benchmark stand for ours, and torch for torch: see fake_machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "tests" / "scripts" / "fake_machine"
REAL = (
    "pyproject.toml",
    "scripts/gpu_bundle.py",
    "scripts/gpu_check.py",
    "scripts/gpu_facts.py",
    "scripts/gpu_processes.py",
    "scripts/gpu_results.py",
    "scripts/triton_cache.py",
    "tests/device_journal.py",
    "tests/device_marks.py",
    "tests/backends/fake_graphs.py",
)
CONFTEST = """
from tests.device_marks import mark_device_tests
import pytest
pytest_plugins = ["tests.device_journal"]
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_device_tests(items)
"""
# Test 2 of 6 has the fault. `is_new_kernel`: what Triton's cache lacks is compiled.
TESTS = """
import os, pathlib, pytest, torch
from faults import happen
{mark}
@pytest.mark.gpu
@pytest.mark.parametrize("number", range(6))
def test_{part}(number):
    torch.cuda.launch()
    torch.cuda.replayed_graph()
    if number == 2:
        happen("{part}")
    entry = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "{part}")
    entry.mkdir(exist_ok=True)
    (entry / "kernel.cubin").touch()
def test_on_a_cpu():
    raise AssertionError("it was not asked for")
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["unified"])
def test_managed_memory(kind):
    raise AssertionError("it is run by name alone")
"""
EMPTY = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('not here')\n"
PROGRAM = """
from faults import happen
import os, pathlib, torch
torch.cuda.launch()
happen({part!r})
for name in {pages!r}:
    pathlib.Path(os.environ["OUT"], name).write_text("page of the benchmark\\n")
"""
METERED = "pytestmark = pytest.mark.meters_memory"
FILES = {
    "tests/conftest.py": CONFTEST,
    "tests/contracts/test_ops.py": TESTS.format(mark="", part="kernels"),
    "tests/contracts/test_memory.py": TESTS.format(mark=METERED, part="memory"),
    "tests/scenarios/test_on_a_device.py": TESTS.format(mark="", part="scenarios"),
    "tests/scenarios/test_device_sharing.py": EMPTY,
    "tests/weights/transports/test_cuda_ipc_transport.py": EMPTY,
    "benchmarks/gpu_kernels.py": PROGRAM.format(part="smoke", pages=()),
    "benchmarks/gpu.py": PROGRAM.format(part="benchmark", pages=("gpu.md", "gpu.json")),
    ".gpu/triton/ABC/known.cubin": "",
}
# The wheels are real where pip is; a pip in which something goes wrong stands before it.
PIP = "from faults import happen\nhappen('install')\n"
# Time is over when a part hangs, and not before. Two workers are enough for a fault in one of them.
DRIVER = """
import os, pathlib, subprocess, sys
sys.path.insert(0, ".")
from scripts import gpu_check
from scripts.gpu_processes import Clock, wait_for_group
class FaultClock(Clock):
    def ended_within(self, process, seconds):
        folder = pathlib.Path(os.environ["ROLLOUT_FAKE_FAULTS_FOLDER"])
        while not list(folder.glob("* hangs")):
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            return True
        if seconds <= 5.0:  # to sum up: after it the part is killed
            for path in folder.glob("* hangs"):
                path.unlink()
        return process.poll() is not None
    def wait_for_stacks(self, process):
        wait_for_group(process, 60.0)
gpu_check.NUM_WORKERS = 2
sys.exit(gpu_check.main(sys.argv[1:], FaultClock()))
"""


def make_tree(folder: Path, changes: Mapping[str, str] | None = None) -> Path:
    """Write the tree and the bundle; `changes` are other files, or other contents."""
    for name in REAL:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    for name, text in {**FILES, "driver.py": DRIVER, **(changes or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "tests" / "backends" / "test_nothing.py").write_text(EMPTY, encoding="utf-8")
    with zipfile.ZipFile(folder / ".gpu" / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        info = "carried-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def run_check(
    tree: Path, *arguments: str, out: Path, faults: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line as it is typed; with faults under a clock that knows what hangs."""
    machine = [str(MACHINE)]
    folder = tree / "hanging"
    folder.mkdir(exist_ok=True)
    if faults:
        (folder / "pip").mkdir(exist_ok=True)
        (folder / "pip" / "__init__.py").touch()
        (folder / "pip" / "__main__.py").write_text(PIP, encoding="utf-8")
        machine.append(str(folder))
    script = "driver.py" if faults else "scripts/gpu_check.py"
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"}
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=tree,
        env={
            **environment,
            # All others that are installed here take seconds to import.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout",
            "OUT": str(out),
            "PYTHONPATH": os.pathsep.join(machine),
            "ROLLOUT_FAKE_FAULTS": json.dumps(faults or {}),
            "ROLLOUT_FAKE_FAULTS_FOLDER": str(folder),
        },
        capture_output=True,
        text=True,
    )
