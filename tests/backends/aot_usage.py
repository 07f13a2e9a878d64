"""Registers and memory that a kernel uses on an H100, read from its compiled code without a device.

`python -m tests.backends.aot_usage` compiles every kernel as a bfloat16 model launches it and
prints the table of docs/kernels.md. It must run where TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).parents[2]
H100 = GPUTarget("cuda", 90, 32)
# Of one multiprocessor of compute capability 9.0. Source: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
REGISTERS = 65_536
SHARED_BYTES = 228 * 1024
SHARED_BYTES_OF_SYSTEM = 1024  # a program's, beside its own
MAX_WARPS, MAX_PROGRAMS = 64, 32
REGISTERS_OF_ALLOCATION = 256  # a warp has a multiple of them


class Configuration(NamedTuple):
    """One specialisation of a kernel, as `triton.compile` takes it."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        pointers = ("q", "out", "q_norm", "x_ptr", "logits_ptr", "out_ptr")
        types = [self.signature[name] for name in pointers if name in self.signature]
        return " ".join(map(str, (self.kernel.__name__, *types, *self.constexprs.values())))


class Usage(NamedTuple):
    """Registers and bytes of stack (where registers spill) of a thread, of shared memory and warps
    of a program, and how many programs a multiprocessor has room for at once.
    """

    registers: int
    stack: int
    shared: int
    warps: int
    programs: int


def usage(case: Configuration, odd: set[str]) -> Usage:
    """Compile as for a launch in which integers and pointers not in `odd` are multiples of 16."""
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(case.signature.items())
        if kind.startswith("*") or (kind in ("i32", "i64") and name not in odd)
    }
    source = ASTSource(case.kernel, case.signature, case.constexprs, aligned)
    compiled = triton.compile(source, target=H100, options=case.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (_largest(name, listing) for name in ("REG", "STACK"))
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Usage(registers, stack, shared, warps, num_programs(registers, shared, warps))


def compiled(module: str, share: str, cache: Path) -> dict[str, dict[str, int]]:
    """Run `python -m tests.backends.<module> SHARE` with an empty cache; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", f"tests.backends.{module}", share]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def _largest(name: str, listing: str) -> int:
    return max(map(int, re.findall(rf"{name}:(\d+)", listing)))


def num_programs(registers: int, shared: int, warps: int) -> int:
    """Return the number of programs that a multiprocessor of an H100 runs at once."""
    of_warp = -(-registers * 32 // REGISTERS_OF_ALLOCATION) * REGISTERS_OF_ALLOCATION
    return min(
        REGISTERS // of_warp // warps,
        SHARED_BYTES // (shared + SHARED_BYTES_OF_SYSTEM),
        MAX_WARPS // warps,
        MAX_PROGRAMS,
    )


def table(cases: Iterator[tuple[Configuration, set[str]]]) -> Iterator[str]:
    """Yield the rows of a table in Markdown."""
    yield "| kernel | compiled for | warps | registers | spills | shared memory | programs per SM |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for case, odd in cases:
        used = usage(case, odd)
        sizes = [f"{k}={v}" for k, v in case.constexprs.items() if v is not None]
        if "q_norm" in case.signature and case.constexprs.get("q_norm", "norms") is not None:
            sizes.append(f"norms in {case.signature['q_norm'][1:]}")
        yield (
            f"| `{case.kernel.__name__}` | {', '.join(sizes)} | {used.warps} | {used.registers} "
            f"| {used.stack} B | {used.shared / 1024:.1f} KiB | {used.programs} |"
        )


def main() -> None:
    from tests.backends import aot_attention, aot_ops

    def cases() -> Iterator[tuple[Configuration, set[str]]]:
        for module in (aot_attention, aot_ops):
            for case in module.configurations("bf16"):
                yield case, module.odd_arguments(case)
        for case in aot_ops.row_configurations("fp32", max(aot_ops.VOCABULARIES)):
            yield case, aot_ops.odd_arguments(case)

    for line in table(cases()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
