"""InferenceClient against a scripted coordinator, over real sockets; and what it checks itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord, SamplingParams, Status
from rollout.coordinator.client import inference_client
from rollout.coordinator.client.inference_client import ClientStateError, InferenceClient
from rollout.coordinator.client.tokens import TokenSequencer, rest_of
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.coordinator.protocol.headers import PROTOCOL_VERSION, Headers
from rollout.coordinator.protocol.messages import (
    COMMAND_TYPES,
    AbortRequest,
    Ack,
    Attempt,
    Command,
    Connect,
    Disconnect,
    EngineReply,
    EngineReplyPartial,
    Heartbeat,
    Message,
    ProtocolVersionError,
    ReplyAck,
    SubmitRequest,
    TokenRun,
    UpdateWeights,
    WeightsSource,
    WireError,
    nack_of,
)
from rollout.coordinator.protocol.packed import (
    pack_record,
)
from rollout.errors import (
    BlockOverflowError,
    DetokenizeError,
    EngineStateError,
    InvalidRequestError,
    ProtocolError,
    WeightUpdateError,
)
from rollout.step.seeds import mix_seed
from rollout.version_spans import VersionSpans
from tests.coordinator.message_strategies import run_of
from tests.coordinator.scripted_router import (
    BOUND_S,
    LEASE_S,
    Script,
    ScriptedRouter,
    connect_ack,
    polite,
    politely,
)

PARAMS = SamplingParams(num_tokens_to_generate=8)
SOURCE = WeightsSource(kind="shared_memory", address="here", manifest={}, checksum="abc")


def record_of(prompt: Sequence[int], num_tokens: int = 3) -> DynamicInferenceRequestRecord:
    """Token k is k. Under an id that is not the client's."""
    spans = VersionSpans()
    spans.append(len(prompt) + num_tokens, 0)
    request = DynamicInferenceRequest(
        request_id=10**6,
        prompt_tokens=list(prompt),
        generated_tokens=list(range(num_tokens)),
        status=Status.COMPLETED,
        policy_spans=spans,
        context_kv_version_min=[0] * num_tokens,
        context_kv_version_mean=[0.0] * num_tokens,
    )
    return DynamicInferenceRequestRecord.from_request(request)


def reply_to(request_id: int, prompt: Sequence[int] = (1, 2), **changes: Any) -> EngineReply:
    fields = {"request_id": request_id, "record": pack_record(record_of(prompt))}
    return EngineReply(**{**fields, **changes})


def obedient(message: Message) -> Sequence[Message] | None:
    """Answers requests and commands at once."""
    if isinstance(message, SubmitRequest):
        return [reply_to(sample.request_id, message.prompt_tokens) for sample in message.samples]
    if isinstance(message, (Command, UpdateWeights)):
        return [Ack(command_id=message.command_id, result={"0": {"seconds": 0.5}})]
    return polite(message)


