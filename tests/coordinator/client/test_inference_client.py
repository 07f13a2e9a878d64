"""InferenceClient against a scripted coordinator over real sockets, and its own checks."""

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
from msgspec import structs

from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord, SamplingParams, Status
from rollout.control.commands import (
    Command,
    ControlMessage,
    IncrementStaleness,
    Pause,
    Resume,
    SetGenerationEpoch,
    Shutdown,
    Stop,
    Suspend,
    Unpause,
)
from rollout.control.reports import ResumeReport, SuspendReport
from rollout.control.state import EngineState
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.client.streams import StreamedTokens
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.link import Link
from rollout.coordinator.protocol import messages
from rollout.coordinator.protocol.codec import ProtocolVersionError, encode
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    Ack,
    Attempt,
    Connect,
    Disconnect,
    EngineReply,
    EngineReplyPartial,
    Heartbeat,
    ReplyAck,
    SubmitRequest,
    UpdateWeights,
    WireError,
    nack_of,
)
from rollout.coordinator.protocol.packed import pack_record, unpack_params
from rollout.errors import (
    BlockOverflowError,
    ClientStateError,
    CoordinatorLostError,
    DetokenizeError,
    EngineStateError,
    InvalidRequestError,
    ProtocolError,
    RequestAbortedError,
    WeightUpdateError,
)
from rollout.ranges import MAX_SECONDS
from rollout.requests.token_runs import TokenRun
from rollout.step.seeds import mix_seed
from rollout.version_spans import VersionSpans
from rollout.weights.source import WeightsSource
from rollout.wire import Message
from tests.coordinator.message_strategies import run_of
from tests.coordinator.scripted_router import (
    BOUND_S,
    HEARTBEAT_S,
    LEASE_S,
    Script,
    ScriptedRouter,
    connect_ack,
    polite,
    politely,
)
from tests.coordinator.tcp_proxy import TcpProxy
from tests.waiting import until_async

PARAMS = SamplingParams(num_tokens_to_generate=8)
SOURCE = WeightsSource(kind="shared_memory", address="here", manifest=b"", checksum="abc")


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


UPDATE = {"version": 8, "seconds": 0.0, "stall_seconds": 0.0, "num_bytes": 4, "checksum": "abc"}


def results_of(message: ControlMessage[Any]) -> dict[str, Any]:
    """What a coordinator answers of two engines."""
    reports: list[dict[str, Any] | None] = [None, None]
    if isinstance(message, (Suspend, Resume)):
        reports = [{"mode": "offload", "seconds": 0.5}, {"mode": "offload", "seconds": 0.25}]
    elif isinstance(message, UpdateWeights):
        reports = [{**UPDATE, "seconds": 0.5}, {**UPDATE, "seconds": 0.25}]
    return {"state": "PAUSED", "weights_version": 8, "ranks": dict(zip("01", reports, strict=True))}


def obedient(message: Message) -> Sequence[Message] | None:
    """Answers requests and commands at once."""
    if isinstance(message, SubmitRequest):
        return [reply_to(sample.request_id, message.prompt_tokens) for sample in message.samples]
    if isinstance(message, ControlMessage):
        return [Ack(command_id=message.command_id, result=results_of(message))]
    return polite(message)


def run(
    script: Script,
    test: Callable[[InferenceClient, ScriptedRouter], Awaitable[None]],
    **options: Any,
) -> None:
    """Run `test` with a started client. Nothing may be left of it: no task, no thread, no warning,
    nothing that asyncio reports."""
    reports: list[dict[str, Any]] = []

    async def started(router: ScriptedRouter) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reports.append(context))
        async with InferenceClient(router.port, **options) as client:
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
            gc.collect()
    finally:
        gc.enable()


async def received(router: ScriptedRouter, message_type: type, num: int = 1) -> list[Any]:
    return await asyncio.to_thread(router.wait_for, message_type, num)


