"""Texts of a megabyte: refused by their length, or tokenized while the event loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from rollout.serve.errors import ApiError
from rollout.serve.token_texts import TokenTexts
from rollout.text import HFTokenizer
from tests.serve import chat_model
from tests.serve.served import Served

pytestmark = pytest.mark.distributed

SENTENCE, NUM_SENTENCES = "Once upon a time. ", 6_000
LONG, MEGABYTE = SENTENCE * NUM_SENTENCES, SENTENCE * 58_000
NUM_ITERATIONS = 5  # iterations of the event loop; none runs while the GIL is held


class Watched(HFTokenizer):
    """Counts iterations of an event loop while texts are encoded and decoded."""

    def __init__(self) -> None:
        super().__init__(chat_model.tokenizer())
        self.num_turns = self.num_during = 0

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        before = self.num_turns
        ids = super().encode_all(texts, add_special_tokens=add_special_tokens)
        self.num_during = self.num_turns - before
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        before = self.num_turns
        text = super().decode(ids, skip_special_tokens=skip_special_tokens)
        self.num_during = self.num_turns - before
        return text

    async def count(self) -> None:
        while True:
            self.num_turns += 1
            await asyncio.sleep(0)


def test_event_loop_runs_while_a_long_text_is_encoded() -> None:
    tokenizer = Watched()
    texts = TokenTexts(tokenizer, 2**24)

    async def run() -> None:
        counting = asyncio.ensure_future(tokenizer.count())
        try:
            (ids,) = await texts.encode([LONG], add_special_tokens=True)
            assert tokenizer.num_during > NUM_ITERATIONS
            many = await texts.encode([SENTENCE] * NUM_SENTENCES, add_special_tokens=True)
            assert tokenizer.num_during > NUM_ITERATIONS
            text = await texts.decode(ids)
            assert tokenizer.num_during > NUM_ITERATIONS
            before = tokenizer.num_turns
            assert len(await texts.tokens_of(ids)) == len(ids)
            assert tokenizer.num_turns - before > NUM_ITERATIONS
        finally:
            counting.cancel()
        assert ids == tokenizer.encode(LONG) == [i for each in many for i in each]
        assert text == LONG

    try:
        asyncio.run(run())
    finally:
        texts.close()


@pytest.mark.parametrize("num_characters", [2000, 2001, 5000])
def test_long_and_short_texts_are_encoded_alike(num_characters: int) -> None:
    tokenizer = chat_model.tokenizer()
    text = ("Zwölf Boxkämpfer jagen Viktor 🥊 " + chat_model.END) * (num_characters // 30)
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    for each in (HFTokenizer(tokenizer), HFTokenizer(fast)):
        for special in (False, True):
            ids = each.encode(text, add_special_tokens=special)
            assert each.encode_all([text, ""], add_special_tokens=special) == [ids, []]
            assert each.decode(ids, skip_special_tokens=False) == text
            plain = each.decode(ids)
            assert plain == text.replace(chat_model.END, "")


def test_a_text_beyond_max_tokens_is_refused_untokenized() -> None:
    tokenizer = Watched()
    texts = TokenTexts(tokenizer, 2**20)
    longest = tokenizer.max_token_length
    assert longest == len(chat_model.LLAMA_CALL) or longest == len(chat_model.CALL)
    fits, too_long = "a" * (100 * longest), "a" * (100 * longest + 1)

    async def encoded(text: str, max_tokens: int | None) -> int:
        (ids,) = await texts.encode([text], add_special_tokens=True, max_tokens=max_tokens)
        return len(ids)

    try:
        assert asyncio.run(encoded(fits, 100)) == len(fits)
        with pytest.raises(ApiError, match="maximum context length is 100 tokens"):
            asyncio.run(encoded(too_long, 100))
        assert asyncio.run(encoded(too_long, None)) == len(too_long)
        with pytest.raises(ApiError, match="max_text_characters=1048576"):
            asyncio.run(encoded("a" * (2**20 + 1), None))
    finally:
        texts.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = chat_model.served_chat(max_text_characters=2**20)
    try:
        yield server
    finally:
        server.close()


def test_max_text_characters_bounds_each_route(served: Served) -> None:
    longer = "a" * (2**20 + 1)
    message = [{"role": "user", "content": MEGABYTE}]
    for path, body, because in (
        ("/v1/completions", {"prompt": MEGABYTE}, "maximum context length"),
        ("/v1/completions", {"prompt": ["a", MEGABYTE]}, "maximum context length"),
        ("/v1/completions", {"prompt": longer, "truncate_prompt_tokens": 4}, "max_text_characters"),
        ("/v1/chat/completions", {"messages": message}, "maximum context length"),
        ("/generate", {"text": MEGABYTE}, "maximum context length"),
        ("/generate", {"text": ["a", MEGABYTE]}, "maximum context length"),
        ("/tokenize", {"prompt": longer}, "max_text_characters"),
    ):
        answer = served.post(path, body)
        assert answer.status == 400, path
        assert because in answer.json()["error"]["message"], path
    cut = {"prompt": "abc" * 50_000, "truncate_prompt_tokens": 4, "max_tokens": 1}
    assert served.post("/v1/completions", cut).json()["usage"]["prompt_tokens"] == 4
    assert served.post("/tokenize", {"prompt": "abc" * 50_000}).json()["count"] == 150_000