def run(script: Script, test: Callable[[InferenceClient, ScriptedRouter], Awaitable[None]]) -> None:
    """Run `test` with a started client. Nothing may be left of it: no task, no thread, no warning,
    nothing that asyncio reports."""
    reports: list[dict[str, Any]] = []

    async def started(router: ScriptedRouter) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reports.append(context))
        async with InferenceClient(router.port) as client:
            await asyncio.wait_for(test(client, router), BOUND_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert client.socket.closed
        assert not client.completion_futures

    with leaving_no_warning(), ScriptedRouter(script) as router:
        num_threads = threading.active_count()
        asyncio.run(started(router))
        assert threading.active_count() == num_threads
    assert reports == []


def run_alone(test: Coroutine[Any, Any, None]) -> None:
    with leaving_no_warning():
        asyncio.run(test)


@contextlib.contextmanager
def leaving_no_warning() -> Iterator[None]:
    """A warning is an error, also of what is collected at the end. Nothing is before, so that all
    of the test is young then: to look at every object of the process takes half a second."""
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
            gc.collect(0)
    finally:
        gc.enable()


async def heard(router: ScriptedRouter, message_type: type, num: int = 1) -> list[Any]:
    return await asyncio.to_thread(router.wait_for, message_type, num)


def acknowledged(router: ScriptedRouter) -> list[int]:
    acks = [message for message in router.received if isinstance(message, ReplyAck)]
    return [named.request_id for ack in acks for named in ack.attempts]


async def becomes(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


# ---- handshake


def test_a_client_says_who_it_is_and_learns_of_the_fleet():
    async def test(client, router):
        assert router.received[0] == Connect(client_id=client.client_id)
        assert client.coordinator == connect_ack()
        assert not client.listener_task.done()

    run(polite, test)


def test_nobody_at_the_address_is_said_clearly():
    async def test():
        with ScriptedRouter() as router:
            router.vanish()
            client = InferenceClient(router.port)
            with pytest.raises(CoordinatorLostError, match=f"no coordinator.*{router.port} after"):
                await client.start(timeout_s=0.2)
            assert client.socket.closed
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run_alone(test())


def test_another_version_is_refused_with_the_reason():
    reason = ProtocolError("the peer speaks protocol 1, this process 2")

    async def test(script, error):
        with ScriptedRouter(script) as router, pytest.raises(error, match=r"speaks protocol"):
            await InferenceClient(router.port).start()

    run_alone(test(lambda m: [nack_of(None, reason)], ProtocolError))
    other = connect_ack(protocol_version=PROTOCOL_VERSION + 1)
    run_alone(test(lambda m: [other], ProtocolVersionError))


def test_a_client_is_of_one_start_and_one_loop():
    async def test(client, router):
        with pytest.raises(ClientStateError, match="started already"):
            await client.start()
        with pytest.raises(ClientStateError, match="event loop"):
            await asyncio.to_thread(client.add_request, [1], PARAMS)
        with pytest.raises(ClientStateError, match="event loop"):
            await asyncio.to_thread(client.pause_engines)
        client.stop()
        client.stop()
        with pytest.raises(ClientStateError, match="stopped"):
            client.add_request([1], PARAMS)
        with pytest.raises(ClientStateError, match="stopped"):
            await client.start()

    run(polite, test)


def test_a_client_that_was_not_started_says_so():
    client = InferenceClient(1234)
    for use in (
        lambda: client.add_request([1], PARAMS),
        lambda: client.stream([1], PARAMS),
        lambda: client.abort(0),
        lambda: client.pause_engines(),
        lambda: client.update_weights(SOURCE),
    ):
        with pytest.raises(ClientStateError, match="not started"):
            use()
    client.stop()


# ---- requests


def test_a_request_comes_back_under_the_id_of_its_client_with_its_text():
    def script(message):
        if isinstance(message, SubmitRequest):
            return [reply_to(message.samples[0].request_id, generated_text="abc")]
        return None

    async def test(client, router):
        for request_id in range(3):
            assert client.next_request_id == request_id
            future = client.add_request([1, 2], PARAMS, priority=4, deadline_s=30)
            assert client.completion_futures == {request_id: future}
            record = await future
            assert record.request_id == future.request_id == request_id
            assert record.merge().generated_text == "abc"
            assert record.merge().generated_tokens == [0, 1, 2]
        await becomes(lambda: acknowledged(router) == [0, 1, 2])
        submitted = router.wait_for(SubmitRequest, 3)[0]
        assert submitted.prompt_tokens.tolist() == [1, 2]
        assert (submitted.priority, submitted.deadline_s, submitted.streaming) == (4, 30.0, False)

    run(politely(script), test)


def test_the_text_of_a_record_of_several_segments_is_not_repeated():
    record = record_of([1, 2])
    record.checkpoint()
    record.current.generated_tokens = [7]
    packed = pack_record(record)

    def script(message):
        if isinstance(message, SubmitRequest):
            return [EngineReply(request_id=0, record=packed, generated_text="abcd")]
        return None

    async def test(client, router):
        assert (await client.add_request("hello", PARAMS)).merge().generated_text == "abcd"

    run(politely(script), test)


def test_a_thousand_requests_at_once_find_their_way():
    async def test(client, router):
        prompts = [[i, i + 1] for i in range(1000)]
        records = await asyncio.gather(*[client.add_request(p, PARAMS) for p in prompts])
        assert [record.request_id for record in records] == list(range(1000))
        assert [record[0].prompt_tokens.tolist() for record in records] == prompts
        await becomes(lambda: len(acknowledged(router)) == 1000)
        assert sorted(acknowledged(router)) == list(range(1000))

    run(obedient, test)


def test_replies_are_acknowledged_together_and_soon():
    async def test(client, router):
        futures = [client.add_request([1], PARAMS) for _ in range(70)]
        await heard(router, SubmitRequest, 70)
        router.send(*(reply_to(future.request_id) for future in futures[:-1]))
        await asyncio.gather(*futures[:-1])
        await becomes(lambda: acknowledged(router) == list(range(69)))
        assert len(router.wait_for(ReplyAck)) < 10
        router.send(reply_to(69))
        await futures[-1]
        await becomes(lambda: acknowledged(router)[69:] == [69])

    run(polite, test)


def test_seeds_are_fixed_by_the_client():
    async def seeds(**options):
        with ScriptedRouter(obedient) as router:
            async with InferenceClient(router.port, **options) as client:
                client.add_request([1], PARAMS)
                client.add_request([1], SamplingParams(seed=11))
                client.add_request([1], SamplingParams(seed=11), seed=12)
                await asyncio.gather(*client.add_group([1], [PARAMS, PARAMS], seeds=[13, None]))
            return [s.seed for m in router.wait_for(SubmitRequest, 4) for s in m.samples]

    first, second = asyncio.run(seeds(seed=5)), asyncio.run(seeds(seed=5))
    assert first == second == [mix_seed(5, 0), 11, 12, 13, mix_seed(5, 4)]
    assert asyncio.run(seeds()) != asyncio.run(seeds())  # two clients never share their noise


def test_a_group_is_one_submission_with_a_future_per_sample():
    def script(message):
        if isinstance(message, SubmitRequest):
            return [reply_to(sample.request_id) for sample in reversed(message.samples)]
        return None

    async def test(client, router):
        futures = client.add_group("hi", [PARAMS] * 5)
        records = await asyncio.gather(*futures)
        assert [r.request_id for r in records] == [f.request_id for f in futures] == [*range(5)]
        assert len(router.wait_for(SubmitRequest)) == 1

    run(politely(script), test)


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        (5, {}, "text or token ids, not 5"),
        (np.array(5), {}, "text or token ids, not array"),
        ([-1], {}, "token id -1"),
        ([2**31], {}, "token id 2147483648"),
        ([2**70], {}, "flat list"),
        ([1.5], {}, "flat list"),
        ([[1], [2]], {}, "flat list"),
        ([[1], [2, 3]], {}, "token ids"),
        ([1], {"seed": 2**64}, "seed="),
        ([1], {"seed": "x"}, "seed="),
        ([1], {"priority": 1.5}, "priority="),
        ([1], {"deadline_s": -1}, "deadline_s="),
        ([1], {"deadline_s": float("nan")}, "deadline_s="),
    ],
)
def test_a_malformed_request_raises_before_anything_is_sent(prompt, options, named):
    async def test(client, router):
        with pytest.raises(InvalidRequestError, match=named):
            client.add_request(prompt, PARAMS, **options)
        assert client.next_request_id == 0
        assert not client.completion_futures

    run(polite, test)


