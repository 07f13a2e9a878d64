"""VirtualMemory against a fake driver, which is as strict as CUDA's.

The contract suites run it on a GPU.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout.backends.cuda.vmm import VirtualMemory
from rollout.errors import ConfigError
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_driver import GRANULARITY, OUT_OF_MEMORY

MIB = 1 << 20
MAPPING = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")


@pytest.fixture
def runtime() -> FakeRuntime:
    runtime = FakeRuntime()
    runtime.free = 64 * MIB
    return runtime


def test_virtual_memory_release_frees_all_and_keeps_the_address(
    runtime: FakeRuntime,
) -> None:
    memory = VirtualMemory(runtime)
    buffer = memory.allocate("a", 3 * MIB)
    assert runtime.free == 60 * MIB
    assert not buffer.any()
    buffer.fill_(7)
    assert memory.release("a") == 3 * MIB
    assert memory.release("a") == 0
    assert runtime.free == 64 * MIB
    assert memory.restore("a").data_ptr() == buffer.data_ptr()
    assert (runtime.free, buffer.numel()) == (60 * MIB, 3 * MIB)
    assert not (buffer == 7).any(), "contents are lost"


def test_addresses_are_reserved_once_and_memory_is_mapped_each_time(runtime: FakeRuntime) -> None:
    memory = VirtualMemory(runtime)
    memory.allocate("a", 100)
    for _ in range(3):
        memory.release("a")
        memory.restore("a")
        memory.restore("a")
    calls = runtime.driver_library.calls
    assert calls.count("cuMemAddressReserve") == 1
    assert [calls.count(name) for name in MAPPING] == [4, 4, 4]
    assert calls.count("cuMemUnmap") == calls.count("cuMemRelease") == 3
    assert runtime.library.names() == ["synchronize"] * 3, "before memory goes"


def test_virtual_memory_is_freed_with_the_last_tensor(runtime: FakeRuntime) -> None:
    memory = VirtualMemory(runtime)
    buffer = memory.allocate("a", 100)
    memory.allocate("b", 100)
    memory.release("b")
    view = buffer[10:20].fill_(3)
    del memory, buffer
    assert bool((view == 3).all())
    assert runtime.driver_library.reserved.keys() == runtime.driver_library.mapped.keys()
    del view
    assert runtime.driver_library.reserved == {}
    assert runtime.free == 64 * MIB


def test_virtual_memory_frees_only_after_the_device_is_idle(runtime: FakeRuntime) -> None:
    memory = VirtualMemory(runtime)
    buffer = memory.allocate("a", 100)
    events = runtime.driver_library.calls = runtime.library.calls
    events.clear()
    del memory, buffer
    assert events == [
        ("synchronize",), "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"
    ]  # fmt: skip


def test_memory_that_the_device_refuses_is_a_config_error_with_both_figures(
    runtime: FakeRuntime,
) -> None:
    memory = VirtualMemory(runtime)
    with pytest.raises(ConfigError, match=rf"{66 * MIB} bytes.*'a'.*{64 * MIB} bytes free"):
        memory.allocate("a", 65 * MIB)
    assert runtime.driver_library.reserved == {}
    memory.allocate("a", 64 * MIB)
    memory.release("a")
    runtime.free = 10 * MIB
    with pytest.raises(ConfigError, match="buffer_size_gb"):
        memory.restore("a")
    runtime.free = 64 * MIB
    assert memory.restore("a").numel() == 64 * MIB


def test_addresses_that_the_driver_refuses_are_a_config_error(runtime: FakeRuntime) -> None:
    memory = VirtualMemory(runtime)
    runtime.driver_library.fails["cuMemAddressReserve"] = OUT_OF_MEMORY
    with pytest.raises(ConfigError, match=rf"{2 * MIB} bytes of addresses.*'a'.*'device'"):
        memory.allocate("a", 1 * MIB)
    runtime.driver_library.fails.clear()
    assert memory.allocate("a", 1 * MIB).numel() == 1 * MIB


def test_virtual_memory_empties_torchs_cache_before_it_refuses(runtime: FakeRuntime) -> None:
    runtime.free, runtime.in_cache = 1 * MIB, 8 * MIB
    assert VirtualMemory(runtime).allocate("a", 5 * MIB).numel() == 5 * MIB


@pytest.mark.parametrize("function", MAPPING)
@pytest.mark.parametrize(("code", "kind"), [(OUT_OF_MEMORY, ConfigError), (700, RuntimeError)])
def test_virtual_memory_leaves_nothing_after_a_failed_allocate(
    runtime: FakeRuntime, function: str, code: int, kind: type[Exception]
) -> None:
    memory, library = VirtualMemory(runtime), runtime.driver_library
    kept = memory.allocate("kept", 100)
    library.fails[function] = code
    with pytest.raises(kind):
        memory.allocate("a", 100)
    memory.release("kept")
    with pytest.raises(kind):
        memory.restore("kept")
    assert runtime.free == 64 * MIB
    library.fails.clear()
    assert memory.allocate("a", 100).numel() == 100
    assert memory.restore("kept") is kept


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuMemRelease"])
def test_a_release_that_fails_midway_is_undone_by_restore_or_done_by_another(
    runtime: FakeRuntime, function: str
) -> None:
    for goes_on in (True, False):
        memory = VirtualMemory(runtime)
        buffer = memory.allocate("a", 100)
        runtime.driver_library.fails[function] = 700
        with pytest.raises(RuntimeError, match=rf"{function} failed: made up \(error 700\)"):
            memory.release("a")
        runtime.driver_library.fails.clear()
        if goes_on:
            assert memory.release("a") == 100
            assert runtime.free == 64 * MIB
        assert memory.restore("a") is buffer
        assert runtime.free == 62 * MIB
        del memory, buffer
    assert runtime.free == 64 * MIB


def test_a_device_without_virtual_memory_is_refused_with_the_remedy(runtime: FakeRuntime) -> None:
    runtime.driver_library.has_virtual_memory = 0
    with pytest.raises(ConfigError, match=r"memory_kind='vmm'.*memory_kind='device'"):
        VirtualMemory(runtime)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_do_not_matter(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert VirtualMemory(runtime).allocate("a", 10).numel() == 10


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["allocate", "release", "restore"]),
            st.sampled_from(["a", "b"]),
            st.sets(st.sampled_from([*MAPPING, "cuMemUnmap", "cuMemRelease"])),
        ),
        max_size=20,
    )
)
@example(
    steps=[
        ("allocate", "a", set()),
        ("release", "a", {"cuMemRelease"}),
        ("restore", "a", {"cuMemSetAccess", "cuMemUnmap"}),
    ]
)
def test_no_history_of_faults_loses_memory_or_an_address(
    steps: list[tuple[str, str, set[str]]],
) -> None:
    runtime = FakeRuntime()
    runtime.free = 64 * MIB
    memory, addresses = VirtualMemory(runtime), dict[str, int]()
    for verb, name, faults in steps:
        if (verb == "allocate") == (name in addresses):
            continue
        if verb == "allocate":  # where undoing fails, too, nobody has the memory
            faults = faults.intersection(MAPPING)
        runtime.driver_library.fails = dict.fromkeys(faults, 700)
        try:
            if verb == "allocate":
                addresses[name] = memory.allocate(name, 3 * MIB).data_ptr()
            elif verb == "release":
                memory.release(name)
            else:
                assert memory.restore(name).data_ptr() == addresses[name]
        except RuntimeError:
            assert faults
    runtime.driver_library.fails.clear()
    for name, address in addresses.items():
        assert memory.restore(name).fill_(1).data_ptr() == address
        assert address in runtime.driver_library.accessible
    assert runtime.free == 64 * MIB - 2 * GRANULARITY * len(addresses)
    for name in addresses:
        memory.release(name)
    assert runtime.free == 64 * MIB
