"""gpu-check runs whole on a fake device: what it refuses, runs and writes, whatever goes wrong.

See device_tree.py for what is real in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_processes import Part
from scripts.gpu_results import FILES, ROOT
from tests.scripts.device_tree import make_tree, run_check

PARTS = ("facts", "install", "smoke", "kernels", "memory", "scenarios", "benchmark")
WITH_TESTS = ("kernels", "memory", "scenarios")
FAULTS = ("fails", "aborts", "hangs", "loses the device")
# What the summary says of a part that a fault hits, and of a test.
TOLD = {
    "fails": ("exit status 1: AssertionError: made up", "AssertionError: made up"),
    "aborts": ("ended by SIGABRT", "SIGABRT|crashed while running"),
    "hangs": ("stopped at its time limit", "still running at the part's time limit"),
    "loses the device": ("CUDA error: an illegal memory", "CUDA error: an illegal memory"),
}
OUTPUT_CHARACTERS = 12_000  # that the caller sees


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


def parts_in(out: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((out / "check.json").read_text())
    return {part["name"]: part for part in content["parts"]}


def test_first_runs_as_it_is_typed_and_leaves_what_the_caller_needs(
    tree: Path, tmp_path: Path
) -> None:
    done = run_check(tree, "first", out=tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    parts = parts_in(tmp_path / "out")
    assert tuple(parts) == PARTS
    assert {part["status"] for part in parts.values()} == {"passed"}
    for name in WITH_TESTS:
        assert (parts[name]["num_passed"], parts[name]["num_compiled"]) == (6, 1), name
    assert [parts[name]["num_skipped"] for name in WITH_TESTS] == [1, 0, 2]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == set(FILES) - {"gpu-kernels.md"}
    assert "card: unknown" in (tmp_path / "out" / "facts.txt").read_text()
    assert "torch: " in (tmp_path / "out" / "facts.txt").read_text()
    assert (tmp_path / "out" / "again.txt").read_text() == ""
    assert done.stdout.endswith("page of the benchmark\n")
    assert not list((tree / ".gpu" / "triton").rglob("kernels.cubin")), "the bundle is not changed"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs a Python without vLLM")
def test_vllm_is_refused_where_vllm_is_not_installed(tree: Path, tmp_path: Path) -> None:
    done = run_check(tree, "vllm", out=tmp_path / "out")
    assert done.returncode == gpu_check.NO_DEVICE
    assert "vLLM is not installed in this Python" in done.stderr


@pytest.mark.parametrize("shift", range(len(FAULTS)))
def test_a_fault_costs_no_other_part_its_result_and_the_summary_names_it(
    tree: Path, tmp_path: Path, shift: int
) -> None:
    """All parts have a fault each, and over the four runs each part has each fault."""
    faults = {name: FAULTS[(i + shift) % len(FAULTS)] for i, name in enumerate(PARTS)}
    out = tmp_path / "out"
    done = run_check(tree, "first", out=out, faults=faults)
    assert done.returncode == 1, done.stderr
    assert len(done.stdout) + len(done.stderr) <= OUTPUT_CHARACTERS
    parts = parts_in(out)
    assert tuple(parts) == PARTS
    summary = done.stdout.partition("=== summary")[2]
    failed_tests = []
    for name, fault in faults.items():
        part, of_test = parts[name], name in WITH_TESTS
        assert part["status"] == ("timed out" if fault == "hangs" else "failed"), name
        failures = part["failures"]
        (failure,) = [f for f in failures if not of_test or f["test"].endswith("[2]")]
        if fault != "hangs":  # else another worker may be in another test at that moment
            assert len(failures) == 1, (name, fault)
        error = failure["error"]
        assert any(told in error for told in TOLD[fault][of_test].split("|")), (name, fault, error)
        assert failure["frame"], (name, fault)
        lines = summary.partition(f"--- {name}: {failure['test']}\n")[2].splitlines()
        assert lines[0].strip()[:40] == error[:40]
        assert lines[1] == f"    at {failure['frame']}"
        if of_test:
            failed_tests += [each["test"] for each in failures]
            counts = [part[f"num_{what}"] for what in ("passed", "failed", "skipped", "not_run")]
            num_tests = {"kernels": 7, "memory": 6, "scenarios": 8}[name]
            assert sum(counts) == num_tests, name
            if fault != "hangs":
                assert counts == [5, 1, num_tests - 6, 0], (name, fault)
    assert (out / "again.txt").read_text().splitlines() == failed_tests
    assert [test.partition("::")[2] for test in failed_tests if test.endswith("[2]")] == [
        f"test_{name}[2]" for name in WITH_TESTS
    ]


@pytest.mark.slow
def test_again_runs_the_tests_of_the_list_alone_and_names_those_that_are_gone(
    tree: Path, tmp_path: Path
) -> None:
    names = [
        "tests/contracts/test_ops.py::test_kernels[2]",
        "tests/contracts/test_ops.py::test_renamed[2]",
        "tests/contracts/test_memory.py::test_memory[4]",
        "tests/scenarios/test_on_a_device.py::test_managed_memory[unified]",
        "tests/scenarios/test_gone.py::test_it",
    ]
    out = tmp_path / "out"
    out.mkdir()
    (out / "again.txt").write_text("".join(f"{name}\n" for name in names))
    done = run_check(tree, "again", str(out / "again.txt"), out=out)
    parts = parts_in(out)
    assert done.returncode == 1
    assert tuple(parts) == (
        *("facts", "install", "again", "memory", "benchmark"),
        *("memcheck", "ncu"),
    )
    assert (parts["again"]["num_passed"], parts["again"]["num_failed"]) == (1, 1)
    assert (parts["memory"]["num_passed"], parts["memory"]["num_failed"]) == (1, 0)
    assert "it is run by name alone" in done.stdout
    assert "2 tests were asked for and did not start" in done.stdout
    assert names[1] in done.stdout
    assert names[4] in done.stdout
    assert (out / "again.txt").read_text() == f"{names[3]}\n"


def test_a_file_that_cannot_be_imported_fails_by_its_name_and_costs_no_other_test(
    tmp_path: Path,
) -> None:
    changes = {"tests/contracts/test_broken.py": "import torch\nraise OSError('no such library')\n"}
    tree = make_tree(tmp_path / "tree", changes)
    # A fault that no part has: for the clock and two workers.
    done = run_check(tree, "first", out=tmp_path / "out", faults={"none": "fails"})
    assert done.returncode == 1
    parts = parts_in(tmp_path / "out")
    for name in ("kernels", "memory"):
        assert parts[name]["num_passed"] == 6, name
        (failure,) = parts[name]["failures"]
        assert failure["test"] == "tests/contracts/test_broken.py"
        assert failure["error"] == "OSError: no such library"


# ---- refusals


def refused(tree: Path, *arguments: str, path: Path | None = None) -> str:
    """The one line that it prints."""
    environment = {**os.environ, "OUT": str(tree / "out"), "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    return done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_machine_without_a_device_is_refused_in_one_line(tree: Path) -> None:
    assert refused(tree, "first") == f"gpu-check: torch {torch.__version__} sees no CUDA device\n"


def test_a_python_without_torch_is_refused_in_one_line(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')\n")
    told = refused(tree, "first", path=tmp_path)
    assert told == f"gpu-check: torch is not installed for {sys.executable}\n"


def test_an_empty_bundle_is_refused_with_the_remedy(tree: Path) -> None:
    (tree / ".gpu" / "carried-1.0-py3-none-any.whl").unlink()
    assert "`make gpu-bundle` fetches them" in refused(tree, "first")


def test_again_without_its_list_is_refused_with_the_remedy(tree: Path) -> None:
    told = refused(tree, "again", "none.txt")
    assert "none.txt is not a file; give the again.txt of the first call" in told


# ---- what is planned


def limits_of(parts: list[Part]) -> float:
    return sum(part.limit_s for part in parts) + gpu_check.OWN_S


def test_all_limits_together_fit_into_the_calls(tmp_path: Path) -> None:
    """Limits hold what installing, summing up and killing take: see test_gpu_processes."""
    asked = tmp_path / "asked.txt"
    asked.write_text("tests/contracts/test_ops.py::test_it\n")
    assert limits_of(gpu_check.first_parts(tmp_path)) <= gpu_check.FIRST_S == 330.0
    assert limits_of(gpu_check.again_parts(tmp_path, asked)) <= gpu_check.AGAIN_S == 240.0
    assert limits_of(gpu_check.vllm_parts(tmp_path)) <= gpu_check.VLLM_S == 240.0


def test_every_file_with_tests_for_a_device_is_run_by_a_part() -> None:
    """By its text: pytest would import the whole tree."""
    about_marks = Path("tests/test_device_marks.py"), Path("tests/scripts")
    found = [
        path
        for path in (file.relative_to(ROOT) for file in sorted(ROOT.rglob("tests/**/test_*.py")))
        if re.search(r"\bmark\.(gpu|device)\b", (ROOT / path).read_text(encoding="utf-8"))
        and not any(path.is_relative_to(other) for other in about_marks)
    ]
    assert len(found) > 10
    places = gpu_check.SUITES + gpu_check.SCENARIOS
    for path in found:
        assert any(path.is_relative_to(place) for place in places), path
    assert all((ROOT / path).exists() for path in places)