def test_a_group_must_have_samples_params_and_as_many_seeds():
    async def test(client, router):
        with pytest.raises(InvalidRequestError, match="at least one"):
            client.add_group([1], [])
        with pytest.raises(InvalidRequestError, match="2 seeds for 1"):
            client.add_group([1], [PARAMS], seeds=[1, 2])
        with pytest.raises(InvalidRequestError, match="expected SamplingParams, got dict"):
            client.add_request([1], {"temperature": 1.0})

    run(polite, test)


def test_a_failed_record_is_a_result_and_an_error_without_one_is_raised():
    failed = record_of([1])
    failed.current.status = Status.FAILED
    answers = {
        0: EngineReply(request_id=0, record=pack_record(failed), is_failed=True),
        1: EngineReply(
            request_id=1, error=WireError.of(BlockOverflowError(7, "no block")), is_failed=True
        ),
        2: EngineReply(request_id=2, record=b"\xc1"),
        3: EngineReply(request_id=3, record=pack_record(DynamicInferenceRequestRecord())),
    }

    def script(message):
        if isinstance(message, SubmitRequest):
            return [answers[message.samples[0].request_id]]
        return None

    async def test(client, router):
        futures = [client.add_request([1], PARAMS) for _ in range(4)]
        assert (await futures[0]).current.failed()
        with pytest.raises(BlockOverflowError, match="no block"):
            await futures[1]
        with pytest.raises(ProtocolError, match="msgpack"):
            await futures[2]
        with pytest.raises(ProtocolError, match="no segment"):
            await futures[3]
        await becomes(lambda: len(acknowledged(router)) == 4)

    run(politely(script), test)


