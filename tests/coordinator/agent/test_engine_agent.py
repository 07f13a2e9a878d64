"""EngineAgent with a real small engine: the messages that it returns for those that it handles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.testing import assert_allclose

from rollout import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from rollout.control.commands import (
    Command,
    IncrementStaleness,
    Pause,
    Resume,
    SetGenerationEpoch,
    Shutdown,
    Suspend,
    Unpause,
)
from rollout.coordinator.agent.agent import EngineAgent
from rollout.coordinator.protocol.codec import decode, encode
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    AssignRequest,
    Attempt,
    Commit,
    Credit,
    EngineReply,
    EngineReplyPartial,
    Heartbeat,
    Nack,
    Prepare,
    Progress,
    RegisterAck,
    ReplyAck,
    Rollback,
    Sample,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
    unpack_record,
)
from rollout.errors import (
    EngineStateError,
    InvalidRequestError,
    ProtocolError,
    WeightUpdateError,
)
from rollout.requests.token_runs import TokenRun, join_runs
from rollout.weights.source import WeightsSource
from rollout.weights.update import NamedTensors
from rollout.wire import Message
from tests.tiny_models import generate_all, prompt_of, tiny_engine, tiny_model

PROMPT = prompt_of(11, seed=1)
UPDATE = "update"


@cache
def model(seed: int = 20) -> Any:
    return tiny_model("qwen3", seed=seed)


def params(index: int, num_tokens: int = 14) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=num_tokens,
        temperature=(1.0, 0.0)[index % 2],
        seed=index,
        return_log_probs=index != 2,
        return_ranks=index == 2,
        top_n_logprobs=2 if index == 1 else 0,
    )


@cache
def undisturbed() -> tuple[DynamicInferenceRequest, ...]:
    jobs = [(PROMPT, params(index)) for index in range(4)]
    return tuple(generate_all(tiny_engine(model()), jobs))


def fetch(source: WeightsSource) -> NamedTensors:
    tensors: NamedTensors = model(int(source.address)).state_dict()
    return tensors


def source_of(seed: int, checksum: str = "") -> WeightsSource:
    return WeightsSource(kind="test", address=str(seed), manifest=b"", checksum=checksum)


def make_agent(
    fetch: Callable[[WeightsSource], NamedTensors] = fetch,
    clock: Callable[[], float] = time.monotonic,
    engine: DynamicInferenceEngine | None = None,
    **config: Any,
) -> EngineAgent:
    return EngineAgent(
        engine or tiny_engine(model(), **config),
        engine_id=bytes(16),
        block_size_tokens=8,
        max_requests=8,
        settings={},
        fetch=fetch,
        clock=clock,
    )


def over_the_wire(messages: Iterable[Message]) -> list[Message]:
    """What is received: of a Progress its parts."""
    received: list[Message] = []
    for message in (decode(encode(message)) for message in messages):
        runs = message.runs.apart() if isinstance(message, Progress) else ()
        received += [EngineReplyPartial(request_id=r, tokens=run) for r, _, run in runs]
        received += [] if isinstance(message, Progress) else [message]
    return received


def send_to(agent: EngineAgent, message: Message) -> list[Message]:
    """The answers, those to what is staged beside the steps included; what it accepts besides is a
    test's own to ask for."""
    (received,) = over_the_wire([message])
    answers = over_the_wire([*agent.handle(received), *staged(agent)])
    return [m for m in answers if not isinstance(m, Credit)]


def staged(agent: EngineAgent) -> list[Message]:
    """What is answered once nothing is being staged any more."""
    answers: list[Message] = []
    for _ in range(30_000):
        answers += agent.poll()
        if not agent.is_staging:
            return answers
        time.sleep(0.001)
    raise AssertionError("staging does not end")


def steps(agent: EngineAgent, count: int = 10_000) -> list[Message]:
    outbox: list[Message] = []
    for _ in range(count):
        if not agent.has_work:
            break
        outbox += over_the_wire(agent.step())
    return outbox


def assignment(
    *indices: int, attempt: int = 0, runs: Mapping[int, TokenRun] | None = None
) -> AssignRequest:
    samples = tuple(
        Sample(
            request_id=index,
            attempt=attempt,
            sampling_params=pack_params(params(index)),
            seed=index,
            resumed=(runs or {}).get(index),
        )
        for index in indices
    )
    return AssignRequest(samples=samples, prompt_tokens=np.array(PROMPT, dtype=np.int32))


