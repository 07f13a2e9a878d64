"""generation_phase: commands in order, from every state, with exceptions, with awaitables."""

import asyncio

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.config import KVCacheManagementMode
from rollout.control.state import EngineState
from rollout.errors import ConfigError, EngineStateError, WeightUpdateError
from rollout.testing import FakeAsyncLLM
from tests.tiny_models import tiny_model
from tests.trainer_hooks.fakes import FakeLLM, fake_async_llm
from trainer_hooks import InProcessWeightSync, WeightSync, generation_phase

RUNNING, PAUSED, SUSPENDED = EngineState.RUNNING, EngineState.PAUSED, EngineState.SUSPENDED
WEIGHTS = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("before", "entry"),
    [
        (SUSPENDED, ["resume", "update_weights", "unpause"]),
        (PAUSED, ["update_weights", "unpause"]),
        (RUNNING, ["pause", "update_weights", "unpause"]),
    ],
)
def test_generation_phase_pushes_weights_before_the_engine_runs(
    before: EngineState, entry: list[str]
) -> None:
    llm = FakeLLM(before, weights_version=4)
    with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS, version=9) as phase:
        assert llm.calls == entry
        assert llm.state is RUNNING
        assert llm.weights_version == 9
    assert llm.calls == [*entry, "pause", "suspend"]
    assert llm.state is SUSPENDED
    assert phase.update_report is not None
    assert phase.update_report.version == 9


@pytest.mark.parametrize(
    ("before", "entry"), [(SUSPENDED, ["resume", "unpause"]), (PAUSED, ["unpause"]), (RUNNING, [])]
)
def test_generation_phase_without_weights_only_runs_the_engine(
    before: EngineState, entry: list[str]
) -> None:
    llm = FakeLLM(before)
    with generation_phase(llm) as phase:
        assert llm.calls == entry
    assert llm.state is SUSPENDED
    assert phase.update_report is None


@pytest.mark.parametrize("release", [("kv_cache", "weights"), ("weights",), ("kv_cache",)])
def test_generation_phase_restores_released_weights_before_the_push(
    release: tuple[str, ...],
) -> None:
    llm = FakeLLM(SUSPENDED, released=release)
    # What the phase itself releases at its end may differ from what was released before it.
    with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS, release=("kv_cache",)) as phase:
        assert llm.state is RUNNING
        assert not llm.released
    entry = ["resume weights", "update_weights", "resume", "unpause"]
    if "kv_cache" not in release:
        entry = ["resume", "update_weights", "unpause"]
    assert llm.calls == [*entry, "pause", "suspend"]
    assert llm.released == {"kv_cache"}
    assert phase.resume_report is not None
    assert phase.resume_report.restored_by_owner == dict.fromkeys(release, 1)


def test_generation_phase_releases_the_weights_after_a_refused_push() -> None:
    both = "kv_cache", "weights"

    async def use(llm: FakeAsyncLLM) -> None:
        async with generation_phase(llm, InProcessWeightSync(llm), broken, release=both):
            pytest.fail("the block must not run")

    broken = {"w": torch.tensor([float("nan")])}
    llm, async_llm = FakeLLM(SUSPENDED, released=both), fake_async_llm(SUSPENDED, both)
    with pytest.raises(WeightUpdateError):
        generation_phase(llm, InProcessWeightSync(llm), broken, release=both).__enter__()
    with pytest.raises(WeightUpdateError):
        asyncio.run(use(async_llm))
    for each in (llm, async_llm.llm):
        assert each.state is SUSPENDED
        assert each.released == {*both}


@pytest.mark.parametrize("release", [("kv_cache", "weights"), ("weights",)])
def test_generation_phases_that_release_weights_can_follow_each_other(
    release: tuple[str, ...],
) -> None:
    policy, greedy = tiny_model(), SamplingParams(temperature=0.0, num_tokens_to_generate=3)
    config = {"block_size_tokens": 8, "max_sequence_length": 32, "buffer_size_gb": 0.01}
    with LLM(policy, **config) as llm:
        before = llm.generate([[1, 2]], greedy)
        for version in (1, 2):
            with generation_phase(llm, WeightSync(llm), policy, release=release) as phase:
                after = llm.generate([[1, 2]], greedy)
            assert llm.weights_version == version
            assert [r.generated_tokens for r in after] == [r.generated_tokens for r in before]
            assert set(llm.engine.memory_status().released) == {*release}
        assert phase.resume_report is not None
        assert phase.resume_report.restored_by_owner["weights"] > 0


def test_generation_phase_with_version_none_pushes_the_next_version() -> None:
    llm = FakeLLM(SUSPENDED, weights_version=4)
    with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS):
        assert llm.weights_version == 5


def test_generation_phase_suspends_the_engine_after_an_exception() -> None:
    llm = FakeLLM(SUSPENDED)
    with pytest.raises(KeyboardInterrupt), generation_phase(llm):
        raise KeyboardInterrupt
    assert llm.state is SUSPENDED