def test_a_text_error_that_the_record_tells_of_is_not_added_again():
    error = DetokenizeError("no text")
    told, untold = record_of([1]), record_of([1])
    told.current.add_text_error(error)

    def script(message):
        if isinstance(message, SubmitRequest):
            request_id = message.samples[0].request_id
            packed = pack_record([told, untold][request_id])
            return [EngineReply(request_id=request_id, record=packed, error=WireError.of(error))]
        return None

    async def test(client, router):
        for _ in range(2):
            events = (await client.add_request([1], PARAMS)).current.events
            assert [type(event.payload) for event in events].count(DetokenizeError) == 1

    run(politely(script), test)


def test_a_cancelled_future_aborts_its_request_and_others_go_on():
    async def test(client, router):
        futures = client.add_group([1], [PARAMS] * 3)
        futures[0].cancel()
        futures[2].cancel()
        aborted = (await heard(router, AbortRequest))[0]
        assert aborted.attempts == (Attempt(request_id=0), Attempt(request_id=2))
        router.send(reply_to(0), reply_to(2), reply_to(1))
        assert (await futures[1]).request_id == 1
        await becomes(lambda: acknowledged(router) == [0, 2, 1])

    run(polite, test)


def test_an_aborted_request_resolves_to_what_it_has():
    def script(message):
        if isinstance(message, AbortRequest):
            return [reply_to(named.request_id, is_failed=True) for named in message.attempts]
        return None

    async def test(client, router):
        future = client.add_request([1], PARAMS)
        client.abort(future.request_id)
        client.abort(future.request_id)
        assert (await future).merge().generated_tokens == [0, 1, 2]
        client.abort(future.request_id)  # it has ended
        client.abort(99)  # there is none
        last = client.add_request([1], PARAMS)
        client.abort(last.request_id)
        await last  # and whatever was sent before it has arrived
        aborted = [named.request_id for m in router.wait_for(AbortRequest) for named in m.attempts]
        assert aborted == [future.request_id, last.request_id]

    run(politely(script), test)


def test_a_reply_counts_once():
    async def test(client, router):
        future = client.add_request([1, 2], PARAMS)
        await heard(router, SubmitRequest)
        router.send(reply_to(0), reply_to(0, prompt=(9,)), reply_to(77))
        assert (await future)[0].prompt_tokens.tolist() == [1, 2]
        await becomes(lambda: len(acknowledged(router)) == 3)

    run(polite, test)


