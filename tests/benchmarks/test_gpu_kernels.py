"""The steps that NVIDIA's tools are to watch, and how ncu's table is read."""

from __future__ import annotations

import os
import re
import shlex
import stat
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_kernels import (
    COMPUTE,
    MEMORY,
    METRICS,
    NOTHING_TO_RUN,
    OCCUPANCY,
    REGISTERS,
    TIME,
    kernel_lines,
    run_steps,
)
from benchmarks.gpu_shapes import NEAR_NOTHING

HEADER = '"ID","Kernel Name","Context","Metric Name","Metric Unit","Metric Value"'


def rows(number: int, kernel: str, time: str, unit: str, percent: float) -> list[str]:
    values = {TIME: (unit, time), REGISTERS: ("register/thread", "1,024")}
    return [
        f'"{number}","{kernel}","1","{metric}","{values.get(metric, ("%", ""))[0]}",'
        f'"{values.get(metric, ("", str(percent)))[1]}"'
        for metric in METRICS
    ]


def test_the_steps_run_to_their_end_on_any_device() -> None:
    spec = replace(NEAR_NOTHING, dtype=torch.float32)
    assert run_steps("cpu", spec) == 0, "a CPU captures nothing"


def test_a_table_has_one_line_for_each_kernel_the_longest_first() -> None:
    report = [
        "==PROF== Connected to process 7",
        HEADER,
        *rows(0, "short(int)", "500", "nsecond", 10.0),
        *rows(1, "long_kernel", "1,000.0", "nsecond", 20.0),
        *rows(2, "long_kernel", "3", "usecond", 60.0),
    ]
    long, short = kernel_lines(report)
    assert (long.name, long.num_launches, long.microseconds) == ("long_kernel", 2, 4.0)
    assert long.memory_percent == long.compute_percent == pytest.approx(50.0), "by time"
    assert (short.name, short.num_launches, short.microseconds) == ("short", 1, 0.5)
    assert short.occupancy_percent == pytest.approx(10.0)
    assert short.registers == 1024
    assert {MEMORY, COMPUTE, OCCUPANCY} < set(METRICS)
    with pytest.raises(ValueError, match="no table"):
        kernel_lines(["==ERROR== ERR_NVGPUCTRPERM"])


# In a made-up tool: what follows --log-file.
LOG = '"$(printf "%s\\n" "$@" | sed -n "/^--log-file/{n;p}")"'


def tool(folder: Path, program: str) -> str:
    """A made-up tool."""
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_a_profile_is_written_as_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table"
    table.write_text("\n".join([HEADER, *rows(0, "attend", "2", "usecond", 80.0)]))
    assert gpu_kernels.profile(tmp_path / "out", tool(tmp_path, f"cp {table} {LOG}")) == 0
    page = (tmp_path / "out" / "gpu-kernels.md").read_text()
    assert "| attend | 1 | 2.0 | 80 | 80 | 80 | 1024 |" in page
    assert "attend" in capfd.readouterr().out
    refused = tool(tmp_path, f'echo "==ERROR== ERR_NVGPUCTRPERM" > {LOG}; exit 1')
    assert gpu_kernels.profile(tmp_path / "none", refused) == 1
    assert "ERR_NVGPUCTRPERM" in capfd.readouterr().out


def test_a_fault_fails_and_a_tool_that_is_not_there_has_nothing_to_run(tmp_path: Path) -> None:
    assert gpu_kernels.check(tool(tmp_path, "exit 1")) == 1
    assert gpu_kernels.check(tool(tmp_path, "exit 0")) == 0
    assert gpu_kernels.check(os.fspath(tmp_path / "missing")) == NOTHING_TO_RUN
    assert gpu_kernels.profile(tmp_path, os.fspath(tmp_path / "missing")) == NOTHING_TO_RUN


def call_of(folder: Path) -> tuple[list[str], str]:
    """Return the recorded arguments of the tool, and torch's allocator setting."""
    *arguments, caching = (folder / "call").read_text().splitlines()
    return arguments, caching


def recording(folder: Path) -> str:
    """A made-up tool that writes down how it was called."""
    call = shlex.quote(str(folder / "call"))
    return tool(folder, f'printf "%s\\n" "$@" "$PYTORCH_NO_CUDA_MEMORY_CACHING" > {call}; exit 1')


def test_profile_leaves_the_clocks_alone_and_watches_a_bounded_number_of_our_kernels(
    tmp_path: Path,
) -> None:
    """A lent device's clocks are not ours, and ncu runs each kernel that it watches many times."""
    assert gpu_kernels.profile(tmp_path / "out", recording(tmp_path)) == 1
    arguments, _ = call_of(tmp_path)
    options = dict(pairwise(arguments))
    assert options["--clock-control"] == "none"
    assert options["--kernel-name"].startswith("regex:")
    assert 0 < int(options["--launch-count"]) <= 64
    pattern = re.compile(options["--kernel-name"].removeprefix("regex:"))
    for kernel in ("append_kv_kernel", "decode_attention_kernel", "merge_parts_kernel"):
        assert pattern.search(kernel)
    assert not pattern.search("vectorized_elementwise_kernel")
    assert arguments[-2:] == [gpu_kernels.__file__, "steps"]


def test_check_watches_eager_steps_that_share_no_segments_of_torch(tmp_path: Path) -> None:
    """Memcheck sees allocations of the driver alone: not what lies in a cached segment."""
    assert gpu_kernels.check(recording(tmp_path)) == 1
    arguments, caching = call_of(tmp_path)
    assert arguments[-3:] == [gpu_kernels.__file__, "steps", "--eager"]
    assert caching == "1"
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


@pytest.mark.parametrize("eager", [["--eager"], []])
def test_eager_steps_capture_nothing(monkeypatch: pytest.MonkeyPatch, eager: list[str]) -> None:
    wanted = []
    monkeypatch.setattr(
        gpu_kernels,
        "run_steps",
        lambda device, **how: wanted.append(gpu_kernels.steps_config(device, **how)) or 0,
    )
    assert gpu_kernels.main(["steps", "--device", "cuda", *eager]) == 0
    assert [config.num_cuda_graphs for config in wanted] == [0 if eager else None]
