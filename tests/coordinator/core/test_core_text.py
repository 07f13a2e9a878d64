"""Texts in and out of the coordinator's core: the jobs it gives, what comes of their results."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord, SamplingParams
from rollout.coordinator.core.text_jobs import (
    Detokenize,
    Detokenized,
    Tokenize,
    Tokenized,
    run_text_job,
)
from rollout.coordinator.core.text_queue import TextQueue
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    AssignRequest,
    Attempt,
    EngineReply,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
    pack_record,
    unpack_params,
)
from rollout.errors import ProtocolError
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine
from tests.coordinator.fake_fleet import FakeFleet


class LetterTokenizer:
    """One token per character; the first of a prompt is 1."""

    eos_id = None
    bos_id: int | None = 1
    vocab_size = 50000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)


def fleet_with_text() -> tuple[FakeFleet, FakeClient, FakeEngine]:
    fleet = FakeFleet(has_tokenizer=True)
    client, engine = fleet.client(), fleet.engine()
    fleet.run()
    return fleet, client, engine


def do_text_jobs(fleet: FakeFleet) -> None:
    for job in fleet.core.take_text_jobs():
        result = run_text_job(job, LetterTokenizer())
        fleet.route(fleet.core.text_done(result, fleet.now))
    fleet.run()


def test_a_text_prompt_reaches_its_engine_as_tokens_and_its_reply_gets_a_text() -> None:
    fleet, client, engine = fleet_with_text()
    fleet.send(client, client.submission([3], prompt="hello"))
    fleet.run()
    assert not engine.held
    do_text_jobs(fleet)
    (assigned,) = [m for m in engine.seen if isinstance(m, AssignRequest)]
    assert assigned.prompt == "hello"
    assert assigned.prompt_tokens.tolist() == [ord(letter) for letter in "hello"]
    fleet.finish()
    assert not client.asked[0].replies
    (job,) = fleet.core.take_text_jobs()
    assert isinstance(job, Detokenize)
    fleet.route(fleet.core.text_done(Detokenized(job.server_id, "world"), fleet.now))
    fleet.run()
    (reply,) = client.asked[0].replies
    assert reply.generated_text == "world"
    assert fleet.core.num_requests_held == 0


def test_results_that_nobody_waits_for_any_more_are_dropped() -> None:
    fleet, client, engine = fleet_with_text()
    fleet.send(client, client.submission([3], prompt="a"), client.submission([3]))
    fleet.run()
    fleet.send(client, AbortRequest(attempts=(Attempt(request_id=0),)))
    fleet.run()
    assert client.asked[0].replies[0].error is not None
    fleet.finish()
    fleet.cut(client)
    fleet.pass_time(99)
    do_text_jobs(fleet)
    assert len([m for m in engine.seen if isinstance(m, AssignRequest)]) == 1
    assert fleet.core.num_requests_held == 0


def test_an_engine_may_die_while_its_reply_is_detokenized() -> None:
    fleet, client, engine = fleet_with_text()
    fleet.send(client, client.submission([3]))
    fleet.run()
    fleet.finish()
    fleet.cut(engine)
    fleet.pass_time(20)
    do_text_jobs(fleet)
    (reply,) = client.asked[0].replies
    assert not reply.is_failed
    assert fleet.core.counters.num_reassigned == 0


def test_a_reply_that_waits_for_its_text_is_delivered_when_the_coordinator_closes() -> None:
    fleet, client, _ = fleet_with_text()
    fleet.send(client, client.submission([3]))
    fleet.run()
    fleet.finish()
    fleet.route(fleet.core.close("the end"))
    fleet.run()
    (reply,) = client.asked[0].replies
    assert not reply.is_failed


def test_a_prompt_that_cannot_be_read_fails_its_whole_group() -> None:
    fleet, client, _ = fleet_with_text()
    message = client.submission([3, 4], prompt="x")
    fleet.send(client, message)
    fleet.run()
    (job,) = fleet.core.take_text_jobs()
    assert isinstance(job, Tokenize)
    broken = Tokenize(job.group_id, job.text, dict.fromkeys(job.sampling_params, b"\xc1"))
    fleet.route(fleet.core.text_done(run_text_job(broken, LetterTokenizer()), fleet.now))
    fleet.run()
    errors = [asked.replies[0].error for asked in client.asked.values()]
    assert [error.type_name for error in errors if error] == ["ProtocolError"] * 2


def tokenize(*params: SamplingParams, tokenizer: LetterTokenizer | None = None) -> Tokenized:
    packed = {index: pack_params(one) for index, one in enumerate(params)}
    result = run_text_job(Tokenize(7, "ab", packed), tokenizer or LetterTokenizer())
    assert isinstance(result, Tokenized)
    return result


def test_the_first_token_is_put_in_once_where_it_is_asked_for() -> None:
    plain = tokenize(SamplingParams())
    assert plain.prompt_tokens.tolist() == [97, 98]
    with_bos = tokenize(SamplingParams(add_BOS=True, top_k=3))
    assert with_bos.prompt_tokens.tolist() == [1, 97, 98]
    assert unpack_params(with_bos.sampling_params[0]) == SamplingParams(top_k=3)
    mixed = tokenize(SamplingParams(add_BOS=True), SamplingParams())
    assert mixed.error is not None
    without = LetterTokenizer()
    without.bos_id = None
    assert tokenize(SamplingParams(add_BOS=True), tokenizer=without).error is not None


@pytest.mark.parametrize(
    ("finish_reason", "keeps_word", "text"),
    [("stop", False, "ab"), ("stop", True, "abend"), ("length", False, "abend")],
)
def test_the_text_leaves_the_stop_word_out_unless_it_is_asked_for(
    finish_reason: str, keeps_word: bool, text: str
) -> None:
    end = [ord(letter) for letter in "end"]
    request = DynamicInferenceRequest(
        request_id=1,
        prompt_tokens=torch.tensor([5]),
        sampling_params=SamplingParams(detokenize_stop_sequence=keeps_word),
        generated_tokens=[97],
    )
    record = DynamicInferenceRequestRecord.from_request(request)
    record.checkpoint()
    record.current.generated_tokens = [98, *end]
    record.current.finish_reason = finish_reason
    record.current.stop_word_ids = [[1, 2], end]
    result = run_text_job(Detokenize(1, pack_record(record)), LetterTokenizer())
    assert result == Detokenized(1, text)


def test_a_text_that_cannot_be_made_is_an_error_beside_the_record_and_the_next_is_made() -> None:
    class Faulty(LetterTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            raise ZeroDivisionError("no such letter")

    fleet, client, _ = fleet_with_text()
    fleet.send(client, client.submission([3, 4]))
    fleet.run()
    fleet.finish()
    request = DynamicInferenceRequest(request_id=1, generated_tokens=[97])
    record = pack_record(DynamicInferenceRequestRecord.from_request(request))
    jobs = fleet.core.take_text_jobs()
    for job, tokenizer in zip(jobs, (Faulty(), LetterTokenizer()), strict=True):
        assert isinstance(job, Detokenize)
        result = run_text_job(Detokenize(job.server_id, record), tokenizer)
        fleet.route(fleet.core.text_done(result, fleet.now))
    fleet.run()
    without, whole = (client.asked[i].replies[0] for i in range(2))
    assert (without.generated_text, without.is_failed) == (None, False)
    assert without.record is not None
    assert without.error is not None
    assert without.error.type_name == "DetokenizeError"
    assert (whole.error, whole.generated_text) == (None, "a")


@pytest.mark.parametrize("record", [b"", b"\xc1", b"\x80", b"\x91\x01"])
def test_a_record_that_cannot_be_read_has_no_text(record: bytes) -> None:
    assert run_text_job(Detokenize(1, record), LetterTokenizer()) == Detokenized(1, None)


def test_a_reply_too_large_to_send_becomes_an_error() -> None:
    fleet, client, _ = fleet_with_text()
    fleet.send(client, client.submission([3]))
    fleet.run()
    fleet.finish()
    (job,) = fleet.core.take_text_jobs()
    assert isinstance(job, Detokenize)
    outgoing = fleet.core.text_done(Detokenized(job.server_id, "long"), fleet.now)
    ((identity, message),) = outgoing
    fault = ProtocolError("too large")
    fleet.route(fleet.core.undelivered(identity, message, fault, fleet.now))
    fleet.run()
    (reply,) = client.asked[0].replies
    assert isinstance(reply, EngineReply)
    assert reply.error is not None
    assert fleet.core.num_requests_held == 0


def test_the_queue_takes_as_fast_after_many_texts_as_before() -> None:
    """A router's turn takes from it, also where nothing waits."""

    def take_s(queue: TextQueue) -> float:
        start = time.perf_counter()
        for _ in range(20):
            queue.take()
        return time.perf_counter() - start

    used, fresh = TextQueue(), TextQueue()
    for number in range(2**15):
        used.add(number, Tokenize(number, "", {}))
    while used.take():
        for _ in range(64):
            used.done()
    assert min(take_s(used) for _ in range(9)) < 10 * min(take_s(fresh) for _ in range(9))