# ---- streams


def pieces_of(num_tokens: int) -> st.SearchStrategy[list[TokenRun]]:
    cut = st.tuples(st.integers(0, num_tokens), st.integers(0, num_tokens)).map(sorted)
    return st.lists(cut, max_size=12).map(
        lambda cuts: (
            [run_of(num_tokens).from_offset(a) for a, _ in cuts]
            + [head(run_of(num_tokens), b).from_offset(a) for a, b in cuts]
        )
    )


def head(run: TokenRun, end: int) -> TokenRun:
    return run_of(end - run.offset)


@given(pieces_of(12).flatmap(st.permutations))
def test_pieces_in_any_order_give_each_token_once_in_order(pieces):
    sequencer, tokens, reached = TokenSequencer(), [], 0
    for index, piece in enumerate(pieces):
        for ready in sequencer.add(piece):
            assert ready.offset == len(tokens)
            tokens += ready.token_ids.tolist()
        covered = {k for p in pieces[: index + 1] for k in range(p.offset, p.end)}
        while reached in covered:
            reached += 1
        assert len(tokens) == sequencer.num_tokens == reached
    assert tokens == list(range(len(tokens)))


def test_the_rest_of_a_record_carries_what_was_stamped_on_it():
    record = record_of([5, 6], num_tokens=4)
    record.current.policy_spans = VersionSpans()
    record.current.policy_spans.append(4, 1)
    record.current.policy_spans.append(2, 3)
    record.current.generated_log_probs = [-1.0, -2.0, -3.0, -4.0]
    rest = rest_of(record, 1)
    assert (rest.offset, rest.token_ids.tolist()) == (1, [1, 2, 3])
    assert rest.policy_versions.tolist() == [1, 3, 3]
    assert rest.log_probs.tolist() == [-2.0, -3.0, -4.0]
    assert rest_of(record, 4) is None


def partial(start: int, end: int) -> EngineReplyPartial:
    return EngineReplyPartial(request_id=0, tokens=run_of(end).from_offset(start))


@pytest.mark.parametrize(
    "partials",
    [
        [(0, 2), (2, 5), (5, 8)],
        [(0, 2), (0, 2), (1, 4), (2, 5)],
        [(2, 5), (0, 2), (4, 8), (3, 6)],
        [(3, 5)],
        [],
    ],
)
def test_a_stream_gives_each_token_once_in_order_then_the_record(partials):
    def script(message):
        if isinstance(message, SubmitRequest):
            assert message.streaming
            end = reply_to(0, record=pack_record(record_of([1], num_tokens=8)))
            return [*[partial(*bounds) for bounds in partials], end]
        return None

    async def test(client, router):
        *pieces, record = [piece async for piece in client.stream([1], PARAMS)]
        assert [k for piece in pieces for k in piece.token_ids.tolist()] == list(range(8))
        assert record.merge().generated_tokens == list(range(8))

    run(politely(script), test)


def test_a_stream_gives_tokens_as_they_come_and_aborts_when_it_is_left():
    async def test(client, router):
        stream = client.stream([1], PARAMS)
        assert stream.request_id == 0
        await heard(router, SubmitRequest)
        router.send(partial(0, 2))
        assert (await stream.__anext__()).token_ids.tolist() == [0, 1]
        router.send(partial(2, 3))
        async for piece in stream:
            assert piece.token_ids.tolist() == [2]
            break
        await stream.aclose()
        assert (await heard(router, AbortRequest))[0].attempts == (Attempt(request_id=0),)
        router.send(reply_to(0))

    run(polite, test)


def test_a_stream_that_nobody_has_read_is_aborted_when_closed():
    async def test(client, router):
        await client.stream([1], PARAMS).aclose()
        assert (await heard(router, AbortRequest))[0].attempts == (Attempt(request_id=0),)
        router.send(reply_to(0))

    run(polite, test)