def entered(*keep: Attempt, state: str = "RUNNING", **changes: Any) -> RegisterAck:
    fields = {
        "coordinator_id": bytes(16),
        "lease_s": 1.0,
        "heartbeat_s": 0.1,
        "report_interval_tokens": 3,
        "weights_version": 0,
    }
    return RegisterAck(state=state, keep=keep, **(fields | changes))


def command(kind: type[Command[Any]], command_id: int, **arguments: Any) -> Command[Any]:
    return kind(command_id=command_id, **arguments)


def requests_of(messages: Iterable[Message]) -> dict[int, DynamicInferenceRequest]:
    replies = [m for m in messages if isinstance(m, EngineReply)]
    assert len({reply.request_id for reply in replies}) == len(replies), "each ends once"
    return {
        reply.request_id: unpack_record(reply.record).merge() for reply in replies if reply.record
    }


def reported(messages: Iterable[Message], request_id: int) -> TokenRun | None:
    """All that partial replies have reported of a request, as one run."""
    runs = [
        m.tokens
        for m in messages
        if isinstance(m, EngineReplyPartial) and m.request_id == request_id
    ]
    return join_runs(runs) if runs else None


def assert_as_undisturbed(requests: Mapping[int, DynamicInferenceRequest]) -> None:
    for index, request in requests.items():
        reference = undisturbed()[index]
        assert request.generated_tokens == reference.generated_tokens
        assert request.finish_reason == reference.finish_reason
        assert (request.generated_log_probs is None) == (reference.generated_log_probs is None)
        if reference.generated_log_probs is not None:
            assert_allclose(request.generated_log_probs, reference.generated_log_probs, atol=1e-4)
        assert request.generated_ranks == reference.generated_ranks
        best = [set(row) for row in reference.generated_top_n_logprobs or []]
        assert [set(row) for row in request.generated_top_n_logprobs or []] == best


@pytest.mark.parametrize("interval", [1, 4, 100])
def test_a_group_is_run_reported_and_ended(interval: int) -> None:
    agent = make_agent()
    send_to(agent, entered(report_interval_tokens=interval))
    assert send_to(agent, assignment(0, 1, 2, 3)) == []
    outbox = steps(agent)
    requests = requests_of(outbox)
    assert sorted(requests) == [0, 1, 2, 3]
    assert_as_undisturbed(requests)
    for index in requests:
        run = reported(outbox, index)
        num_reported = 0 if run is None else len(run)
        assert requests[index].generated_tokens[:num_reported] == (
            [] if run is None else run.token_ids.tolist()
        )
        assert 14 - num_reported <= interval


@pytest.mark.parametrize("num_steps", [1, 5, 9])
def test_a_request_resumes_on_another_engine_from_the_last_reported_token(num_steps: int) -> None:
    first, second = make_agent(), make_agent(weights_version=3)
    send_to(first, entered())
    send_to(first, assignment(0, 1, 2, 3))
    outbox = steps(first, num_steps)
    runs = {index: run for index in range(4) if (run := reported(outbox, index)) is not None}
    send_to(second, assignment(0, 1, 2, 3, attempt=1, runs=runs))
    requests = requests_of(steps(second))
    assert sorted(requests) == [0, 1, 2, 3]
    assert_as_undisturbed(requests)
    for index, request in requests.items():
        num_old = len(runs.get(index, ()))
        assert num_steps - num_old < 3
        assert request.policy_versions.tolist() == [0] * num_old + [3] * (14 - num_old)
        assert request.completed_at_version == 3


def test_samples_without_a_seed_differ_on_engines_of_one_seed_and_go_on_elsewhere() -> None:
    free = SamplingParams(num_tokens_to_generate=14, return_log_probs=True)

    def unseeded(index: int, attempt: int = 0, run: TokenRun | None = None) -> AssignRequest:
        sample = Sample(
            request_id=index, attempt=attempt, sampling_params=pack_params(free), resumed=run
        )
        return AssignRequest(samples=(sample,), prompt_tokens=np.array(PROMPT, dtype=np.int32))

    first, second = make_agent(seed=3), make_agent(seed=3)
    outboxes = []
    for index, agent in enumerate((first, second)):
        send_to(agent, entered())
        send_to(agent, unseeded(index))
        outboxes.append([*steps(agent, 9)])
    run = reported(outboxes[0], 0)
    ended = [requests_of(steps(agent))[i] for i, agent in enumerate((first, second))]
    assert ended[0].generated_tokens != ended[1].generated_tokens
    send_to(second, unseeded(0, attempt=1, run=run))
    again = requests_of(steps(second))[0]
    assert again.generated_tokens == ended[0].generated_tokens


