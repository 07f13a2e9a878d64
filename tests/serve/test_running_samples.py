"""RunningSamples: what pages see of samples that generate, and what is kept without a page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps

import numpy as np
import pytest

from rollout.coordinator.client.streams import RequestFuture, RequestStream, StreamedTokens
from rollout.requests.token_runs import TokenRun
from rollout.serve.page.running import MAX_RUNNING, MAX_RUNNING_TOKENS, RunningSamples
from rollout.serve.token_texts import TokenTexts
from rollout.text import HFTokenizer
from tests.serve import chat_model

TEXTS = TokenTexts(None, max_characters=100)


def in_loop(work: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a coroutine."""

    @wraps(work)
    def run() -> None:
        async def main() -> None:
            await work()

        asyncio.run(main())

    return run


def future(prompt: Sequence[int] = (7, 8)) -> RequestFuture:
    return RequestFuture(0, list(prompt), asyncio.get_running_loop())


def run_of(token_ids: Sequence[int], offset: int = 0, version: int = 0) -> TokenRun:
    num_tokens = len(token_ids)
    return TokenRun(
        offset=offset,
        entry_version=0,
        token_ids=np.array(token_ids, np.int32),
        policy_versions=np.full(num_tokens, version, np.int32),
        context_kv_version_min=np.zeros(num_tokens, np.int32),
        context_kv_version_mean=np.zeros(num_tokens),
    )


@in_loop
async def test_running_samples_keep_nothing_while_no_page_is_open() -> None:
    running, sample = RunningSamples(), future()
    running.follow(sample)
    running.add(sample, run_of([1]))
    assert running.samples() == []
    assert not running.wants_stream(1)
    with running.page():
        assert running.wants_stream(1)
        running.follow(sample)
        with running.page():
            pass
        assert len(running.samples()) == 1, "another page is still open"
    assert running.samples() == []


@in_loop
async def test_running_samples_are_bounded_in_samples_and_tokens() -> None:
    running, samples = RunningSamples(), [future() for _ in range(MAX_RUNNING + 3)]
    with running.page():
        for sample in samples:
            running.follow(sample)
            running.add(sample, run_of(range(MAX_RUNNING_TOKENS + 50)))
        assert not running.wants_stream(1)
        shown = [each.shown(None, TEXTS) for each in running.samples()]
        assert len(shown) == MAX_RUNNING
        assert all(len(each["tokens"]) == MAX_RUNNING_TOKENS for each in shown)
        assert {each["num_tokens"] for each in shown} == {MAX_RUNNING_TOKENS + 50}
        assert shown[0]["tokens"][0] == "token_id:50", "the newest are kept"
        samples[0].cancel()
        await asyncio.sleep(0)
        assert running.wants_stream(1), "a sample that ended leaves room"


@in_loop
async def test_running_samples_do_not_want_a_stream_of_a_large_request() -> None:
    running = RunningSamples()
    with running.page():
        assert running.wants_stream(64)
        assert not running.wants_stream(65)


@in_loop
async def test_shown_returns_only_tokens_that_the_page_lacks() -> None:
    running, sample = RunningSamples(), future()
    with running.page():
        running.follow(sample)
        (own,) = running.samples()
        first = own.shown(None, TEXTS)
        assert (first["prompt"], first["tokens"]) == ("token_id:7token_id:8", [])
        running.add(sample, run_of([1, 2]))
        second = own.shown(first["num_tokens"], TEXTS)
        running.add(sample, run_of([3], offset=2, version=1))
        third = own.shown(second["num_tokens"], TEXTS)
        assert second["tokens"] == ["token_id:1", "token_id:2"]
        assert "prompt" not in second
        assert (third["tokens"], third["versions"]) == (["token_id:3"], [1])
        assert own.shown(third["num_tokens"], TEXTS)["tokens"] == []


@in_loop
async def test_a_page_that_opens_late_follows_a_stream_from_its_next_tokens() -> None:
    running, sample = RunningSamples(), future()
    running.add(sample, run_of([1, 2]))
    with running.page():
        running.add(sample, run_of([3], offset=2))
        (own,) = running.samples()
        shown = own.shown(None, TEXTS)
        assert (shown["num_tokens"], shown["tokens"]) == (3, ["token_id:3"])


@in_loop
async def test_read_follows_a_sample_whose_client_wants_no_stream() -> None:
    running, sample, tokens = RunningSamples(), future(), StreamedTokens()
    with running.page():
        running.read([RequestStream(sample, tokens, 1)])
        tokens.add(run_of([4, 5]))
        for _ in range(5):
            await asyncio.sleep(0)
        (own,) = running.samples()
        assert own.shown(None, TEXTS)["tokens"] == ["token_id:4", "token_id:5"]
        sample.set_exception(ValueError("the engine's"))
        tokens.end()
        for _ in range(5):
            await asyncio.sleep(0)
        assert running.samples() == []
    with pytest.raises(ValueError, match="the engine's"):
        sample.result()


def chat_texts() -> TokenTexts:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chat_model.tokenizer())
    return TokenTexts(HFTokenizer(tokenizer), max_characters=100)


def test_pieces_of_joins_the_bytes_of_a_character() -> None:
    texts = chat_texts()
    ids = texts.tokenizer.encode("aé🙂")
    assert len(ids) == 1 + 2 + 4
    assert texts.pieces_of(ids) == ["a", "", "é", "", "", "", "🙂"]
    assert texts.pieces_of(ids[:-1]) == ["a", "", "é", "", "", "\ufffd"]
    assert texts.pieces_of(ids[:-1], more_follow=True) == ["a", "", "é", "", "", ""]
    assert texts.pieces_of([]) == []


@in_loop
async def test_shown_joins_a_character_whose_tokens_come_one_by_one() -> None:
    texts = chat_texts()
    ids = texts.tokenizer.encode("é🙂b")
    running, sample = RunningSamples(), future(texts.tokenizer.encode("a"))
    pieces, num_sent = list[str](), 0
    with running.page():
        for offset, token_id in enumerate(ids):
            running.add(sample, run_of([token_id], offset=offset))
            (own,) = running.samples()
            pieces += own.shown(num_sent, texts)["tokens"]
            num_sent = own.num_tokens
    assert "".join(pieces) == "é🙂b"