def test_a_stream_that_fails_raises_after_its_last_piece():
    error = WireError.of(BlockOverflowError(0, "no block"))

    def script(message):
        if isinstance(message, SubmitRequest):
            return [partial(0, 2), EngineReply(request_id=0, error=error, is_failed=True)]
        return None

    async def test(client, router):
        stream = client.stream([1], PARAMS)
        assert (await stream.__anext__()).token_ids.tolist() == [0, 1]
        with pytest.raises(BlockOverflowError, match="no block"):
            await stream.__anext__()

    run(politely(script), test)


# ---- commands


def test_each_verb_sends_its_command_and_resolves_to_the_result():
    async def test(client, router):
        verbs = [
            (client.pause_engines, (), Headers.PAUSE, {}),
            (
                client.suspend_engines,
                ("offload", ("kv_cache", "weights"), True),
                Headers.SUSPEND,
                {"discard_weights": True, "mode": "offload", "release": ["kv_cache", "weights"]},
            ),
            (client.suspend_engines, (), Headers.SUSPEND, {"discard_weights": False}),
            (client.resume_engines, ("weights",), Headers.RESUME, {"only": "weights"}),
            (client.resume_engines, (), Headers.RESUME, {}),
            (client.set_generation_epoch, (7,), Headers.SET_GENERATION_EPOCH, {"version": 7}),
            (client.increment_staleness, (), Headers.INCREMENT_STALENESS, {}),
            (client.unpause_engines, (), Headers.UNPAUSE, {}),
            (client.stop_engines, (), Headers.STOP, {}),
            (client.shutdown_engines, (), Headers.SHUTDOWN, {}),
        ]
        for index, (verb, arguments, header, sent) in enumerate(verbs):
            assert await verb(*arguments, deadline_s=9) == {"0": {"seconds": 0.5}}
            assert router.wait_for(Command, index + 1)[-1] == COMMAND_TYPES[header](
                command_id=index, arguments=sent, deadline_s=9.0
            )
        assert await client.update_weights(SOURCE, version=8, in_flight=True)
        assert router.wait_for(UpdateWeights)[0] == UpdateWeights(
            command_id=len(verbs), source=SOURCE, version=8, in_flight=True, deadline_s=600.0
        )

    run(obedient, test)


@pytest.mark.parametrize("error_type", [EngineStateError, WeightUpdateError, ProtocolError])
def test_a_refusal_is_raised_with_its_class(error_type):
    def script(message):
        if isinstance(message, Command):
            return [nack_of(message.command_id, error_type("rank 1 is RUNNING"))]
        return None

    async def test(client, router):
        with pytest.raises(error_type, match="rank 1 is RUNNING"):
            await client.resume_engines()

    run(politely(script), test)


def test_futures_that_nobody_looks_at_warn_nobody():
    def script(message):
        if isinstance(message, Command) and message.command_id % 2:
            return [nack_of(message.command_id, EngineStateError("no"))]
        return None

    async def test(client, router):
        for _ in range(4):
            client.pause_engines()  # half are refused, half never answered
        client.update_weights(SOURCE)
        client.add_request([1], PARAMS)
        await heard(router, Command, 4)
        await asyncio.sleep(0.1)
        gc.collect(0)

    run(politely(script), test)


def test_a_client_waits_for_as_long_as_its_coordinator_may_need_after_a_deadline():
    limits = CoordinatorLimits()
    coordinators_grace_s = max(limits.commit_grace_s, limits.abort_grace_s)
    assert coordinators_grace_s < inference_client._GRACE_S


def test_what_is_never_answered_fails_soon_after_its_deadline(monkeypatch):
    monkeypatch.setattr("rollout.coordinator.client.inference_client._GRACE_S", 0.1)

    async def test(client, router):
        command = client.pause_engines(deadline_s=0.1)
        request = client.add_request([1], PARAMS, deadline_s=0.1)
        with pytest.raises(CoordinatorLostError, match=r"PAUSE has no answer after 0\.2 s"):
            await command
        with pytest.raises(CoordinatorLostError, match="request 0 has no reply"):
            await request
        assert (await heard(router, AbortRequest))[0].attempts == (Attempt(request_id=0),)
        router.send(Ack(command_id=0), reply_to(0))  # too late, and no harm
        await heard(router, ReplyAck)

    run(polite, test)