def test_a_repeated_assignment_changes_nothing_and_a_later_attempt_replaces() -> None:
    agent = make_agent()
    send_to(agent, assignment(0))
    steps(agent, 2)
    assert send_to(agent, assignment(0)) == []
    assert send_to(agent, AbortRequest(attempts=(Attempt(request_id=0, attempt=1),))) == []
    send_to(agent, assignment(0, attempt=2))
    outbox = steps(agent)
    (reply,) = [m for m in outbox if isinstance(m, EngineReply)]
    assert reply.attempt == 2
    assert_as_undisturbed(requests_of(outbox))
    again = send_to(agent, assignment(0, attempt=2))
    assert [m.record for m in again if isinstance(m, EngineReply)] == [reply.record]
    send_to(agent, ReplyAck(attempts=(Attempt(request_id=0, attempt=2),)))
    assert agent.registration().running == ()


def test_an_aborted_attempt_ends_with_the_tokens_it_has() -> None:
    agent = make_agent()
    send_to(agent, assignment(0, 1))
    steps(agent, 4)
    (reply,) = send_to(agent, AbortRequest(attempts=(Attempt(request_id=0),)))
    assert isinstance(reply, EngineReply)
    assert reply.is_failed
    request = requests_of([reply])[0]
    assert request.finish_reason == "abort"
    assert request.generated_tokens == undisturbed()[0].generated_tokens[:4]
    assert_as_undisturbed(requests_of(steps(agent)))


def test_a_request_that_cannot_run_fails_alone() -> None:
    agent = make_agent()
    send_to(agent, assignment(1))
    bad = AssignRequest(
        samples=assignment(5, 6).samples, prompt_tokens=np.array([10_000], dtype=np.int32)
    )
    replies = send_to(agent, bad)
    assert [m.request_id for m in replies if isinstance(m, EngineReply)] == [5, 6]
    for reply in replies:
        assert isinstance(reply, EngineReply)
        assert reply.error is not None
        assert isinstance(reply.error.to_error(), InvalidRequestError)
    assert_as_undisturbed(requests_of(steps(agent)))
    with pytest.raises(ProtocolError, match="Heartbeat is not a message for an engine"):
        agent.handle(Heartbeat(sequence=1))


def test_an_engine_that_registers_again_keeps_only_current_attempts() -> None:
    agent = make_agent()
    send_to(agent, assignment(0, 1, 2))
    steps(agent, 3)
    held = {(a.request_id, a.attempt) for a in agent.registration().running}
    assert held == {(0, 0), (1, 0), (2, 0)}
    send_to(agent, entered(Attempt(request_id=1)))
    requests = requests_of(steps(agent))
    assert sorted(requests) == [1]
    assert_as_undisturbed(requests)


@pytest.mark.parametrize("state", ["RUNNING", "PAUSED", "SUSPENDED"])
@pytest.mark.parametrize("before", ["RUNNING", "PAUSED", "SUSPENDED"])
def test_an_engine_enters_the_fleets_state_and_weights(before: str, state: str) -> None:
    agent = make_agent()
    send_to(agent, entered(state=before))
    ack = entered(state=state, weights_version=4, weights=source_of(21))
    send_to(agent, ack)
    registration = agent.registration() if state != "SUSPENDED" else None
    assert agent.status().state == state
    assert agent.status().weights_version == 4
    if registration is not None:
        assert registration.weights_checksum == tiny_engine(model(21)).weights_checksum()


def test_commands_are_done_once_and_refused_with_their_class() -> None:
    agent = make_agent()
    send_to(agent, assignment(0))
    steps(agent, 2)
    *_, ack = send_to(agent, command(Pause, 1))
    assert isinstance(ack, Ack)
    assert not agent.has_work
    (nack,) = send_to(agent, command(Suspend, 2, mode="nonsense"))
    assert isinstance(nack, Nack)
    assert "nonsense" in str(nack.error.to_error())
    (ack,) = send_to(agent, command(Suspend, 3, mode="offload"))
    assert isinstance(ack, Ack)
    assert ack.result["bytes_released"] > 0
    (nack,) = send_to(agent, command(Unpause, 4))
    assert isinstance(nack, Nack)
    assert isinstance(nack.error.to_error(), EngineStateError)
    send_to(agent, command(SetGenerationEpoch, 5, version=7))
    send_to(agent, command(IncrementStaleness, 6))
    assert agent.status().weights_version == 8
    send_to(agent, command(Resume, 7))
    send_to(agent, command(Unpause, 8))
    (again,) = [m for m in send_to(agent, command(Unpause, 4)) if isinstance(m, Nack)]
    assert isinstance(again.error.to_error(), EngineStateError), (
        "a repeated command gets its answer"
    )
    requests = requests_of(steps(agent))
    assert requests[0].generated_tokens == undisturbed()[0].generated_tokens
    send_to(agent, command(Shutdown, 10))
    assert agent.is_shut_down