@pytest.mark.parametrize("before", [RUNNING, PAUSED, SUSPENDED])
def test_generation_phase_is_not_entered_after_a_refused_push(before: EngineState) -> None:
    llm = FakeLLM(before, weights_version=4)
    broken = {"w": torch.tensor([float("nan")])}
    with (
        pytest.raises(WeightUpdateError),
        generation_phase(llm, InProcessWeightSync(llm), broken),
    ):
        pytest.fail("the block must not run")
    assert llm.state is SUSPENDED
    assert llm.weights_version == 4


def test_generation_phase_can_follow_a_refused_one() -> None:
    llm = FakeLLM(SUSPENDED)
    with pytest.raises(WeightUpdateError):
        generation_phase(llm, InProcessWeightSync(llm), {"w": torch.tensor([1e40])}).__enter__()
    with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS):
        assert llm.state is RUNNING


@pytest.mark.parametrize("inside", [["pause"], ["pause", "suspend"]])
def test_generation_phase_accepts_a_block_that_stops_the_engine(inside: list[str]) -> None:
    llm = FakeLLM(SUSPENDED)
    with generation_phase(llm):
        for command in inside:
            getattr(llm, command)()
    assert llm.state is SUSPENDED
    assert llm.calls.count("pause") == llm.calls.count("suspend") == 1


def test_generation_phase_passes_mode_to_the_suspend() -> None:
    llm = FakeLLM(SUSPENDED)
    with generation_phase(llm, mode=KVCacheManagementMode.RECOMPUTE) as phase:
        assert phase.suspend_report is None
    assert phase.suspend_report is not None
    assert phase.suspend_report.mode == "recompute"


def test_generation_phase_timings_cover_all_parts() -> None:
    llm = FakeLLM(SUSPENDED)
    with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS) as phase:
        pass
    timings = phase.timings()
    parts = (timings.update_s, timings.resume_s, timings.generate_s, timings.suspend_s)
    assert all(seconds > 0.0 for seconds in parts)


def test_async_with_awaits_every_command() -> None:
    async def use() -> FakeAsyncLLM:
        llm = fake_async_llm(RUNNING)
        async with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS, version=3) as phase:
            assert llm.state is RUNNING
        assert phase.update_report is not None
        assert phase.update_report.version == 3
        return llm

    assert asyncio.run(use()).llm.calls == [
        "pause",
        "update_weights",
        "unpause",
        "pause",
        "suspend",
    ]


@pytest.mark.parametrize("before", [RUNNING, PAUSED, SUSPENDED])
def test_plain_with_on_an_asynchronous_llm_is_refused(before: EngineState) -> None:
    llm = fake_async_llm(before)
    for push in ((), (InProcessWeightSync(llm), WEIGHTS)):
        with (
            pytest.raises(ConfigError, match=r"FakeAsyncLLM.*use `async with"),
            generation_phase(llm, *push),
        ):
            pytest.fail("the block must not run")
    assert not llm.llm.calls


def test_async_with_takes_a_synchronous_llm_and_survives_exceptions() -> None:
    llm = FakeLLM(SUSPENDED)

    async def use() -> None:
        async with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(use())
    assert llm.state is SUSPENDED


def test_generation_phase_refuses_weight_sync_without_parameters() -> None:
    llm = FakeLLM()
    with pytest.raises(ConfigError, match="pass both"):
        generation_phase(llm, InProcessWeightSync(llm))
    with pytest.raises(ConfigError, match="pass both"):
        generation_phase(llm, named_parameters=WEIGHTS)
    with pytest.raises(ConfigError, match="version=3"):
        generation_phase(llm, version=3)


def test_generation_phase_refuses_a_wrong_suspend_before_the_block() -> None:
    llm = FakeLLM()
    with pytest.raises(ConfigError, match="discard_weights=True needs 'weights'"):
        generation_phase(llm, discard_weights=True)
    with pytest.raises(ConfigError, match="release='weights' must be a tuple"):
        generation_phase(llm, release="weights")
    with pytest.raises(ConfigError, match="mode='discard'"):
        generation_phase(llm, mode="discard")  # type: ignore[arg-type]


def test_generation_phase_ends_with_the_requested_suspend() -> None:
    llm = FakeLLM(SUSPENDED)
    with generation_phase(llm, mode=KVCacheManagementMode.OFFLOAD, release=["weights"]):
        pass
    assert llm.suspended_with == (KVCacheManagementMode.OFFLOAD, ("weights",))


def test_generation_phase_with_discard_weights_needs_a_push_before_the_next_block() -> None:
    llm = FakeLLM()
    both = ("kv_cache", "weights")
    with generation_phase(llm, release=both, discard_weights=True):
        pass
    with pytest.raises(EngineStateError), generation_phase(llm, release=both):
        pass
    with generation_phase(llm, InProcessWeightSync(llm), WEIGHTS, release=both):
        assert llm.state is EngineState.RUNNING
