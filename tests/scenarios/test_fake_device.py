"""The device tests of a GPU pass on a fake device, which obeys CUDA's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from tests.backends.fake_device import FakeDevice, fake_device
from tests.scenarios import test_device_sharing as sharing
from tests.scenarios import test_on_a_device as on_a_device
from tests.tiny_models import IS_LONG

KINDS = ("device", "vmm", "torch_memory_saver", "unified")
MODES = on_a_device.MODES if IS_LONG else ("recompute",)
cycles = on_a_device.test_20_suspend_cycles_keep_every_address_and_every_graph
# Updates from tensors of the device, and a trainer's steps on it, take a real one.
TESTS: list[tuple[Callable[..., None], tuple[str, ...]]] = [
    (on_a_device.test_tokens_in_float32_are_those_of_the_trainers_model, ("qwen3", "cuda")),
    (on_a_device.test_streamed_weights_are_committed_and_rolled_back_on_a_device, ("cuda",)),
    (on_a_device.test_suspend_reports_the_bytes_that_the_driver_gets_back, ("vmm", "offload")),
    (on_a_device.test_suspend_reports_the_bytes_that_the_driver_gets_back, ("vmm", "recompute")),
    *((cycles, ("cuda", "vmm", mode)) for mode in on_a_device.MODES),
    *((cycles, ("cuda", kind, mode)) for kind, mode in product(KINDS[2:], MODES)),
]
TESTS += [
    (on_a_device.test_suspend_and_resume_change_no_token, ("cuda", kind, mode))
    for kind, mode in product(KINDS, MODES)
]
TESTS += [
    (
        sharing.test_two_engines_of_one_process_do_not_disturb_each_other,
        ("cuda", mode),
    )
    for mode in MODES
]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device() as device:
        yield device


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("test", "arguments"), TESTS, ids=[f"{w.__name__}-{'-'.join(a)}" for w, a in TESTS]
)
def test_device_tests_pass_on_a_fake_device(
    device: FakeDevice, test: Callable[..., None], arguments: tuple[str, ...]
) -> None:
    test(*arguments)
    assert device.num_replays > 0
    assert device.fatal == []
