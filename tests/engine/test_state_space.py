"""Every command in every reachable state of an engine, and every failure inside a command."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from rollout import (
    ConfigError,
    DynamicInferenceEngine,
    EngineState,
    EngineStateError,
    RolloutError,
    SamplingParams,
    WeightUpdateError,
)
from tests.engine.faulty_backend import (
    KV_POINTS,
    WEIGHT_POINTS,
    InjectedFault,
    engine_with_fuse,
)
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, Finished, prompt_of, tiny_model

PARAMS = SamplingParams(num_tokens_to_generate=8, seed=1)
PROMPTS = (9, 20)
MODES = ("persist", "offload", "recompute")
RELEASES = (("kv_cache",), ("weights",), ("kv_cache", "weights"))
S = EngineState
RESTING = (S.RUNNING, S.PAUSED, S.SUSPENDED, S.STOPPED)
Engine = DynamicInferenceEngine


@cache
def model() -> Any:
    return tiny_model(num_hidden_layers=1)


def update(engine: Engine, **options: Any) -> None:
    engine.update_weights(dict(model().named_parameters()), **options)


def commands() -> Iterator[tuple[str, Callable[[Engine], Any]]]:
    yield "pause", lambda engine: engine.pause()
    yield "unpause", lambda engine: engine.unpause()
    for mode in MODES:
        for release in RELEASES:
            for discard in (False, True) if "weights" in release else (False,):
                name = f"suspend {mode} {'+'.join(release)}{' discard' if discard else ''}"
                yield name, lambda e, m=mode, r=release, d=discard: e.suspend(m, r, d)
    for only in (None, "weights", "kv_cache"):
        yield f"resume {only}", lambda e, o=only: e.resume(o)
    yield "update", update
    yield "update in flight", lambda engine: update(engine, in_flight=True)
    yield "stage", lambda engine: engine.stage_weights(dict(model().named_parameters()))
    yield "epoch", lambda engine: engine.set_generation_epoch(engine.weights_version + 1)
    yield "epoch not above", lambda engine: engine.set_generation_epoch(engine.weights_version)
    yield "checksum", lambda engine: engine.weights_checksum()
    yield "step", lambda engine: engine.step()
    yield "add_request", lambda engine: engine.add_request([1, 2], PARAMS)
    yield "abort", lambda engine: engine.abort_request(1)
    yield "get_record", lambda engine: engine.get_record(0)
    yield "stats", lambda engine: engine.stats()
    yield "suspend an unknown resource", lambda engine: engine.suspend(release=("kv",))
    yield "suspend unknown discard", lambda engine: engine.suspend(discard_weights=True)
    yield "resume an unknown resource", lambda engine: engine.resume("kv")
    yield "shutdown", lambda engine: engine.shutdown()


COMMANDS = dict(commands())
# The state that a command leads to, by the state it finds; it is refused in all others.
EVERYWHERE = {state: state for state in RESTING}
ANSWERS: dict[str, dict[EngineState, EngineState]] = {
    "pause": {S.RUNNING: S.PAUSED, S.PAUSED: S.PAUSED},
    "unpause": {S.PAUSED: S.RUNNING, S.RUNNING: S.RUNNING},
    "suspend": {S.PAUSED: S.SUSPENDED, S.SUSPENDED: S.SUSPENDED},
    "resume": {S.SUSPENDED: S.PAUSED, S.PAUSED: S.PAUSED},
    "shutdown": dict.fromkeys(RESTING, S.STOPPED),
    "update": {state: state for state in (S.PAUSED, S.SUSPENDED)},
    "update in flight": {state: state for state in (S.RUNNING, S.PAUSED, S.SUSPENDED)},
    "epoch": {state: state for state in (S.PAUSED, S.SUSPENDED)},
    "step": {S.RUNNING: S.RUNNING},
    "add_request": {state: state for state in (S.RUNNING, S.PAUSED, S.SUSPENDED)},
    **dict.fromkeys(("stage", "checksum", "abort", "get_record", "stats"), EVERYWHERE),
}
ALWAYS = "stats, weight_checksums, shutdown"
QUIET = "set_generation_epoch, increment_staleness, update_weights"
LEGAL = {
    S.RUNNING: "pause, unpause, update_weights with in_flight=True",
    S.PAUSED: "pause, unpause, suspend, resume, stop, " + QUIET,
    S.SUSPENDED: "suspend, resume, stop, " + QUIET,
    S.STOPPED: "stop",
}


@dataclass(frozen=True)
class Key:
    """The properties that distinguish two states."""

    state: EngineState
    to_restore: tuple[str, ...]
    released: tuple[str, ...]
    kv_mode: str
    kv_resident: bool
    kv_offloaded: bool
    weights_resident: bool
    has_weights: bool


class Rig:
    """An engine with two requests in generation, and a fuse in its memory."""

    def __init__(self, path: tuple[tuple[str, str | None], ...] = ()) -> None:
        self.engine, self.fuse = engine_with_fuse(model(), 32, memory_kind="reserved")
        self.finished: Finished = {}
        for length in PROMPTS:
            self.engine.add_request(prompt_of(length), PARAMS)
        for _ in range(2):
            self.engine.step()
        for name, fault in path:
            self.run(name, fault)

    def run(self, name: str, fault: str | None = None) -> BaseException | None:
        """Run a command; returns what it raised. `fault` may stay unused."""
        self.fuse.armed = fault
        self.fuse.passed.clear()
        try:
            result = COMMANDS[name](self.engine)
        except (RolloutError, InjectedFault) as error:
            return error
        finally:
            self.fuse.armed = None
            self.engine.check_integrity()
        if name == "step":
            self.finished |= {record.request_id: record.merge() for record in result}
        return None

    def key(self) -> Key:
        status = self.engine.memory_status()
        return Key(
            state=self.engine.state,
            to_restore=status.to_restore,
            released=status.released,
            kv_mode=status.kv_mode if "kv_cache" in status.to_restore else "",
            kv_resident=bool(status.resident_bytes["kv_cache"]),
            kv_offloaded=bool(status.bytes_on_host["kv_cache"]),
            weights_resident=bool(status.resident_bytes["weights"]),
            has_weights=status.has_weights,
        )

    def finish(self) -> dict[int, list[int]]:
        """Bring the engine back to RUNNING from any state, and run it to the end."""
        engine = self.engine
        if engine.state is EngineState.SUSPENDED:
            engine.resume()
        if engine.state is EngineState.PAUSED:
            engine.resume()  # what a failed suspend left
            if not engine.memory_status().has_weights:
                update(engine)
            engine.unpause()
        for _ in range(100):
            if not engine.has_unfinished_requests():
                break
            self.finished |= {record.request_id: record.merge() for record in engine.step()}
        return {i: request.generated_tokens for i, request in self.finished.items()}


@cache
def undisturbed() -> dict[int, list[int]]:
    return Rig().finish()


def assert_requests_intact(rig: Rig, *history: object) -> None:
    tokens = rig.finish()
    assert {i: tokens[i] for i in range(len(PROMPTS))} == undisturbed(), history


def assert_answered(before: Key, name: str, error: BaseException | None, after: Key) -> None:
    """Check that a command was done, or refused with the legal commands and without effect."""
    target = ANSWERS.get(name, ANSWERS[name.partition(" ")[0]]).get(before.state)
    if error is None:
        is_partial = name.startswith("resume") and bool(after.to_restore)
        assert after.state is (before.state if is_partial else target), (before, name)
        return
    assert after == before, f"{name} was refused, but changed the engine"
    assert isinstance(error, EngineStateError | ConfigError | WeightUpdateError), error
    text = str(error)
    if isinstance(error, EngineStateError) and f"while {before.state.name}" in text:
        assert target is None, (before, name)
        assert text.endswith(f"legal commands now: {LEGAL[before.state]}, {ALWAYS}")
    elif isinstance(error, EngineStateError):
        assert not before.has_weights or "resume(only='weights') first" in text
        assert not before.weights_resident or "commit a full update first" in text
    elif isinstance(error, ConfigError):
        assert "unknown" in name
    else:
        assert name == "epoch not above"


def points(key: Key, name: str) -> tuple[str, ...]:
    """Return the points at which a command is made to fail."""
    if key.state in (EngineState.RUNNING, EngineState.STOPPED):
        return ()
    if not name.startswith(("suspend", "resume", "unpause", "shutdown")):
        return ()
    return (*KV_POINTS, *WEIGHT_POINTS)


class Explorer:
    """Breadth first, from a running engine; one path is kept for each state found.

    Of the states that a failure has left, the run's seed draws a third, which must answer all
    commands. Long runs take them all, with a second failure in each.
    """

    def __init__(self) -> None:
        self.paths: dict[Key, tuple[tuple[str, str | None], ...]] = {Rig().key(): ()}
        self.frontier = deque(self.paths)
        self.num_transitions = self.num_refused = self.num_failures = 0
        self._random = random.Random(run_seed())

    def explore(self) -> None:
        while self.frontier:
            key = self.frontier.popleft()
            is_after_failure = any(fault for _, fault in self.paths[key])
            if is_after_failure and not IS_LONG and self._random.random() > 1 / 3:
                continue
            passed = self._run_commands(key)
            if IS_LONG or not is_after_failure:
                for name, on_its_way in passed.items():
                    for point in points(key, name):
                        if point in on_its_way:
                            self._run_failure(key, name, point)

    def _run_commands(self, key: Key) -> dict[str, set[str]]:
        """Run every command. Returns the points at which each of them could have failed."""
        passed = {}
        rig = Rig(self.paths[key])
        assert rig.key() == key, "a path leads to one state"
        for name in COMMANDS:
            stats = rig.engine.stats()
            error = rig.run(name)
            passed[name] = set(rig.fuse.passed)
            after = rig.key()
            assert_answered(key, name, error, after)
            assert error is None or rig.engine.stats() == stats, f"{name} was refused, but counted"
            self.num_transitions += error is None
            self.num_refused += error is not None
            self._found(after, (*self.paths[key], (name, None)))
            if after != key or name == "abort":
                rig = Rig(self.paths[key])
        if key.state is not EngineState.STOPPED:
            assert_requests_intact(rig)
        return passed

    def _run_failure(self, key: Key, name: str, point: str) -> None:
        """Make a command fail at `point`; it can be retried, or the engine stopped."""
        path = self.paths[key]
        rig = Rig(path)
        error = rig.run(name, point)
        assert isinstance(error, InjectedFault)
        after = rig.key()
        is_stop = name == "shutdown"
        assert after.state is (EngineState.STOPPED if is_stop else key.state), (name, point)
        self.num_failures += 1
        self._found(after, (*path, (name, point)))
        assert rig.run(name) is None or not after.has_weights
        if rig.engine.state is not EngineState.STOPPED:
            assert_requests_intact(rig, *path, name, point)

    def _found(self, key: Key, path: tuple[tuple[str, str | None], ...]) -> None:
        if key not in self.paths:
            self.paths[key] = path
            self.frontier.append(key)


@pytest.mark.timeout(1800 if IS_LONG else 600)  # 144 states: a minute; in long runs many
def test_every_command_in_every_state_works_or_is_refused_and_may_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    explorer = Explorer()
    explorer.explore()
    with capsys.disabled():
        print(
            f"\nstate space: {len(explorer.paths)} states, {explorer.num_transitions} transitions, "
            f"{explorer.num_refused} refusals, {explorer.num_failures} failures inside a command"
        )
    found = {key.state for key in explorer.paths}
    assert found == set(RESTING)
    assert explorer.num_failures > 100
    for key, path in explorer.paths.items():
        rig = Rig(path)
        rig.engine.shutdown()
        assert rig.engine.state is EngineState.STOPPED, key
        assert len(rig.engine.abort_request(0).merge().generated_tokens) >= 2