def acknowledged(router: ScriptedRouter) -> list[int]:
    acks = [message for message in router.received if isinstance(message, ReplyAck)]
    return [named.request_id for ack in acks for named in ack.attempts]


# ---- handshake


def test_inference_client_connects_and_gets_the_state_of_the_fleet():
    async def test(client, router):
        assert router.received[0] == Connect(client_id=client.client_id)
        assert client.coordinator == connect_ack()
        assert not client.listener_task.done()

    run(polite, test)


def test_an_address_without_a_coordinator_is_named_in_the_error():
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


def test_a_reply_has_the_request_id_of_its_client():
    async def test(client, router):
        for request_id in range(3):
            assert client.next_request_id == request_id
            future = client.add_request([1, 2], PARAMS, priority=4, deadline_s=30)
            assert client.completion_futures == {request_id: future}
            record = await future
            assert record.request_id == future.request_id == request_id
            assert record.merge().generated_tokens == [0, 1, 2]
            assert record.merge().generated_text is None
        await until_async(lambda: acknowledged(router) == [0, 1, 2], "the replies are acknowledged")
        submitted = router.wait_for(SubmitRequest, 3)[0]
        assert submitted.prompt_tokens.tolist() == [1, 2]
        assert (submitted.priority, submitted.streaming) == (4, False)
        assert 20 < submitted.deadline_s <= 30

    run(obedient, test)


def test_a_thousand_requests_at_once_find_their_way():
    async def test(client, router):
        prompts = [[i, i + 1] for i in range(1000)]
        records = await asyncio.gather(*[client.add_request(p, PARAMS) for p in prompts])
        assert [record.request_id for record in records] == list(range(1000))
        assert [record[0].prompt_tokens.tolist() for record in records] == prompts
        await until_async(lambda: len(acknowledged(router)) == 1000, "the replies are acknowledged")
        assert sorted(acknowledged(router)) == list(range(1000))

    run(obedient, test)


def test_replies_are_acknowledged_together_and_soon():
    async def test(client, router):
        futures = [client.add_request([1], PARAMS) for _ in range(70)]
        await received(router, SubmitRequest, 70)
        router.send(*(reply_to(future.request_id) for future in futures[:-1]))
        await asyncio.gather(*futures[:-1])
        await until_async(
            lambda: acknowledged(router) == list(range(69)), "the replies are acknowledged"
        )
        assert len(router.wait_for(ReplyAck)) < 10
        router.send(reply_to(69))
        await futures[-1]
        await until_async(lambda: acknowledged(router)[69:] == [69], "the replies are acknowledged")

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
        futures = client.add_group([1], [PARAMS] * 5)
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
        with pytest.raises(ProtocolError, match="not a record"):
            await futures[2]
        with pytest.raises(ProtocolError, match="no segment"):
            await futures[3]
        await until_async(lambda: len(acknowledged(router)) == 4, "the replies are acknowledged")

    run(politely(script), test)


def test_a_cancelled_future_aborts_its_request_and_others_go_on():
    async def test(client, router):
        futures = client.add_group([1], [PARAMS] * 3)
        futures[0].cancel()
        futures[2].cancel()
        aborted = (await received(router, AbortRequest))[0]
        assert aborted.attempts == (Attempt(request_id=0), Attempt(request_id=2))
        router.send(reply_to(0), reply_to(2), reply_to(1))
        assert (await futures[1]).request_id == 1
        await until_async(lambda: acknowledged(router) == [0, 2, 1], "the replies are acknowledged")

    run(polite, test)


def test_aborts_of_more_requests_than_a_message_may_name_are_sent_in_parts(monkeypatch):
    monkeypatch.setattr(messages, "MAX_ITEMS", 2)

    async def test(client, router):
        for future in client.add_group([1], [PARAMS] * 3):
            future.cancel()
        aborts = await received(router, AbortRequest, 2)
        assert [[named.request_id for named in abort.attempts] for abort in aborts] == [[0, 1], [2]]
        router.send(reply_to(0), reply_to(1), reply_to(2))
        await until_async(lambda: acknowledged(router) == [0, 1, 2], "the replies are acknowledged")

    run(polite, test)


