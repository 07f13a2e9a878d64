"""Which tests are marked `device`; and a kernel that is launched without the mark is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARKS = """
import pytest
GPU = pytest.mark.gpu
@GPU
def test_0_device(): pass
@pytest.mark.parametrize("kind", ["host", pytest.param("cuda", marks=GPU)])
def test_1_device_only_cuda(kind): pass
@pytest.fixture(params=["reference", "triton"])
def ops(request): pass
def test_2_device_only_triton(ops): pass
@pytest.mark.parametrize("name", ["native", "triton"])
def test_3_device_only_triton(name): pass
@pytest.mark.device
def test_4_device(): pass
@pytest.mark.parametrize("kind", [pytest.param(k, marks=GPU) for k in ("vmm", "unified")])
def test_5_device_only_vmm(kind): pass
@GPU
def test_6_unified_memory(): pass
@pytest.mark.parametrize("other", ["triton_like"])
def test_7_plain(other): pass
"""
KERNEL = """
import pytest, torch
triton = pytest.importorskip("triton")
import triton.language as tl
@triton.jit
def add_one(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)
def launch():
    x = torch.zeros(1)
    add_one[(1,)](x)
    assert x.item() == 1
def test_without_a_mark(): launch()
@pytest.mark.device
def test_for_a_device(): launch()
@pytest.mark.interpreted
def test_for_the_interpreter(): launch()
def test_without_a_launch(): pass
"""


def run_pytest(folder: Path, text: str, *options: str) -> list[str]:
    """The lines that pytest prints of a test file under our conftest."""
    test = folder / "test_it.py"
    test.write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *options, str(test)]
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"}
    environment |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "_hypothesis_pytestplugin",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines()


def test_tests_are_marked_by_their_marks_and_parameters(tmp_path: Path) -> None:
    lines = run_pytest(tmp_path, MARKS, "--collect-only", "-v", "-m", "device")
    found = {
        line.strip().strip("<>").removeprefix("Function ") for line in lines if "test_" in line
    }
    assert {name for name in found if name[5:6].isdigit()} == {
        "test_0_device",
        "test_1_device_only_cuda[cuda]",
        "test_2_device_only_triton[triton]",
        "test_3_device_only_triton[triton]",
        "test_4_device",
        "test_5_device_only_vmm[vmm]",
    }, lines


def test_a_kernel_that_is_launched_without_the_mark_fails_its_test(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    lines = run_pytest(tmp_path, KERNEL, "-rA")
    ended = dict(line.split(" - ")[0].rsplit("::")[::-1] for line in lines if "::test_" in line)
    assert {name: line.split()[0] for name, line in ended.items()} == {
        "test_without_a_mark": "FAILED",
        "test_for_a_device": "PASSED",
        "test_for_the_interpreter": "PASSED",
        "test_without_a_launch": "PASSED",
    }, lines
    assert any("it launches a Triton kernel: mark it `device`" in line for line in lines)
