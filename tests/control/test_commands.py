"""Everything with `do` runs and refuses each command alike; results of engines are merged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
from msgspec import structs

from rollout.apis.in_process import InProcessRuntime
from rollout.control.commands import (
    COMMANDS,
    ChecksumWeights,
    Command,
    FleetResults,
    IncrementStaleness,
    Pause,
    Resume,
    SetGenerationEpoch,
    Shutdown,
    Stats,
    Stop,
    Suspend,
    Unpause,
)
from rollout.control.reports import (
    EngineStats,
    ResumeReport,
    SuspendReport,
    WeightChecksums,
    stats_by_engine,
    stats_of_fleet,
)
from rollout.control.state import TRANSITIONS, EngineState, legal_commands
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.errors import ConfigError, EngineStateError, ProtocolError, RolloutError
from tests.coordinator.live_fleet import LiveFleet
from tests.tiny_models import tiny_engine, tiny_model

Do = Callable[[Command[Any]], Any]
S = EngineState
WAYS: dict[EngineState, list[Command[Any]]] = {
    S.RUNNING: [],
    S.PAUSED: [Pause()],
    S.SUSPENDED: [Pause(), Suspend(mode="offload")],
    S.STOPPED: [Pause(), Stop()],
}
EXAMPLES: tuple[Command[Any], ...] = (
    *(Pause(), Unpause(), Suspend(mode="offload"), Resume(), Stop(), Stats()),
    *(SetGenerationEpoch(version=9), IncrementStaleness(), ChecksumWeights()),
)


@cache
def model() -> Any:
    return tiny_model(num_hidden_layers=1)


# ---- whatever takes commands: a context manager that yields its `do`


@contextmanager
def engine() -> Iterator[Do]:
    yield tiny_engine(model()).do


@contextmanager
def runtime_of_an_llm() -> Iterator[Do]:
    yield InProcessRuntime(tiny_engine(model()), None, has_ranks=False).do


@contextmanager
def client_of_a_fleet() -> Iterator[Do]:
    with LiveFleet(num_engines=2) as fleet, asyncio.Runner() as runner:
        client = InferenceClient(fleet.address)

        async def done(command: Command[Any]) -> Any:
            return await client.do(command, deadline_s=30.0)

        runner.run(client.start())
        try:
            yield lambda command: runner.run(done(command))
        finally:
            runner.run(client.aclose())


IMPLEMENTERS = [engine, runtime_of_an_llm, client_of_a_fleet]


@pytest.mark.parametrize("implementer", IMPLEMENTERS)
@pytest.mark.parametrize("state", WAYS)
def test_do_runs_legal_commands_in_each_state_and_refuses_others(
    implementer: Callable[[], Any], state: EngineState
) -> None:
    commands = [c for c in EXAMPLES if not (state is S.STOPPED and isinstance(c, ChecksumWeights))]
    with implementer() as do:
        for command in [*WAYS[state], *(c for c in commands if not _changes(c, state))]:
            _do_or_refuse(do, command, do(Stats()).state)
        assert do(Stats()).state is state
    for command in (c for c in commands if _changes(c, state)):
        with implementer() as do:
            for step in WAYS[state]:
                do(step)
            do(command)
            assert do(Stats()).state is command.transition.target


def _changes(command: Command[Any], state: EngineState) -> bool:
    """Whether the command is legal in `state` and leads to another one."""
    transition = command.transition
    return state in transition.sources and transition.target not in (None, state)


def _do_or_refuse(do: Do, command: Command[Any], state: EngineState) -> None:
    if command.transition.is_legal_in(state):
        do(command)
        return
    with pytest.raises(EngineStateError) as refusal:
        do(command)
    assert str(refusal.value).startswith(f"cannot {command.name} while {state.name}: ")
    assert str(refusal.value).endswith(f"legal commands now: {', '.join(legal_commands(state))}")


@pytest.mark.parametrize("implementer", IMPLEMENTERS)
def test_do_returns_the_report_of_each_command(implementer: Callable[[], Any]) -> None:
    with implementer() as do:
        assert do(Pause()) is None
        suspended = do(Suspend(mode="offload", release=("kv_cache", "weights")))
        assert isinstance(suspended, SuspendReport)
        assert suspended.mode == "offload"
        assert suspended.released_by_owner["weights"] > 0
        restored = do(Resume(only="weights"))
        assert isinstance(restored, ResumeReport)
        assert restored.restored_by_owner["weights"] == suspended.released_by_owner["weights"]
        assert do(Stats()).state is S.SUSPENDED
        do(Resume())
        do(SetGenerationEpoch(version=7))
        do(IncrementStaleness())
        do(Unpause())
        stats = do(Stats())
        assert isinstance(stats, EngineStats)
        assert (stats.state, stats.weights_version) == (S.RUNNING, 8)
        page = do(ChecksumWeights(start=1))
        assert isinstance(page, WeightChecksums)
        assert len(page.checksums) == page.num_weights - 1
        assert do(Shutdown()) is None


@pytest.mark.parametrize("implementer", IMPLEMENTERS)
@pytest.mark.parametrize(
    ("command", "text"),
    [
        (Suspend(mode="sleepy"), "mode='sleepy' must be one of"),
        (Suspend(release=("hair",)), "hair"),
        (Suspend(release="kv_cache"), "release='kv_cache' must be"),
        (Resume(only="hair"), "only='hair' must be one of"),
    ],
)
def test_do_refuses_a_wrong_argument_by_its_value(
    implementer: Callable[[], Any], command: Command[Any], text: str
) -> None:
    with implementer() as do:
        for step in WAYS[S.SUSPENDED if isinstance(command, Resume) else S.PAUSED]:
            do(step)
        with pytest.raises(ConfigError, match=text):
            do(command)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (SetGenerationEpoch(version="seven"), "version='seven' must be `int`, not `str`"),  # type: ignore[arg-type]
        (SetGenerationEpoch(version=2**40), f"version={2**40} must be `int` <="),
        (Resume(only=3), r"resume: only=3 must be `str \| null`, not `int`"),  # type: ignore[arg-type]
        (Suspend(discard_weights="yes"), "discard_weights='yes' must be `bool`"),  # type: ignore[arg-type]
    ],
)
def test_a_client_refuses_an_argument_of_a_wrong_type_before_it_is_sent(
    command: Command[Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        command.check()


# ---- the table


def test_each_command_has_a_transition_of_its_own() -> None:
    transitions = [command.transition for command in COMMANDS]
    assert len({transition.name for transition in transitions}) == len(COMMANDS)
    assert set(transitions) <= set(TRANSITIONS)


# ---- results of several engines


def results(by_rank: dict[int, Any], **fields: Any) -> FleetResults[Any]:
    return FleetResults(state="PAUSED", weights_version=7, by_rank=by_rank, **fields)


def test_merged_suspends_are_sums_and_the_longest_time() -> None:
    first = SuspendReport(
        mode="offload", seconds=2.0, bytes_released=3, released_by_owner={"kv_cache": 3}
    )
    second = replace(
        first, seconds=1.0, bytes_released=4, released_by_owner={"kv_cache": 2, "weights": 2}
    )
    merged = Suspend().merged(results({0: first, 1: second}))
    assert merged == SuspendReport(
        mode="offload",
        seconds=2.0,
        bytes_released=7,
        released_by_owner={"kv_cache": 5, "weights": 2},
    )
    assert Resume().merged(results({})) == ResumeReport(mode="")


def test_merged_stats_are_sums_and_the_least_longest_sequence() -> None:
    stats = tiny_engine(model()).stats()
    first = replace(stats, num_finished=3, max_sequence_length=64, kv_staleness=(1,) * 9)
    second = replace(stats, num_finished=4, max_sequence_length=40)
    merged = Stats().merged(results({1: second, 0: first}))
    assert (merged.state, merged.weights_version) == (S.PAUSED, 7)
    assert (merged.num_finished, merged.max_sequence_length) == (7, 40)
    assert merged.kv_staleness == (1,) * 9
    assert [use.label for use in merged.ranks] == ["0.0", "1.0"]
    nothing = stats_of_fleet({}, S.RUNNING, 0)
    assert (nothing.num_blocks_total, nothing.kv_staleness) == (0, ())
    assert list(stats_by_engine({10: first, 2: second})) == [2, 10]


def test_merged_checksums_of_engines_that_differ_are_refused() -> None:
    page = WeightChecksums(checksums={"w": "0" * 16}, num_weights=1, version=3)
    assert ChecksumWeights().merged(results({0: page, 4: page})) == page
    with pytest.raises(EngineStateError, match="engines 0 and 4 serve different weights"):
        ChecksumWeights().merged(results({0: page, 4: replace(page, version=4)}))
    with pytest.raises(EngineStateError, match="no engine"):
        ChecksumWeights().merged(results({}))


def test_read_gives_an_answer_the_types_of_its_command() -> None:
    answer = {"state": "SUSPENDED", "weights_version": 2, "ranks": {"10": {"mode": "offload"}}}
    read = Suspend().read(answer)
    assert read.by_rank == {10: SuspendReport(mode="offload")}
    assert Pause().read({**answer, "ranks": {"0": None}}).by_rank == {0: None}
    for wrong in ({}, {**answer, "ranks": {"0": {"mode": 3}}}, {**answer, "state": 7}):
        with pytest.raises(ProtocolError, match="the answer to suspend is malformed"):
            Suspend().read(wrong)


def test_the_type_of_a_result_is_the_parameter_of_its_command() -> None:
    for command in EXAMPLES:
        (declared,) = get_args(type(command).__orig_bases__[0])  # type: ignore[attr-defined]
        answer = {"state": "PAUSED", "weights_version": 0}
        merged: Any = None
        try:
            merged = command.merged(command.read(answer))
        except RolloutError:
            assert isinstance(command, ChecksumWeights)
            continue
        assert isinstance(merged, declared)


def test_a_command_is_sent_with_an_id_and_a_deadline_and_is_not_changed() -> None:
    command = Suspend(release=("weights",))
    sent = structs.replace(command, command_id=4, deadline_s=2.0)
    assert (command.command_id, command.deadline_s) == (0, None)
    assert sent.release == command.release