def test_an_aborted_request_resolves_to_a_record_with_its_tokens():
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
        await received(router, SubmitRequest)
        router.send(reply_to(0), reply_to(0, prompt=(9,)), reply_to(77))
        assert (await future)[0].prompt_tokens.tolist() == [1, 2]
        await until_async(lambda: len(acknowledged(router)) == 3, "the replies are acknowledged")

    run(polite, test)


# ---- text


class LetterTokenizer:
    """One token per letter. It can neither read nor write a "?"."""

    eos_id, bos_id, vocab_size = None, 1, 128

    def encode(self, text: str) -> list[int]:
        if "?" in text:
            raise ZeroDivisionError("no such letter")
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        if 63 in ids:
            raise ZeroDivisionError("no such letter")
        return "".join(chr(i + 97) for i in ids)


def text_of(message: Message) -> Sequence[Message] | None:
    """Answers with tokens 0 to 3, in two segments."""
    if not isinstance(message, SubmitRequest):
        return None
    record = record_of(message.prompt_tokens, num_tokens=3)
    record.current.sampling_params = PARAMS
    record.checkpoint()
    record.current.generated_tokens = [3]
    record.current.context_kv_version_min = [0]
    record.current.context_kv_version_mean = [0.0]
    packed = pack_record(record)
    return [EngineReply(request_id=s.request_id, record=packed) for s in message.samples]


def test_prompts_and_records_have_their_texts_from_the_clients_tokenizer():
    async def test(client, router):
        record = await client.add_request("abc", PARAMS)
        assert record.merge().prompt == "abc"
        assert record.merge().generated_text == "abcd"
        with_bos = SamplingParams(num_tokens_to_generate=8, add_BOS=True)
        await client.add_request("ab", with_bos)
        sent = router.wait_for(SubmitRequest, 2)
        assert [m.prompt_tokens.tolist() for m in sent] == [[97, 98, 99], [1, 97, 98]]
        assert not unpack_params(sent[1].samples[0].sampling_params).add_BOS
        (*_, streamed) = [item async for item in client.stream([1, 2], PARAMS)]
        assert (streamed.merge().prompt, streamed.merge().generated_text) == (None, "abcd")

    run(politely(text_of), test, tokenizer=LetterTokenizer())


def test_a_text_without_a_tokenizer_is_refused_with_the_remedy():
    async def test(client, router):
        with pytest.raises(InvalidRequestError, match="tokenizer="):
            client.add_request("abc", PARAMS)
        assert (await client.add_request([97], PARAMS)).merge().generated_text is None

    run(politely(text_of), test)


def test_a_prompt_that_the_tokenizer_raises_on_fails_alone():
    async def test(client, router):
        groups = client.add_groups([("abc", [PARAMS]), ("a?", [PARAMS] * 2), ("ab", [PARAMS])])
        assert [f.request_id for futures in groups for f in futures] == [0, 1, 2, 3]
        for future in groups[1]:
            with pytest.raises(InvalidRequestError, match=r"'a\?'.*no such letter"):
                await future
        for futures in (groups[0], groups[2]):
            assert (await futures[0]).merge().generated_text == "abcd"

    run(politely(text_of), test, tokenizer=LetterTokenizer())


def test_a_text_that_cannot_be_written_is_missing_in_its_own_record_only():
    def script(message):
        if isinstance(message, SubmitRequest):
            record = record_of(message.prompt_tokens)
            record.current.sampling_params = PARAMS
            record.current.generated_tokens = [63, 1, 2]
            return [reply_to(message.samples[0].request_id, record=pack_record(record))]
        return None

    async def test(client, router):
        record = await client.add_request("abc", PARAMS)
        assert record.merge().generated_tokens == [63, 1, 2]
        assert record.merge().generated_text is None
        assert type(record.current.events[-1].payload) is DetokenizeError

    run(politely(script), test, tokenizer=LetterTokenizer())


