"""MemorySaverMemory against a fake torch_memory_saver, which is as strict as the package.

The contract suites run it on a GPU.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rollout.backends.cuda.memory_saver import MemorySaverMemory
from rollout.errors import ConfigError
from tests.backends.fake_cuda import FakeRuntime, FakeSaver

MIB = 1 << 20


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> FakeSaver:
    saver = FakeSaver()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", saver.as_module())
    for variable in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    return saver


def test_memory_saver_pauses_and_resumes_by_buffer(runtime: FakeRuntime, saver: FakeSaver) -> None:
    memory = MemorySaverMemory(runtime)
    buffer = memory.allocate("kv_cache", 100)
    memory.allocate("weights", 50)
    assert memory.release("kv_cache") == 100
    assert runtime.library.names() == ["synchronize"]
    assert memory.restore("kv_cache") is buffer
    tags = [tag for _, tag in saver.events]
    assert [event for event, _ in saver.events] == ["enter", "leave"] * 2 + ["pause", "resume"]
    assert tags[0] == tags[1] == tags[4] == tags[5] != tags[2]
    assert tags[0].startswith("kv_cache-")


def test_two_memory_savers_share_no_tag(runtime: FakeRuntime, saver: FakeSaver) -> None:
    first, second = MemorySaverMemory(runtime), MemorySaverMemory(runtime)
    first.allocate("a", 10)
    second.allocate("a", 10)
    first.release("a")
    assert list(saver.active.values()) == [False, True]


def test_memory_saver_refuses_buffers_larger_than_free_memory(
    runtime: FakeRuntime, saver: FakeSaver
) -> None:
    memory = MemorySaverMemory(runtime)
    runtime.free = 31 * MIB
    with pytest.raises(ConfigError, match=rf"{32 * MIB} bytes.*'a'.*{31 * MIB} bytes free"):
        memory.allocate("a", 31 * MIB)
    runtime.free = 19 * MIB  # torch asks for 20 MiB at a time
    with pytest.raises(ConfigError, match="19922944 bytes free"):
        memory.allocate("a", 2 * MIB)
    assert saver.events == []
    runtime.free = 32 * MIB
    memory.allocate("a", 31 * MIB)
    memory.release("a")
    runtime.free = 31 * MIB
    with pytest.raises(ConfigError, match="bytes free"):
        memory.restore("a")
    runtime.free = 32 * MIB
    assert memory.restore("a").numel() == 31 * MIB


def test_a_failed_pause_leaves_the_buffer_in_use(runtime: FakeRuntime, saver: FakeSaver) -> None:
    memory = MemorySaverMemory(runtime)
    buffer = memory.allocate("a", 10)
    saver.fails = True
    with pytest.raises(OSError, match="made up"):
        memory.release("a")
    assert memory.restore("a") is buffer
    saver.fails = False
    assert memory.release("a") == 10


def test_the_saver_needs_no_preloaded_library(runtime: FakeRuntime, saver: FakeSaver) -> None:
    MemorySaverMemory(runtime)
    assert saver.mode == "torch"


def test_a_preloaded_saver_is_used_as_it_is(
    runtime: FakeRuntime, saver: FakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/x/torch_memory_saver_hook_mode_preload_cu13.abi3.so")
    MemorySaverMemory(runtime)
    assert saver.mode == "preload"


def test_a_saver_in_use_keeps_its_mode(runtime: FakeRuntime, saver: FakeSaver) -> None:
    saver.was_used = True
    MemorySaverMemory(runtime).allocate("a", 10)
    assert saver.mode == "preload"


@pytest.mark.usefixtures("saver")
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_the_remedy(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ConfigError, match=rf"{variable}=.*remove expandable_segments"):
        MemorySaverMemory(runtime)
    monkeypatch.setenv(variable, "expandable_segments:False")
    MemorySaverMemory(runtime)


def test_a_missing_saver_is_a_config_error(
    runtime: FakeRuntime, saver: FakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(ConfigError, match=r"pip install torch-memory-saver"):
        MemorySaverMemory(runtime)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_gpu_the_saver_is_never_imported() -> None:
    program = """
import sys, torch
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.backends.cuda.memory_saver import MemorySaverMemory
from rollout.errors import ConfigError
try:
    MemorySaverMemory(CudaRuntime(torch.device("cuda")))
except ConfigError as error:
    print(error)
print("torch_memory_saver" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "device='cuda': torch sees no CUDA device; use device='cpu'",
        "False",
    ], done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("last", ["", "memory.release('a')", "memory = None"])
def test_a_process_that_used_the_memory_saver_exits_with_0(last: str) -> None:
    program = f"""
import torch
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.backends.cuda.memory_saver import MemorySaverMemory
memory = MemorySaverMemory(CudaRuntime(torch.device("cuda")))
memory.allocate("a", 64 << 20)
torch.cuda.empty_cache()
{last}
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
