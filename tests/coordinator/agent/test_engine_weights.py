"""Weights are staged beside the steps, which continue whatever their source does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rollout import DynamicInferenceEngine
from rollout.control.commands import Command, Pause, Shutdown, Stats, Suspend
from rollout.coordinator.agent.agent import EngineAgent, serve
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    Attempt,
    Commit,
    Nack,
    Prepare,
    Rollback,
)
from rollout.errors import RemoteError, WeightUpdateError
from rollout.weights.source import WeightsSource
from rollout.weights.update import NamedTensors
from rollout.wire import Message
from tests.coordinator.agent.test_engine_agent import (
    assignment,
    command,
    entered,
    make_agent,
    model,
    requests_of,
    send_to,
    source_of,
    staged,
    steps,
)
from tests.lora_adapters import merged, random_adapter
from tests.tiny_models import tiny_engine

BOUND_S = 30.0


class HeldSources:
    """A fetch that waits for leave: for each source by its address, a number."""

    def __init__(self) -> None:
        self._may_go: dict[str, threading.Event] = {}
        self.has_begun: dict[str, threading.Event] = {}
        self.threads: list[threading.Thread] = []
        self.fault: BaseException | None = None

    def add(self, seed: int, checksum: str = "") -> WeightsSource:
        self._may_go[str(seed)] = threading.Event()
        self.has_begun[str(seed)] = threading.Event()
        return source_of(seed, checksum)

    def fetch(self, source: WeightsSource) -> NamedTensors:
        self.threads.append(threading.current_thread())
        self.has_begun[source.address].set()
        assert self._may_go[source.address].wait(BOUND_S)
        if self.fault is not None:
            raise self.fault
        tensors: NamedTensors = model(int(source.address)).state_dict()
        return tensors

    def free(self, seed: int) -> None:
        self._may_go[str(seed)].set()

    def free_all(self) -> None:
        for event in self._may_go.values():
            event.set()
        for thread in self.threads:
            thread.join(BOUND_S)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sources() -> Any:
    held = HeldSources()
    yield held
    held.free_all()


def holding_agent(
    sources: HeldSources,
    clock: Clock | None = None,
    engine: DynamicInferenceEngine | None = None,
) -> EngineAgent:
    """An engine in the fleet, with one request."""
    agent = make_agent(fetch=sources.fetch, clock=clock or Clock(), engine=engine)
    agent.handle(entered())
    agent.handle(assignment(0))
    return agent


def prepare(command_id: int, version: int, source: WeightsSource, **changes: Any) -> Prepare:
    return Prepare(command_id=command_id, version=version, source=source, in_flight=True, **changes)


def refusal(messages: Any, command_id: int) -> str:
    """The reason of the one vote no among these."""
    (nack,) = [m for m in messages if isinstance(m, Nack)]
    assert nack.command_id == command_id
    return str(nack.error.to_error())


def versions_of(agent: EngineAgent) -> list[int]:
    """The versions that sampled the tokens of the one request, which is run to its end."""
    versions: list[int] = requests_of(steps(agent))[0].policy_versions.tolist()
    return versions


def test_the_engine_steps_while_its_weights_are_fetched(sources: HeldSources) -> None:
    agent = holding_agent(sources)
    assert agent.handle(prepare(1, 5, sources.add(21))) == []
    before = agent.status().num_steps
    for _ in range(6):
        agent.step()
        assert not agent.poll()
    assert agent.status().num_steps == before + 6
    sources.free(21)
    (vote,) = staged(agent)
    assert isinstance(vote, Ack)
    assert agent.status().weights_version == 0
    agent.handle(Commit(command_id=1, version=5))
    assert versions_of(agent) == [0] * 6 + [5] * 8


def committed(sources: HeldSources, engine: DynamicInferenceEngine | None = None) -> EngineAgent:
    """An engine amid a request, that has just committed version 5 and not confirmed it."""
    agent = holding_agent(sources, engine=engine)
    agent.step()
    sources.add(21)
    sources.free(21)
    send_to(agent, prepare(1, 5, source_of(21)))
    assert not any(isinstance(m, Ack) for m in agent.handle(Commit(command_id=1, version=5)))
    return agent


def test_the_reported_stall_is_the_gap_between_two_steps(sources: HeldSources) -> None:
    start, engine = time.perf_counter(), tiny_engine(model())
    agent = committed(sources, engine)
    step, one_step_s = engine.step, time.perf_counter() - start

    def slow_first_step() -> Any:
        time.sleep(2 * one_step_s)  # what it touches was moved, say
        return step()

    engine.step = slow_first_step  # type: ignore[method-assign]
    (ack,) = [m for m in agent.step() if isinstance(m, Ack)]
    assert ack.command_id == 1
    assert ack.result["stall_seconds"] >= one_step_s, "twice that, less the length of a step"
    assert agent.handle(Commit(command_id=1, version=5))[-1] == ack


@pytest.mark.parametrize("kind", [Pause, Stats])
def test_a_commit_is_confirmed_before_any_other_command(
    kind: type[Command[Any]], sources: HeldSources
) -> None:
    agent = committed(sources)
    acks = [m for m in agent.handle(command(kind, 9)) if isinstance(m, Ack)]
    assert [ack.command_id for ack in acks] == [1, 9]
    assert acks[0].result["stall_seconds"] > 0


def test_a_commit_without_further_steps_is_confirmed_at_once(sources: HeldSources) -> None:
    agent = committed(sources)
    agent.handle(AbortRequest(attempts=(Attempt(request_id=0),)))
    (ack,) = [m for m in agent.poll() if isinstance(m, Ack)]
    assert ack.result["version"] == 5


class HeldLink:
    """Gives `messages`, and ends the engine once it has taken `num_turns` turns."""

    def __init__(self, *messages: Message, num_turns: int) -> None:
        self._messages, self._num_turns = list(messages), num_turns
        self.timeouts: list[float] = []
        self.sent: list[Message] = []

    def receive(self, timeout_s: float) -> list[Message]:
        self.timeouts.append(timeout_s)
        messages, self._messages = self._messages, []
        if len(self.timeouts) == self._num_turns:
            messages.append(command(Shutdown, 99))
        return messages

    def queue(self, message: Message) -> None:
        self.sent.append(message)

    def flush(self) -> None:
        """All is sent."""

    def may_step(self) -> bool:
        return True


def test_a_served_engine_ends_its_requests_and_itself_while_a_fetch_hangs(
    sources: HeldSources,
) -> None:
    agent = make_agent(fetch=sources.fetch)
    update = prepare(1, 5, sources.add(21))
    link = HeldLink(entered(), assignment(0), update, num_turns=20)
    serve(agent, link)  # type: ignore[arg-type]
    assert len(requests_of(link.sent)[0].generated_tokens) == 14
    assert refusal(link.sent, 1)
    assert link.timeouts[2] == 0.0, "there was work"
    assert 0.0 < link.timeouts[-1] < 0.1, "it looks for the end of the staging"


@pytest.mark.parametrize("fault", [MemoryError("no room"), OSError("gone"), SystemExit(3)])
def test_whatever_a_fetch_raises_is_the_vote_no(sources: HeldSources, fault: BaseException) -> None:
    agent = holding_agent(sources)
    sources.fault = fault
    agent.handle(prepare(1, 5, sources.add(21)))
    sources.free(21)
    (vote,) = staged(agent)
    assert isinstance(vote, Nack)
    assert isinstance(vote.error.to_error(), RemoteError)
    assert str(fault) in str(vote.error.to_error())
    assert send_to(agent, prepare(1, 5, sources.add(21))) == [vote], "it is not staged again"


def test_a_fetch_that_hangs_is_the_vote_no_at_the_deadline(sources: HeldSources) -> None:
    clock = Clock()
    agent = holding_agent(sources, clock)
    agent.handle(prepare(1, 5, sources.add(21), deadline_s=2.0))
    clock.now += 1.9
    assert agent.poll() == []
    clock.now += 0.1
    assert "before the deadline" in refusal(agent.poll(), 1)
    sources.free_all()
    assert not agent.poll()
    assert isinstance(agent.handle(Commit(command_id=1, version=5))[-1], Nack)
    sources.add(21)
    sources.free(21)
    assert isinstance(send_to(agent, prepare(2, 5, source_of(21)))[-1], Ack), (
        "the next one is staged"
    )


def test_a_rollback_while_fetching_is_the_vote_no_and_nothing_is_staged(
    sources: HeldSources,
) -> None:
    agent = holding_agent(sources)
    agent.handle(prepare(1, 5, sources.add(21)))
    assert not isinstance(agent.handle(Rollback(command_id=7))[0], Nack)
    assert agent.is_staging, "the rollback of another one changes nothing"
    answers = agent.handle(Rollback(command_id=1))
    assert "cancelled before" in refusal(answers, 1)
    assert isinstance(answers[-1], Ack)
    sources.free_all()
    assert agent.poll() == []
    assert agent.registration().prepared_command_id is None
    assert versions_of(agent) == [0] * 14


def test_a_newer_update_is_staged_while_the_fetch_of_an_older_one_hangs(
    sources: HeldSources,
) -> None:
    agent = holding_agent(sources)
    agent.handle(prepare(1, 5, sources.add(21)))
    assert agent.handle(prepare(1, 5, source_of(21))) == [], "repeated, it is staged once"
    sources.add(22)
    sources.free(22)
    no, yes = send_to(agent, prepare(2, 6, source_of(22)))
    assert "cancelled before" in refusal([no], 1)
    assert isinstance(yes, Ack)
    sources.free_all()
    assert agent.poll() == [], "the older one is nobody's any more"
    agent.handle(Commit(command_id=2, version=6))
    assert agent.registration().weights_checksum == yes.result["checksum"]


def test_one_update_at_a_time_uses_memory(sources: HeldSources) -> None:
    """The older one is amid its tensors when the newer one comes: it ends before that begins."""
    engine, log = tiny_engine(model()), []
    agent = holding_agent(sources, engine=engine)
    stage, begun = engine.stage_weights, threading.Event()

    def slow(tensors: NamedTensors, check: Any, checksum: str) -> Any:
        log.append("begin")
        if not begun.is_set():
            begun.set()
            while True:  # until it is cancelled
                try:
                    check()
                except WeightUpdateError:
                    log.append("end")
                    raise
        return stage(tensors, check, checksum)

    engine.stage_weights = slow  # type: ignore[method-assign]
    for seed in (21, 22):
        sources.add(seed)
        sources.free(seed)
    agent.handle(prepare(1, 5, source_of(21)))
    assert begun.wait(BOUND_S)
    no, yes = send_to(agent, prepare(2, 6, source_of(22)))
    assert isinstance(no, Nack)
    assert isinstance(yes, Ack)
    assert log == ["begin", "end", "begin"]


@pytest.mark.parametrize("kind", [Suspend, Shutdown])
def test_no_thread_reads_weights_whose_memory_is_released(
    sources: HeldSources, kind: type[Command[Any]]
) -> None:
    engine, begun, log = tiny_engine(model()), threading.Event(), []
    agent = holding_agent(sources, engine=engine)
    agent.handle(command(Pause, 7))

    def endless(_: NamedTensors, check: Any, checksum: str) -> None:
        begun.set()
        try:
            while True:
                check()
        finally:
            log.append("staging ended")

    engine.stage_weights = endless  # type: ignore[assignment, method-assign]
    for name in ("suspend", "shutdown"):
        done = getattr(engine, name)
        setattr(engine, name, lambda *a, done=done, **k: (log.append("memory"), done(*a, **k))[1])
    sources.add(21)
    sources.free(21)
    agent.handle(prepare(1, 5, source_of(21)))
    assert begun.wait(BOUND_S)
    answers = agent.handle(command(kind, 8))
    assert "cancelled before" in refusal(answers, 1)
    assert isinstance(answers[-1], Ack)
    assert log == ["staging ended", "memory"]


def test_a_new_session_while_fetching_is_the_vote_no(sources: HeldSources) -> None:
    agent = holding_agent(sources)
    agent.handle(prepare(1, 5, sources.add(21)))
    assert agent.registration().prepared_command_id is None
    assert "cancelled before" in refusal(agent.handle(entered()), 1)
    assert not agent.is_staging


@pytest.mark.parametrize("is_known", [False, True])
def test_a_vote_that_a_registration_does_not_name_is_void(
    sources: HeldSources, is_known: bool
) -> None:
    """It came between the registration and its answer: nobody is left to decide on it."""
    agent = holding_agent(sources)
    agent.handle(prepare(1, 5, sources.add(21)))
    if not is_known:
        agent.registration()
    sources.free(21)
    assert isinstance(staged(agent)[-1], Ack)
    if is_known:
        assert agent.registration().prepared_command_id == 1
    agent.handle(entered())
    said = [*agent.handle(Commit(command_id=1, version=5)), *agent.step()]
    (answer,) = [m for m in said if isinstance(m, (Ack, Nack))]
    assert isinstance(answer, Ack) is is_known


def test_a_joining_engine_handles_messages_while_it_fetches(
    sources: HeldSources,
) -> None:
    agent = holding_agent(sources)
    entry = entered(weights_version=4, weights=sources.add(21))
    assert agent.handle(entry) == []
    assert not agent.has_work
    assert isinstance(agent.handle(command(Stats, 3))[-1], Ack)
    assert agent.handle(entry) == [], "another session goes on with what is being fetched"
    sources.free(21)
    staged(agent)
    assert len(sources.threads) == 1
    assert agent.status().weights_version == 4
    agent.handle(assignment(0))
    assert versions_of(agent) == [4] * 14


def test_an_engine_closes_while_a_fetch_hangs(sources: HeldSources) -> None:
    agent = holding_agent(sources)
    agent.handle(prepare(1, 5, sources.add(21)))
    assert sources.has_begun["21"].wait(BOUND_S)
    agent.close()
    sources.free_all()
    assert agent.poll() == []


def test_a_joining_engine_stages_an_adapter_with_its_full_weights() -> None:
    weights = {name: p.detach() for name, p in model(21).named_parameters()}
    adapter = random_adapter(weights)
    expected = tiny_engine(model(21)).stage_weights(merged(weights, adapter)).checksum

    def fetch(source: WeightsSource) -> NamedTensors:
        return adapter if source.address == "4" else model(int(source.address)).state_dict()

    engine = tiny_engine(model())
    agent = make_agent(fetch=fetch, engine=engine)
    base = source_of(21)
    agent.handle(entered(weights_version=4, weights=source_of(4, expected), base_weights=base))
    staged(agent)
    assert (engine.weights_version, engine.weights_checksum()) == (4, expected)
    # The next adapter goes on the same base.
    second = random_adapter(weights, seed=2)
    full = tiny_engine(model(21)).stage_weights(merged(weights, second))
    assert engine.update_weights(second, in_flight=True).checksum == full.checksum