# ---- liveness


def test_heartbeats_are_sent_as_the_coordinator_wants():
    async def test(client, router):
        beats = await heard(router, Heartbeat, 10)
        assert [beat.sequence for beat in beats[:10]] == list(range(1, 11))
        assert beats[0].status is None

    run(polite, test)


def test_a_coordinator_that_is_back_in_time_is_told_everything_again():
    async def test(client, router):
        done = client.add_request([5], PARAMS)
        await heard(router, SubmitRequest)
        router.send(reply_to(0))
        await done
        group = client.add_group([1, 2], [PARAMS] * 3, deadline_s=50)
        command = client.pause_engines()
        await heard(router, Command)
        router.send(reply_to(2))
        await group[1]
        router.vanish()
        while_away = client.add_request([3], PARAMS)
        router.received.clear()
        router.come_back()
        first, second = await heard(router, SubmitRequest, 2)
        assert [s.request_id for s in first.samples] == [1, 3]
        assert 0 < first.deadline_s < 50
        assert [s.request_id for s in second.samples] == [while_away.request_id]
        assert [c.command_id for c in await heard(router, Command)] == [0]
        router.send(Ack(command_id=0), *[reply_to(i) for i in (1, 3, 4)])
        assert await command == {}
        await asyncio.gather(*group, while_away)

    run(polite, test)


def test_another_life_of_the_coordinator_gets_the_requests_and_not_the_commands():
    async def test(client, router):
        plain = client.add_request([1], PARAMS)
        fresh, begun = client.stream([2], PARAMS), client.stream([3], PARAMS)
        command = client.increment_staleness()
        await heard(router, Command)
        partial_of_begun = EngineReplyPartial(request_id=begun.request_id, tokens=run_of(2))
        router.send(partial_of_begun)
        assert len(await begun.__anext__()) == 2
        router.vanish()
        router.received.clear()
        router.script = politely(
            lambda m: [connect_ack(coordinator_id=bytes(16))] if isinstance(m, Connect) else None
        )
        router.come_back()
        with pytest.raises(CoordinatorLostError, match="INCREMENT_STALENESS; whether it was done"):
            await command
        with pytest.raises(CoordinatorLostError, match="request 2 was streaming"):
            await begun.__anext__()
        again = await heard(router, SubmitRequest, 2)
        assert [s.request_id for m in again for s in m.samples] == [plain.request_id, 1]
        router.send(reply_to(plain.request_id), reply_to(1))
        await plain
        assert [piece async for piece in fresh]
        assert not [m for m in router.received if isinstance(m, (Command, AbortRequest))]

    run(polite, test)


def test_a_coordinator_that_stays_away_fails_what_is_pending_until_it_is_back():
    async def test(client, router):
        request, command = client.add_request([1], PARAMS), client.pause_engines()
        stream = client.stream([1], PARAMS)
        start = time.monotonic()
        router.vanish()
        for pending in (request, command, stream.__anext__()):
            with pytest.raises(CoordinatorLostError, match=r"silent for 2(\.\d+)? s"):
                await pending
        assert time.monotonic() - start > 2 * LEASE_S - 0.2
        with pytest.raises(CoordinatorLostError):
            client.add_request([1], PARAMS)
        with pytest.raises(CoordinatorLostError):
            client.pause_engines()
        router.script = obedient
        router.come_back()
        await becomes(lambda: client._link.lost is None)
        assert (await client.add_request([1], PARAMS)).request_id == 2

    run(polite, test)


