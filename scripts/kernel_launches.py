"""Record the launches of Triton kernels, and compile the recorded kernels without a device.

    python -m scripts.kernel_launches LAUNCHES [SHARE NUM_SHARES]

compiles the launches in the file LAUNCHES for an H100 into Triton's cache, TRITON_CACHE_DIR. It
prints as JSON the cache's entries that the launches need, and the kernels that were compiled anew.
Run it without TRITON_INTERPRET. A record has only the properties by which Triton distinguishes
launches: whether an integer is 1, a multiple of 16 or another number, a pointer's type and whether
it is aligned, and the value of a constant.
Run by `scripts.gpu_bundle`. The tests record launches by `recorded`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, cache, driver, interpreter

H100 = GPUTarget("cuda", 90, 32)
ALIGNMENT = 16  # Triton distinguishes multiples of 16 among pointers and integers
# Linkage of a machine's programs, as the command `file` prints it; "" without that command.
LINKAGES = ("ELF", "")


# ---- recording


class Recorder:
    """Appends each kind of launch once to the file `path`, as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[str] = set()
        self.interprets = True

    def record(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Write the launch of a kernel's `function`, unless a launch of its kind was written."""
        line = describe(function, args, kwargs)
        if line not in self._seen:
            self._seen.add(line)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")  # one write: other processes append, too

    @contextmanager
    def launches_alone(self) -> Iterator[None]:
        """Record the kernels that are launched in the block, without running them."""
        before, self.interprets = self.interprets, False
        try:
            yield
        finally:
            self.interprets = before


@contextmanager
def recorded(path: Path) -> Iterator[Recorder]:
    """Record to the file `path` what Triton's interpreter launches in the block."""
    recorder, run = Recorder(path), interpreter.InterpretedFunction.run

    def record_and_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        recorder.record(kernel.fn, args, kwargs)
        return run(kernel, *args, grid=grid, warmup=warmup or not recorder.interprets, **kwargs)

    interpreter.InterpretedFunction.run = record_and_run
    try:
        yield recorder
    finally:
        interpreter.InterpretedFunction.run = run


def describe(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> str:
    """Return a launch as a line of JSON. Launches of one compiled kernel give the same line."""
    signature = inspect.signature(function)
    options = {name: value for name, value in kwargs.items() if name not in signature.parameters}
    own = {name: value for name, value in kwargs.items() if name in signature.parameters}
    arguments = {
        name: _described(value, "constexpr" in str(signature.parameters[name].annotation))
        for name, value in signature.bind(*args, **own).arguments.items()
    }
    kernel = f"{function.__module__}:{function.__qualname__}"
    return json.dumps({"kernel": kernel, "arguments": arguments, "options": options})


def _described(value: Any, is_constant: bool) -> Any:
    """Return an argument as JSON. One number stands for all numbers that Triton treats alike."""
    if isinstance(value, Tensor):
        is_aligned = value.data_ptr() % ALIGNMENT == 0
        return ["tensor", str(value.dtype).removeprefix("torch."), is_aligned]
    if isinstance(value, tl.dtype):
        return ["dtype", value.name]
    if isinstance(value, tl.constexpr):
        return _described(value.value, True)
    if value is None or is_constant or isinstance(value, bool):
        assert value is None or isinstance(value, bool | int | float | str), value
        return value
    if isinstance(value, float):
        return 0.5
    return _alike(value)


def _alike(value: int) -> int:
    """Return the integer that stands for all integers that Triton treats as `value`."""
    if value == 1:
        return 1
    large = 2**40 if not -(2**31) <= value < 2**31 else 0
    return large + (ALIGNMENT if value % ALIGNMENT == 0 else ALIGNMENT + 1)


# ---- compiling


def with_variants(lines: Iterable[str]) -> list[str]:
    """Return the launches, each also with aligned pointers and with bfloat16 for float16."""
    # On a device copies are aligned. Tests in the interpreter avoid bfloat16, which it gets wrong.
    found: dict[str, None] = {}
    for line in lines:
        for text in (line, line.replace('"float16"', '"bfloat16"')):
            for variant in (text, text.replace('", false]', '", true]')):
                found[variant] = None
    return list(found)


class _OfflineDriver:
    """The part of a Triton driver that its just-in-time compiler calls before a launch."""

    def get_current_target(self) -> GPUTarget:
        return H100

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiler:
    """Compiles launches into Triton's cache.

    `keys`: entries of the cache that the launches need.
    `compiled`: names of the kernels and launchers that were compiled.
    `libraries`: an empty folder, to which a library is written that launchers link with.
    """

    def __init__(self, libraries: Path) -> None:
        self.keys: set[str] = set()
        self.compiled: list[str] = []
        self._libraries = libraries

    def compile(self, lines: Iterable[str]) -> None:
        """Compile recorded launches. Call this once in a process, since it sets Triton's driver."""
        make_libcuda(self._libraries)
        driver.set_active(_OfflineDriver())
        knobs.nvidia.libcuda_path = str(self._libraries)
        knobs.compilation.store_binary_only = True
        knobs.compilation.listener = self._record_compiled
        # Some Tritons have a launcher for each signature. Later ones have one module for all.
        has_launchers = hasattr(nvidia, "make_launcher")
        nvidia.compile_module_from_src = self._build_module
        if lines := list(lines):
            nvidia.CudaUtils()
        for line in lines:
            compiled = compile_launch(line)
            self.keys.add(cache._base32(compiled.hash))
            if has_launchers:
                nvidia.CudaLauncher(compiled.src, compiled.metadata)

    def _record_compiled(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.compiled.append(src.name)

    def _build_module(
        self, src: str, name: str, library_dirs: Any, include_dirs: Any, libraries: Any, *_: Any
    ) -> Any:
        # Replaces Triton's `compile_module_from_src`, which also loads the module and so needs a
        # driver. The cache's key depends on Python's linkage, so a module has a key per LINKAGES.
        file_name = name + sysconfig.get_config_var("EXT_SUFFIX")
        *machine, _ = build.platform_key().split(",")
        platforms = (",".join([*machine, linkage]) for linkage in LINKAGES)
        digests = [hashlib.sha256((src + platform).encode()).hexdigest() for platform in platforms]
        missing = [
            manager
            for manager in map(cache.get_cache_manager, digests)
            if manager.get_file(file_name) is None
        ]
        if missing:
            self.compiled.append(name)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"{name}.c")
                path.write_text(src, encoding="utf-8")
                built = build._build(
                    name, str(path), folder, library_dirs, include_dirs, libraries, []
                )
                binary = Path(built).read_bytes()
            for manager in missing:
                manager.put(binary, file_name, binary=True)
        self.keys |= set(map(cache._base32, digests))
        return _Module()


class _Module:
    """Stands for a module that was compiled and not loaded. Every attribute is None."""

    def __getattr__(self, name: str) -> None:
        return None


def compile_launch(line: str) -> Any:
    """Compile the kernel of a recorded launch, or find it in the cache. Returns the kernel."""
    launch = json.loads(line)
    module, name = launch["kernel"].split(":")
    kernel = getattr(import_module(module), name)
    assert isinstance(kernel, triton.JITFunction), "TRITON_INTERPRET is set"
    arguments = {name: _argument(value) for name, value in launch["arguments"].items()}
    return kernel.warmup(grid=(1,), **arguments, **launch["options"])


def _argument(described: Any) -> Any:
    """Return an argument for which Triton compiles the same kernel as for the recorded one."""
    if not isinstance(described, list):
        return described
    kind, name, *is_aligned = described
    if kind == "dtype":
        return tl.dtype(name)
    dtype = getattr(torch, name)
    return torch.empty(1, dtype=dtype) if is_aligned[0] else torch.empty(2, dtype=dtype)[1:]


def make_libcuda(folder: Path) -> None:
    """Write a stand-in for the CUDA driver's library to `folder`, to link with without a driver."""
    # A linker records only libraries that resolve a symbol, so the library needs the functions.
    header = Path(nvidia.dirname, "include", "cuda.h").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    source = folder / "libcuda.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), encoding="utf-8")
    named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["gcc", *named, str(source)], check=True)


def main(arguments: list[str]) -> None:
    """Compile this process's share of the launches, and print the result as JSON."""
    lines = with_variants(Path(arguments[0]).read_text(encoding="utf-8").splitlines())
    share, num_shares = map(int, arguments[1:] or (0, 1))
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(Path(folder))
        compiler.compile(lines[share::num_shares])
    print(json.dumps({"keys": sorted(compiler.keys), "compiled": compiler.compiled}))


if __name__ == "__main__":
    main(sys.argv[1:])