def test_weights_change_on_commit_and_on_nothing_else() -> None:
    agent = make_agent()
    before = agent.registration().weights_checksum
    announced = tiny_engine(model(21)).weights_checksum()

    def prepare(command_id: int, version: int, source: WeightsSource) -> Sequence[Message]:
        return send_to(
            agent,
            Prepare(command_id=command_id, version=version, source=source, in_flight=True),
        )

    (vote,) = prepare(1, 5, source_of(21, "0123"))
    assert isinstance(vote, Nack)
    assert isinstance(vote.error.to_error(), WeightUpdateError)
    assert "checksum" in str(vote.error.to_error())
    assert isinstance(prepare(2, 0, source_of(21))[0], Nack), "no version below the served one"
    assert isinstance(send_to(agent, Commit(command_id=1, version=5))[0], Nack)
    send_to(agent, assignment(0))
    steps(agent, 3)
    *_, vote = prepare(3, 5, source_of(21, announced))
    assert isinstance(vote, Ack)
    steps(agent, 2)
    assert isinstance(send_to(agent, Rollback(command_id=9))[-1], Ack)
    assert agent.registration().weights_checksum == before
    *_, done = [*send_to(agent, Commit(command_id=3, version=5)), *steps(agent, 1)]
    assert isinstance(done, Ack)
    assert done.result["version"] == 5
    assert agent.registration().weights_checksum == announced
    request = requests_of(steps(agent))[0]
    assert request.policy_versions.tolist() == [0] * 5 + [5] * 9
    assert send_to(agent, Commit(command_id=3, version=5)) == [done], "a repeated one is not done"
    prepare(4, 6, source_of(20))
    send_to(agent, Rollback(command_id=4))
    assert isinstance(send_to(agent, Commit(command_id=4, version=6))[-1], Nack)
    assert agent.registration().weights_checksum == announced


def test_prompt_log_probs_are_kept_when_their_engine_fails() -> None:
    wanted = replace(params(0), skip_prompt_log_probs=False)
    config = {"materialize_only_last_token_logits": False}
    whole = generate_all(tiny_engine(model(), **config), [(PROMPT, wanted)])[0]
    agent, sample = make_agent(**config), sample_of(wanted)
    send_to(agent, assign(sample))
    begun = [m.tokens for m in steps(agent, 6) if isinstance(m, EngineReplyPartial)]
    send_to(other := make_agent(max_tokens=4, **config), assign(sample, join_runs(begun)))
    request = requests_of(steps(other))[0]
    assert request.generated_tokens == whole.generated_tokens
    assert request.prompt_log_probs is not None
    assert_allclose(request.prompt_log_probs, whole.prompt_log_probs, atol=1e-4)


def sample_of(wanted: SamplingParams) -> Sample:
    return Sample(request_id=0, sampling_params=pack_params(wanted), seed=wanted.seed)


def assign(sample: Sample, resumed: TokenRun | None = None) -> AssignRequest:
    sample = structs.replace(sample, resumed=resumed)
    return AssignRequest(samples=(sample,), prompt_tokens=np.array(PROMPT, np.int32))


def credit_in(messages: Iterable[Message]) -> list[int]:
    return [message.num_granted for message in messages if isinstance(message, Credit)]


def test_an_agent_accepts_as_many_as_may_wait_and_more_as_they_begin_and_end() -> None:
    agent = make_agent(max_requests=2)  # it says that it runs 8, and so holds 16
    ack = RegisterAck(
        coordinator_id=bytes(16),
        state="RUNNING",
        lease_s=9,
        heartbeat_s=1,
        report_interval_tokens=4,
        weights_version=0,
    )
    assert credit_in(agent.handle(ack)) == [8]
    assert credit_in(agent.handle(assignment(0, 1, 2, 3))) == []  # four wait, four may still come
    assert credit_in(agent.step()) == [10]  # two of them have begun
    agent.handle(AbortRequest(attempts=(Attempt(request_id=2),)))
    outbox = steps(agent)
    assert credit_in(outbox)[-1] == 4 + 8  # all have ended, or been aborted
    assert credit_in(agent.handle(ack)) == [8], "a registration begins to count again"