def test_requests_given_up_are_aborted_where_they_still_run():
    silent = threading.Event()

    async def test(client, router):
        request = client.add_request([1], PARAMS)
        await heard(router, SubmitRequest)
        silent.set()
        with pytest.raises(CoordinatorLostError):
            await request
        silent.clear()
        await becomes(lambda: client._link.lost is None)

    run(politely(lambda m: [] if silent.is_set() else None), test)


def test_a_goodbye_fails_what_is_pending_at_once():
    async def test(client, router):
        request = client.add_request([1], PARAMS)
        await heard(router, SubmitRequest)
        router.send(Disconnect(reason="shut down"))
        with pytest.raises(CoordinatorLostError, match="it has gone: shut down"):
            await request

    run(polite, test)


def test_a_loop_that_was_blocked_does_not_blame_the_coordinator():
    async def test(client, router):
        future = client.add_request([1], PARAMS)
        await heard(router, SubmitRequest)
        time.sleep(2.5 * LEASE_S)
        router.send(reply_to(0))
        assert (await future).request_id == 0
        assert client._link.lost is None

    run(polite, test)


def test_garbage_is_dropped_and_logged_once(caplog):
    async def test(client, router):
        future = client.add_request([1], PARAMS)
        await heard(router, SubmitRequest)
        with caplog.at_level(logging.WARNING):
            garbage = [b"", b"\xff", b"\x91\xcc\xff", b"\xdd\xff\xff\xff\xff", b"\x00" * 5000]
            router.send(*garbage, client_connect(client))
            router.send_frames(b"\x91\x00", b"\x91\x00")
            router.send(reply_to(0))
            await future
        assert client.num_malformed == 7
        assert len([r for r in caplog.records if "garbage" in r.message]) == 1

    run(polite, test)


def client_connect(client: InferenceClient) -> Connect:
    return Connect(client_id=client.client_id)


# ---- the end


def test_stopping_fails_what_is_pending_and_says_goodbye():
    async def test(client, router):
        request, command = client.add_request([1], PARAMS), client.pause_engines()
        stream = client.stream([1], PARAMS)
        next_piece = asyncio.ensure_future(stream.__anext__())
        await heard(router, SubmitRequest, 2)
        client.stop()
        for pending in (request, command, next_piece):
            with pytest.raises(ClientStateError, match="stopped before the answer"):
                await pending
        await heard(router, Disconnect)
        assert client.socket.closed

    run(polite, test)


def test_stopping_after_the_loop_has_closed_is_harmless():
    async def start(port: int) -> InferenceClient:
        client = InferenceClient(port)
        await client.start()
        client.add_request([1], PARAMS)
        return client

    with ScriptedRouter() as router:
        client = asyncio.run(start(router.port))
        client.stop()
        assert client.socket.closed


def test_two_clients_of_one_process_do_not_meet():
    async def test(client, router):
        async with InferenceClient(f"tcp://127.0.0.1:{router.port}", name="other") as other:
            futures = [c.add_request([i], PARAMS) for i in range(20) for c in (client, other)]
            records = await asyncio.gather(*futures)
            assert [r[0].prompt_tokens.tolist() for r in records] == [
                [i] for i in range(20) for _ in range(2)
            ]
            assert client.client_id != other.client_id

    run(obedient, test)


def test_a_wrong_address_is_refused():
    async def test():
        with pytest.raises(ValueError, match="cannot be dialled"):
            await InferenceClient("tcp://nowhere").start()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_alone(test())
    with pytest.raises(ValueError, match="port"):
        InferenceClient("nowhere")


def test_arrays_and_tensors_are_prompts_too():
    async def test(client, router):
        for prompt in (np.array([4, 5]), torch.tensor([4, 5]), (4, 5)):
            await client.add_request(prompt, PARAMS)
        sent = [m.prompt_tokens.tolist() for m in router.wait_for(SubmitRequest, 3)]
        assert sent == [[4, 5]] * 3

    run(obedient, test)
