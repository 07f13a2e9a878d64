"""Text in and out of LLM, with a tokenizer trained in the test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollout import (
    LLM,
    DetokenizeError,
    DynamicInferenceEventType,
    HFTokenizer,
    InferenceConfig,
    InvalidRequestError,
    SamplingParams,
    Status,
)
from tests.tiny_models import pool_gb, tiny_model

TEXT = ["the quick brown fox jumps over the lazy dog", "naïve café — 東京", "a b c d e f g h i j"]


@cache
def bpe() -> Tokenizer:
    """Byte-level BPE: every text has ids and comes back from them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


@cache
def model() -> Any:
    return tiny_model("llama", vocab_size=bpe().get_vocab_size(), seed=3)


def llm_of(eos_id: int | None = None, bos_id: int | None = None) -> LLM:
    config = InferenceConfig(block_size_tokens=8, buffer_size_gb=pool_gb(model(), 200))
    return LLM(model(), HFTokenizer(bpe(), eos_id=eos_id, bos_id=bos_id), config)


def params(num_tokens: int = 30, **changes: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, seed=2, **changes)


@pytest.mark.parametrize("text", TEXT)
def test_generate_of_a_text_prompt_has_generated_text(text: str) -> None:
    llm = llm_of()
    request = llm.generate(text, params())
    ids = bpe().encode(text).ids
    assert request.prompt == text
    assert request.prompt_tokens.tolist() == ids
    assert request.generated_text == bpe().decode(request.generated_tokens)
    assert llm_of().generate(ids, params()).generated_tokens == request.generated_tokens


def test_generate_takes_text_and_ids_in_one_batch() -> None:
    text, ids = llm_of().generate([TEXT[0], bpe().encode(TEXT[1]).ids], params())
    assert text.prompt == TEXT[0]
    assert ids.prompt is None
    assert ids.generated_text == bpe().decode(ids.generated_tokens)


def test_add_bos_puts_the_tokenizers_token_first() -> None:
    request = llm_of(bos_id=1).generate(TEXT[0], params(add_BOS=True))
    assert request.prompt_tokens.tolist() == [1, *bpe().encode(TEXT[0]).ids]
    with pytest.raises(InvalidRequestError, match="no BOS token"):
        llm_of().generate(TEXT[0], params(add_BOS=True))
    with pytest.raises(InvalidRequestError, match="add_BOS=True works on text"):
        llm_of(bos_id=1).generate([3, 4], params(add_BOS=True))


def test_generate_stops_at_the_tokenizers_eos_id() -> None:
    tokens = llm_of().generate(TEXT[0], params()).generated_tokens
    end = tokens[9]
    request = llm_of(eos_id=end).generate(TEXT[0], params())
    assert request.generated_tokens == tokens[: tokens.index(end) + 1]
    assert request.finish_reason == "stop"


def test_generate_stops_at_end_ids_of_model_and_tokenizer() -> None:
    tokens = llm_of().generate(TEXT[0], params()).generated_tokens
    first, later = tokens[6], next(t for t in tokens[7:] if t not in tokens[:7])
    ending = tiny_model("llama", vocab_size=bpe().get_vocab_size(), seed=3, eos_token_id=[first])
    llm = LLM(ending, HFTokenizer(bpe(), eos_id=later), InferenceConfig(buffer_size_gb=0.01))
    request = llm.generate(TEXT[0], params())
    assert request.generated_tokens == tokens[: tokens.index(first) + 1]
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("is_kept", [False, True])
def test_stop_word_ends_generated_text_and_stays_in_the_tokens(is_kept: bool) -> None:
    tokens = llm_of().generate(TEXT[0], params()).generated_tokens
    start, word = next(
        (i, text)
        for i in range(5, 25)
        for text in [bpe().decode(tokens[i : i + 2])]
        if bpe().encode(text).ids == tokens[i : i + 2]
    )
    request = llm_of().generate(TEXT[0], params(stop_words=word, detokenize_stop_sequence=is_kept))
    assert request.finish_reason == "stop"
    assert request.generated_tokens == tokens[: start + 2]
    assert request.generated_text == bpe().decode(tokens[: start + 2 * is_kept])


def test_stop_word_is_found_inside_tokens_and_across_them() -> None:
    tokens = llm_of().generate(TEXT[0], params()).generated_tokens
    text = bpe().decode(tokens)
    ascii_runs = [text[i : i + 3] for i in range(len(text) - 3) if text[i : i + 3].isascii()]
    words = [word for word in ascii_runs if text.index(word) > 8]
    assert len(words) > 3
    for word in words:
        request = llm_of().generate(TEXT[0], params(stop_words=[word, "nowhere"]))
        count = len(request.generated_tokens)
        assert request.generated_tokens == tokens[:count]
        assert word in bpe().decode(tokens[:count])
        assert word not in bpe().decode(tokens[: count - 1])
        assert request.generated_text == text[: text.index(word)]
        assert request.finish_reason == "stop"


class FaultyTokenizer(HFTokenizer):
    """Cannot write one id."""

    faulty_id = -1

    def decode(self, ids: Sequence[int]) -> str:
        if self.faulty_id in ids:
            raise ZeroDivisionError("no such letter")
        return super().decode(ids)


def test_decode_error_leaves_one_request_without_generated_text() -> None:
    tokenizer = FaultyTokenizer(bpe())
    config = InferenceConfig(block_size_tokens=8, buffer_size_gb=pool_gb(model(), 200))
    llm = LLM(model(), tokenizer, config)
    whole = llm.generate(TEXT, params())
    tokenizer.faulty_id = next(
        t for t in whole[1].generated_tokens
        if t not in whole[0].generated_tokens + whole[2].generated_tokens
    )  # fmt: skip
    for _ in range(2):  # the engine goes on
        requests = llm.generate(TEXT, params())
        texts = [request.generated_text for request in requests]
        assert texts == [whole[0].generated_text, None, whole[2].generated_text]
        for request, before in zip(requests, whole, strict=True):
            assert request.generated_tokens == before.generated_tokens
            assert request.status is Status.COMPLETED
        error, end = requests[1].events[-2:]
        assert type(error.payload) is DetokenizeError
        assert end.type is DynamicInferenceEventType.FINISH
    assert llm.stats().num_running == 0


def test_stop_word_without_tokens_is_refused() -> None:
    letters = Tokenizer(models.BPE({"a": 0, "b": 1}, []))  # leaves out what it does not know
    llm = LLM(model(), HFTokenizer(letters), InferenceConfig(buffer_size_gb=0.01))
    with pytest.raises(InvalidRequestError, match=r"'\?' has no token"):
        llm.generate([[1]], params(stop_words=["?"]))


def test_empty_text_is_refused_as_an_empty_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm_of().generate("", params())


def test_llm_of_a_directory_loads_its_tokenizer(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    bpe().save(str(tmp_path / "tokenizer.json"))
    config = InferenceConfig(block_size_tokens=8, buffer_size_gb=pool_gb(model(), 200))
    with LLM(tmp_path, inference_config=config) as llm:
        request = llm.generate(TEXT[0], params())
    assert request.generated_tokens == llm_of().generate(TEXT[0], params()).generated_tokens
    assert request.generated_text == bpe().decode(request.generated_tokens)