def test_a_text_that_cannot_be_a_prompt_is_refused():
    with_bos = SamplingParams(num_tokens_to_generate=8, add_BOS=True)

    class WithoutBos(LetterTokenizer):
        bos_id = None

    async def test(client, router):
        with pytest.raises(InvalidRequestError, match="no BOS token"):
            client.add_request("abc", with_bos)
        with pytest.raises(InvalidRequestError, match="the same for all samples"):
            client.add_group("abc", [with_bos, PARAMS])

    run(polite, test, tokenizer=WithoutBos())


# ---- all or nothing, and what waits


def test_a_batch_with_a_malformed_prompt_is_not_sent_at_all():
    async def test(client, router):
        with pytest.raises(InvalidRequestError, match="token id -1"):
            client.add_groups([([1], [PARAMS]), ([-1], [PARAMS])])
        assert not client.completion_futures
        await client.add_request([5], PARAMS)
        assert [m.prompt_tokens.tolist() for m in router.wait_for(SubmitRequest)] == [[5]]

    run(obedient, test)


def test_an_interrupt_during_add_groups_aborts_the_requests_that_were_sent(monkeypatch):
    async def test(client, router):
        before = client.add_request([9], PARAMS)
        queue, num_sent = Link.queue, 0

        def interrupted(link, message):
            nonlocal num_sent
            queue(link, message)
            num_sent += 1
            if num_sent == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(Link, "queue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.add_groups([([i], [PARAMS] * 2) for i in range(1, 6)])
        await received(router, AbortRequest)
        aborted = [a.request_id for m in router.wait_for(AbortRequest) for a in m.attempts]
        sent = [s.request_id for m in router.wait_for(SubmitRequest) for s in m.samples]
        assert sent == [0, 1, 2, 3, 4, 5, 6]
        assert aborted == [1, 2, 3, 4, 5, 6]
        assert client.completion_futures == {0: before}
        router.send(*[reply_to(i) for i in range(7)])
        await before

    run(polite, test)


def small(message: Message) -> Sequence[Message] | None:
    """Takes four requests at a time."""
    return [connect_ack(max_requests=4)] if isinstance(message, Connect) else None


def submitted(router: ScriptedRouter) -> list[int]:
    return [s.request_id for m in router.received for s in getattr(m, "samples", ())]


def test_requests_beyond_the_window_wait_and_follow_by_their_priority():
    async def test(client, router):
        futures = [client.add_request([1], PARAMS, priority=i % 3) for i in range(10)]
        await until_async(lambda: len(submitted(router)) == 4, "the requests are submitted")
        order = submitted(router)
        assert order == [0, 1, 2, 3]
        for request_id in (2, 0, 1, 3, 5, 8, 4, 7, 6, 9):
            router.send(reply_to(request_id))
            await futures[request_id]
            # Acknowledged first: the coordinator counts a request until then.
            late = [m for m in router.received if isinstance(m, (ReplyAck, SubmitRequest))]
            assert num_counted(late) <= 4
        assert submitted(router) == [0, 1, 2, 3, 5, 8, 4, 7, 6, 9]

    run(politely(small), test)


def num_counted(messages: Sequence[ReplyAck | SubmitRequest]) -> int:
    """The most requests that a coordinator which gets these counts at any time."""
    known: set[int] = set()
    most = 0
    for message in messages:
        if isinstance(message, ReplyAck):
            known -= {named.request_id for named in message.attempts}
        else:
            known |= {sample.request_id for sample in message.samples}
        most = max(most, len(known))
    return most


def test_a_group_beyond_the_window_goes_in_parts():
    async def test(client, router):
        futures = client.add_group([1], [PARAMS] * 10)
        for end in (4, 8, 10):
            await until_async(lambda end=end: len(submitted(router)) == end, f"{end} submissions")
            router.send(*[reply_to(i) for i in submitted(router)[-4:]])
        records = await asyncio.gather(*futures)
        assert [record.request_id for record in records] == list(range(10))

    run(politely(small), test)


def test_bytes_beyond_the_window_wait_too():
    prompt = list(range(1000))

    def script(message):
        is_connect = isinstance(message, Connect)
        return [connect_ack(max_request_bytes=10_000)] if is_connect else None

    async def test(client, router):
        futures = [client.add_request(prompt, PARAMS) for _ in range(4)]
        await until_async(lambda: submitted(router) == [0, 1], "the requests are submitted")
        router.send(reply_to(0))
        await until_async(lambda: submitted(router) == [0, 1, 2], "the requests are submitted")
        router.send(*[reply_to(i) for i in (1, 2)])
        await until_async(lambda: submitted(router) == [0, 1, 2, 3], "the requests are submitted")
        router.send(reply_to(3))
        records = await asyncio.gather(*futures)
        assert [record.request_id for record in records] == [0, 1, 2, 3]

    run(politely(script), test)


def test_requests_that_wait_end_by_abort_cancellation_and_deadline_without_being_sent():
    async def test(client, router):
        running = client.add_group([1], [PARAMS] * 4)
        aborted, cancelled = (client.add_request([1], PARAMS) for _ in range(2))
        overdue = client.add_request([1], PARAMS, deadline_s=0.05)
        last = client.add_request([1], PARAMS)
        client.abort(aborted.request_id)
        cancelled.cancel()
        with pytest.raises(RequestAbortedError, match="aborted by its client"):
            await aborted
        with pytest.raises(RequestAbortedError, match="deadline has passed"):
            await overdue
        router.send(*[reply_to(i) for i in range(4)])
        await asyncio.gather(*running)
        await until_async(
            lambda: submitted(router) == [0, 1, 2, 3, last.request_id], "the requests are submitted"
        )
        router.send(reply_to(last.request_id))
        await last
        assert not [m for m in router.received if isinstance(m, AbortRequest)]

    run(politely(small), test)


def test_a_request_that_no_frame_can_carry_fails_alone():
    async def test(client, router):
        large, small = client.add_request([1] * 10_000, PARAMS), client.add_request([1], PARAMS)
        with pytest.raises(ProtocolError, match="at most 10000"):
            await large
        await small

    run(obedient, test, max_frame_bytes=10_000)


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
    async def test():
        streamed, tokens = StreamedTokens(), []
        for piece in pieces:
            reached = streamed.num_tokens
            streamed.add(piece)
            assert streamed.num_tokens == max(
                reached, piece.end if piece.offset <= reached else reached
            )
        streamed.end()
        while (run := await streamed.next()) is not None:
            assert run.offset == len(tokens)
            tokens += run.token_ids.tolist()
        assert tokens == list(range(streamed.num_tokens))

    asyncio.run(test())


def test_the_rest_of_a_record_has_its_versions():
    record = record_of([5, 6], num_tokens=4)
    record.current.policy_spans = VersionSpans()
    record.current.policy_spans.append(4, 1)
    record.current.policy_spans.append(2, 3)
    record.current.generated_log_probs = [-1.0, -2.0, -3.0, -4.0]
    rest = TokenRun.of(record, 1)
    assert (rest.offset, rest.token_ids.tolist()) == (1, [1, 2, 3])
    assert rest.policy_versions.tolist() == [1, 3, 3]
    assert rest.log_probs.tolist() == [-2.0, -3.0, -4.0]
    assert TokenRun.of(record, 4) is None


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


def test_stream_yields_tokens_as_they_arrive_and_aborts_when_closed():
    async def test(client, router):
        stream = client.stream([1], PARAMS)
        assert stream.request_id == 0
        await received(router, SubmitRequest)
        router.send(partial(0, 2))
        assert (await stream.__anext__()).token_ids.tolist() == [0, 1]
        router.send(partial(2, 3))
        async for piece in stream:
            assert piece.token_ids.tolist() == [2]
            break
        await stream.aclose()
        assert (await received(router, AbortRequest))[0].attempts == (Attempt(request_id=0),)
        router.send(reply_to(0))

    run(polite, test)


def test_an_unread_stream_is_aborted_when_closed():
    async def test(client, router):
        await client.stream([1], PARAMS).aclose()
        assert (await received(router, AbortRequest))[0].attempts == (Attempt(request_id=0),)
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


def test_each_control_call_sends_its_command_and_resolves_to_the_merged_result():
    async def test(client, router):
        both = ("kv_cache", "weights")
        discards = Suspend(mode="offload", release=both, discard_weights=True)
        calls = [
            (client.pause_engines, (), Pause()),
            (client.suspend_engines, ("offload", both, True), discards),
            (client.suspend_engines, (), Suspend()),
            (client.resume_engines, ("weights",), Resume(only="weights")),
            (client.resume_engines, (), Resume()),
            (client.set_generation_epoch, (7,), SetGenerationEpoch(version=7)),
            (client.increment_staleness, (), IncrementStaleness()),
            (client.unpause_engines, (), Unpause()),
            (client.stop_engines, (), Stop()),
            (client.shutdown_engines, (), Shutdown()),
        ]
        for index, (call, arguments, sent) in enumerate(calls):
            result = await call(*arguments, deadline_s=9)
            expected = {Suspend: SuspendReport, Resume: ResumeReport}.get(type(sent))
            assert (
                result is None
                if expected is None
                else result == expected(mode="offload", seconds=0.5)
            )
            assert router.wait_for(Command, index + 1)[-1] == structs.replace(
                sent, command_id=index, deadline_s=9.0
            )
        assert (client.state, client.weights_version) == (EngineState.PAUSED, 8)
        report = await client.update_weights(SOURCE, version=8, in_flight=True)
        assert (report.version, report.seconds, report.checksum) == (8, 0.5, "abc")
        assert router.wait_for(UpdateWeights)[0] == UpdateWeights(
            command_id=len(calls), source=SOURCE, version=8, in_flight=True, deadline_s=600.0
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


def test_futures_that_nobody_awaits_do_not_warn():
    """`run` asserts that asyncio reports nothing."""

    def script(message):
        if isinstance(message, Command) and message.command_id % 2:
            return [nack_of(message.command_id, EngineStateError("no"))]
        return None

    async def test(client, router):
        for _ in range(4):
            client.pause_engines()  # half are refused, half never answered
        client.update_weights(SOURCE)
        client.add_request([1], PARAMS)
        assert len(await received(router, Command, 4)) == 4
        await asyncio.sleep(0.1)
        gc.collect()

    run(politely(script), test)


@pytest.mark.parametrize("name", ["abort_grace_s", "commit_grace_s", "progress_deadline_s"])
def test_a_client_waits_for_as_long_as_its_coordinator_may_need_after_a_deadline(name: str):
    limits = CoordinatorLimits(**{name: 400.0})
    assert limits.answer_grace_s > 400.0
    longest = CoordinatorLimits(**{name: MAX_SECONDS})
    encode(connect_ack(answer_grace_s=longest.answer_grace_s))  # it fits the wire


def test_an_unanswered_request_fails_after_deadline_and_grace():
    def impatient(message):
        return [connect_ack(answer_grace_s=0.1)] if isinstance(message, Connect) else None

    async def test(client, router):
        command = client.pause_engines(deadline_s=0.1)
        request = client.add_request([1], PARAMS, deadline_s=0.1)
        with pytest.raises(CoordinatorLostError, match=r"pause has no answer after 0\.2 s"):
            await command
        with pytest.raises(CoordinatorLostError, match="request 0 has no reply"):
            await request
        assert (await received(router, AbortRequest))[0].attempts == (Attempt(request_id=0),)
        router.send(Ack(command_id=0), reply_to(0))  # too late, and no harm
        await received(router, ReplyAck)

    run(politely(impatient), test)


# ---- liveness


def test_heartbeats_are_sent_every_heartbeat_s():
    async def test(client, router):
        beats = await received(router, Heartbeat, 10)
        assert [beat.sequence for beat in beats[:10]] == list(range(1, 11))
        assert beats[0].status is None

    run(polite, test)


def run_over(
    script: Script, test: Callable[[InferenceClient, ScriptedRouter, TcpProxy], Awaitable[None]]
) -> None:
    """`test` with a client whose network it may cut."""

    async def started() -> None:
        with ScriptedRouter(script) as router, TcpProxy(router.port) as proxy:
            async with InferenceClient(proxy.port) as client:
                await asyncio.wait_for(test(client, router, proxy), BOUND_S)

    run_alone(started())


def with_short_lease(message: Message) -> Sequence[Message] | None:
    return [connect_ack(lease_s=LEASE_S)] if isinstance(message, Connect) else None


def test_no_message_is_lost_while_the_network_fails():
    async def test(client, router, proxy):
        done = client.add_request([5], PARAMS)
        await received(router, SubmitRequest)
        router.send(reply_to(0))
        await done
        group = client.add_group([1, 2], [PARAMS] * 3, deadline_s=50)
        command = client.pause_engines()
        await received(router, Command)
        proxy.cut()
        while_away = client.add_request([3], PARAMS)
        proxy.mend()
        await received(router, Connect, 2)
        await until_async(
            lambda: while_away.request_id in submitted(router), "the last request is submitted"
        )
        done = Ack(command_id=0, result={"state": "PAUSED", "weights_version": 0})
        router.send(done, *[reply_to(i) for i in range(1, 5)])
        assert await command is None
        await asyncio.gather(*group, while_away)
        assert [m.command_id for m in router.wait_for(Command)] in ([0], [0, 0])

    run_over(polite, test)


def test_a_coordinator_that_no_longer_knows_the_client_is_lost():
    async def test(client, router, proxy):
        request = client.add_request([1], PARAMS)
        await received(router, SubmitRequest)
        router.script = politely(
            lambda m: [connect_ack(is_resumed=False)] if isinstance(m, Connect) else None
        )
        proxy.cut()
        proxy.mend()
        with pytest.raises(CoordinatorLostError, match="no longer knows this client"):
            await request
        with pytest.raises(CoordinatorLostError, match="no longer knows this client"):
            client.add_request([1], PARAMS)

    run_over(polite, test)


def test_another_coordinator_at_the_address_is_none_of_this_client():
    async def test(client, router, proxy):
        request, command = client.add_request([1], PARAMS), client.increment_staleness()
        await received(router, Command)
        router.script = politely(
            lambda m: [connect_ack(coordinator_id=bytes(16))] if isinstance(m, Connect) else None
        )
        proxy.cut()
        proxy.mend()
        for pending in (request, command):
            with pytest.raises(CoordinatorLostError, match="another coordinator is at its address"):
                await pending
        assert len(router.wait_for(SubmitRequest)) == 1

    run_over(polite, test)


def test_a_client_that_is_not_known_any_more_connects_again():
    async def test(client, router):
        request = client.add_request([1], PARAMS)
        await received(router, SubmitRequest)
        router.send(nack_of(None, ProtocolError("who are you?")))
        await received(router, Connect, 2)
        router.send(reply_to(0))
        record = await request
        assert record.request_id == 0

    run(polite, test)


def test_a_coordinator_that_is_unreachable_for_the_lease_is_lost():
    async def test(client, router, proxy):
        request, command = client.add_request([1], PARAMS), client.pause_engines()
        stream = client.stream([1], PARAMS)
        await received(router, Command)
        proxy.cut()
        for pending in (request, command, stream.__anext__()):
            with pytest.raises(CoordinatorLostError, match="unreachable for 1"):
                await pending
        with pytest.raises(CoordinatorLostError):
            client.add_request([1], PARAMS)
        with pytest.raises(CoordinatorLostError):
            client.pause_engines()

    run_over(politely(with_short_lease), test)


def test_a_coordinator_that_is_silent_for_two_leases_is_lost():
    is_silent = threading.Event()

    async def test(client, router):
        request = client.add_request([1], PARAMS)
        await received(router, SubmitRequest)
        is_silent.set()
        start = time.monotonic()
        with pytest.raises(CoordinatorLostError, match="unreachable"):
            await request
        assert time.monotonic() - start > 2 * LEASE_S - 0.2

    run(politely(lambda m: [] if is_silent.is_set() else with_short_lease(m)), test)


def test_a_coordinator_with_late_heartbeats_is_kept_while_it_sends_other_messages():
    async def test(client, router):
        future = client.add_request([1], PARAMS)
        await received(router, SubmitRequest)
        end = time.monotonic() + 2.5 * LEASE_S
        while time.monotonic() < end:
            router.send(Ack(command_id=99))
            await asyncio.sleep(LEASE_S / 20)
        router.send(reply_to(0))
        await future
        assert len(router.wait_for(Connect)) == 1

    run(politely(lambda m: [] if isinstance(m, Heartbeat) else with_short_lease(m)), test)


def test_a_coordinator_whose_process_has_ended_is_lost_at_once():
    async def test(client, router):
        request, command = client.add_request([1], PARAMS), client.pause_engines()
        await received(router, Command)
        router.vanish()  # and its port with it
        start = time.monotonic()
        for pending in (request, command):
            with pytest.raises(CoordinatorLostError, match="connections are refused"):
                await pending
        assert time.monotonic() - start < 30.0  # of a lease of 60

    run(polite, test)


def test_a_disconnect_fails_pending_futures_at_once():
    async def test(client, router):
        request = client.add_request([1], PARAMS)
        await received(router, SubmitRequest)
        router.send(Disconnect(reason="shut down"))
        with pytest.raises(CoordinatorLostError, match="it disconnected: shut down"):
            await request

    run(polite, test)


def test_a_loop_that_is_blocked_for_several_leases_keeps_the_session():
    async def test(client, router):
        future = client.add_request([1], PARAMS)
        await received(router, SubmitRequest)
        num_heartbeats = len(router.wait_for(Heartbeat))
        time.sleep(2.5 * LEASE_S)
        assert len(router.wait_for(Heartbeat)) - num_heartbeats > LEASE_S / HEARTBEAT_S
        router.send(reply_to(0))
        assert (await future).request_id == 0
        assert len(router.wait_for(Connect)) == 1

    run(politely(with_short_lease), test)


def test_garbage_is_dropped_and_logged_once(caplog):
    async def test(client, router):
        future = client.add_request([1], PARAMS)
        await received(router, SubmitRequest)
        with caplog.at_level(logging.WARNING):
            garbage = [b"", b"\xff", b"\x91\xcc\xff", b"\xdd\xff\xff\xff\xff", b"\x00" * 5000]
            router.send(*garbage, client_connect(client))
            router.send_frames(b"\x91\x00", b"\x91\x00")
            router.send(reply_to(0))
            await future
        assert client.num_malformed == 7
        assert len([r for r in caplog.records if "malformed frame" in r.message]) == 1

    run(polite, test)


def client_connect(client: InferenceClient) -> Connect:
    return Connect(client_id=client.client_id)


# ---- the end


def test_stop_fails_pending_futures_and_disconnects():
    async def test(client, router):
        request, command = client.add_request([1], PARAMS), client.pause_engines()
        stream = client.stream([1], PARAMS)
        next_piece = asyncio.ensure_future(stream.__anext__())
        await received(router, SubmitRequest, 2)
        client.stop()
        for pending in (request, command, next_piece):
            with pytest.raises(ClientStateError, match="stopped before this call was answered"):
                await pending
        await received(router, Disconnect)
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
        with pytest.raises(ValueError, match="is not an address"):
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
