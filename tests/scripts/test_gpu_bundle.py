"""The bundle for a CUDA machine: the plan of its wheels, and its size. Downloads nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.gpu_bundle import (
    PACKAGES,
    ROOT,
    bytes_that_travel,
    fetch_command,
    make_plan,
    normalised,
    parse_wheel,
    pinned_versions,
    requirements,
    runs_there,
    scenarios,
)

CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
FITTING = {
    "antlr4-python3-runtime": "antlr4_python3_runtime-4.9.3-py3-none-any.whl",
    "pyzmq": "pyzmq-27.3.0-cp312-abi3-manylinux_2_26_x86_64.manylinux_2_28_x86_64.whl",
    "torch-memory-saver": "torch_memory_saver-0.0.10-cp39-abi3-manylinux2014_x86_64.whl",
    "made-up": "made_up-1.0-2-cp312-cp312-manylinux_2_17_x86_64.whl",
}
WANTED = {
    "antlr4-python3-runtime": "4.9.3",
    "pyzmq": "27.3.0",
    "torch-memory-saver": "0.0.10",
    "made-up": "1.0",
}
UNFIT = (
    "pyzmq-27.3.0-cp313-cp313-manylinux_2_28_x86_64.whl",  # another Python
    "pyzmq-27.3.0-cp313-abi3-manylinux_2_28_x86_64.whl",  # a newer one
    "pyzmq-27.3.0-cp312-abi3-manylinux_2_28_aarch64.whl",  # another processor
    "pyzmq-27.3.0-cp312-abi3-musllinux_1_1_x86_64.whl",  # another C library
    "pyzmq-27.3.0-cp312-abi3-manylinux_2_39_x86_64.whl",  # a newer one
    "pyzmq-27.3.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    "pyzmq-27.3.0-py2-none-any.whl",
)
# What such a machine has of what pyproject.toml asks for.
ALREADY_THERE = {
    *("aiohttp", "coverage", "hypothesis", "jinja2", "matplotlib", "msgpack", "numpy", "peft"),
    *("prometheus-client", "pyarrow", "pytest", "pytest-timeout", "pytest-xdist", "rich"),
    "safetensors",
    *("tokenizers", "torch", "transformers", "triton", "typing-extensions", "uvloop"),
}
IMPORT_WITHOUT = """
import sys
from importlib import import_module
absent, wanted = (words.split(",") for words in sys.argv[1:])
sys.modules.update(dict.fromkeys(absent))  # to import one is a ModuleNotFoundError
for module in wanted:
    import_module(module)
"""
OLD = "pyzmq-26.0.0-cp312-abi3-manylinux_2_28_x86_64.whl"
UNWANTED = "wandb-0.31.0-py3-none-any.whl"


@pytest.mark.parametrize("file_name", FITTING.values())
def test_a_wheel_for_that_machine_fits(file_name: str) -> None:
    assert runs_there(parse_wheel(file_name))


@pytest.mark.parametrize("file_name", UNFIT)
def test_a_wheel_for_another_machine_does_not(file_name: str) -> None:
    assert not runs_there(parse_wheel(file_name))


@pytest.mark.parametrize("file_name", ["pyzmq.whl", "pyzmq-27.3.0.tar.gz", "a-b-c-d-e-f-g.whl"])
def test_what_is_no_wheel_is_refused(file_name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a wheel"):
        parse_wheel(file_name)


def test_every_package_is_pinned_by_our_constraints() -> None:
    assert set(requirements(CONSTRAINTS)) == set(PACKAGES)


def test_a_package_without_a_pin_is_named() -> None:
    with pytest.raises(ValueError, match="msgspec, omegaconf"):
        requirements(
            "antlr4_python3.runtime==4.9.3\nhydra-core==1\npyzmq==2\nTorch_Memory_Saver==1\n"
        )


def test_what_the_check_imports_is_there_or_in_the_bundle() -> None:
    """All else that pyproject.toml asks for is taken away."""
    asked = requires("rollout-engine") or []
    names = {normalised(re.split(r"[^\w.-]", line)[0]) for line in asked}
    absent_packages = names - ALREADY_THERE - set(PACKAGES) - {"rollout-engine"}  # extras of extras
    absent = [
        module
        for module, owners in packages_distributions().items()
        if {normalised(owner) for owner in owners} & absent_packages
    ]
    assert absent, "wandb, for one"
    modules = [f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("gpu*.py")]
    command = [sys.executable, "-c", IMPORT_WITHOUT, ",".join(absent), ",".join(modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pins_are_read_without_markers_and_comments() -> None:
    text = '# a==1\nOne_Two==1.5 ; python_version >= "3.11"\nthree==2  # why\n\n'
    assert pinned_versions(text) == {"one-two": "1.5", "three": "2"}


@given(
    present=st.sets(st.sampled_from([*FITTING.values(), *UNFIT, OLD, UNWANTED])),
)
def test_the_plan_keeps_one_fitting_wheel_each_and_fetches_the_rest(present: set[str]) -> None:
    plan = make_plan(WANTED, present)
    assert set(plan.keep) == present & set(FITTING.values())
    assert set(plan.keep) | set(plan.remove) == present
    assert not set(plan.keep) & set(plan.remove)
    kept = {parse_wheel(name).name for name in plan.keep}
    assert plan.fetch == {name: v for name, v in WANTED.items() if name not in kept}


def test_a_complete_bundle_needs_nothing() -> None:
    plan = make_plan(WANTED, FITTING.values())
    assert (plan.remove, plan.fetch) == ([], {})


def test_of_two_that_fit_one_is_kept() -> None:
    two = [FITTING["pyzmq"], "pyzmq-27.3.0-cp312-cp312-manylinux2014_x86_64.whl"]
    plan = make_plan({"pyzmq": "27.3.0"}, two)
    assert len(plan.keep) == len(plan.remove) == 1


def test_a_wheel_is_asked_for_that_machine_and_a_source_is_built_here() -> None:
    command = fetch_command("pyzmq", "27.3.0", ROOT)
    assert {"download", "--python-version=3.12", "--only-binary=:all:"} <= set(command)
    assert {"--platform=manylinux2014_x86_64", "--platform=manylinux_2_28_x86_64"} <= set(command)
    assert command[-1] == "pyzmq==27.3.0"
    assert "wheel" in fetch_command("antlr4-python3-runtime", "4.9.3", ROOT)


def test_the_tree_and_the_bundle_are_counted_and_what_git_ignores_is_not(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gpu" / "triton" / "KEY").mkdir(parents=True)
    sizes = {".gitignore": 0, "new.py": 20, "left.log": 400, ".gpu/a.whl": 1000}
    sizes[".gpu/triton/KEY/b.cubin"] = 5000
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / ".gitignore").write_text(".gpu/\n*.log\n")
    subprocess.run(["git", "add", ".gitignore"], cwd=tmp_path, check=True)
    assert bytes_that_travel(tmp_path) == len(".gpu/\n*.log\n") + 20 + 1000 + 5000


def test_scenarios_that_run_on_a_device_are_recorded() -> None:
    names = {Path(path).name for path in scenarios(ROOT / "tests")}
    assert {"test_on_a_device.py", "test_device_sharing.py"} <= names
