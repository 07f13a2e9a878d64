"""Text, stop words and logits processing over a fleet equal those of one process."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import LLM, AsyncLLM, DetokenizeError, SamplingParams, Status
from tests.apis.fleets import CONFIG, DEADLINE_S, directory
from tests.tiny_models import VOCAB_SIZE, prompt_of

pytestmark = pytest.mark.distributed

PROMPT = prompt_of(9)
PLAIN = SamplingParams(num_tokens_to_generate=24, seed=3, return_log_probs=True)
FAULTY_ID = 77
LETTERS = list(range(97, 123))
ENDS = {"config.json": 11, "generation_config.json": 12, "tokenizer": 13}
PROCESSED: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [7], "logit_bias": {7: 100.0}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 8]},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0, "logprobs_mode": "processed"},
    "frequency_penalty": {"frequency_penalty": -2.0},
}


class LetterTokenizer:
    """One token per character; it cannot write FAULTY_ID."""

    eos_id = ENDS["tokenizer"]
    bos_id = None
    vocab_size = VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        if FAULTY_ID in ids:
            raise ZeroDivisionError("no such letter")
        return "".join(chr(i) for i in ids)


def ending_directory(path: Path) -> Path:
    """The model of `fleets`, with end tokens in both of its configs."""
    shutil.copytree(directory(), path)
    for name in ("config.json", "generation_config.json"):
        file = path / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | {"eos_token_id": [ENDS[name]]}))
    return path


def test_fleet_handles_text_and_logits_as_one_process(tmp_path: Path) -> None:
    model = ending_directory(tmp_path / "model")
    forced = [replace(PLAIN, logit_bias={end: 100.0}) for end in ENDS.values()]
    jobs = [PLAIN, *(replace(PLAIN, **changes) for changes in PROCESSED.values()), *forced]
    with LLM(model, LetterTokenizer(), CONFIG) as llm:
        expected = llm.generate([PROMPT] * len(jobs), jobs)
    assert isinstance(expected, list)
    plain, *processed = expected[: 1 + len(PROCESSED)]
    assert all(request.generated_tokens != plain.generated_tokens for request in processed)
    assert all(request.finish_reason == "stop" for request in expected[-len(forced) :])
    assert (processed[0].stop_reason, expected[-1].stop_reason) == (7, None)

    async def work() -> None:
        async with AsyncLLM(model, LetterTokenizer(), CONFIG) as llm:
            given = await llm.generate([PROMPT] * len(jobs), jobs)
            assert isinstance(given, list)
            for own, other in zip(given, expected, strict=True):
                assert own.generated_tokens == other.generated_tokens
                assert own.generated_text == other.generated_text
                assert own.finish_reason == other.finish_reason
                assert own.stop_reason == other.stop_reason
                assert own.generated_log_probs.tolist() == pytest.approx(
                    other.generated_log_probs.tolist(), abs=1e-4
                )
            await check_stream(llm)
            await check_faulty(llm)

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


async def check_stream(llm: AsyncLLM) -> None:
    greedy = replace(PLAIN, temperature=0.0, allowed_token_ids=LETTERS, presence_penalty=0.1)
    (*_, request) = [item async for item in llm.stream(PROMPT, greedy)]
    text = request.generated_text
    word = text[10:13]
    end = text.index(word)
    params = replace(greedy, stop_words=[word])
    *pieces, request = [item async for item in llm.stream(PROMPT, params, as_text=True)]
    assert "".join(pieces) == request.generated_text == text[:end]
    *runs, request = [item async for item in llm.stream(PROMPT, params)]
    told = [token for run in runs for token in run]
    assert request.stop_reason == word
    assert told == request.generated_tokens == LetterTokenizer().encode(text[: end + 3])


async def check_faulty(llm: AsyncLLM) -> None:
    """A text that cannot be made costs its own request the text, or itself if it looks into it."""
    faulty = replace(PLAIN, logit_bias={FAULTY_ID: 100.0}, num_tokens_to_generate=3)
    looking = replace(faulty, stop_words=["nowhere"])
    without, healthy, failed = await llm.generate([PROMPT] * 3, [faulty, PLAIN, looking])
    assert healthy.generated_text is not None
    assert (without.status, failed.status) == (Status.COMPLETED, Status.FAILED)
    assert without.generated_text is failed.generated_text is None
    assert without.generated_tokens == [FAULTY_ID] * 3
    assert failed.generated_tokens == [FAULTY_ID]
    for request in (without, failed):
        assert type(request.events[-2].payload) is DetokenizeError
    record = await llm.client.add_request(PROMPT, faulty)
    assert type(record.current.events[-2].payload) is DetokenizeError
    *pieces, request = [item async for item in llm.stream(PROMPT, faulty, as_text=True)]
    assert (pieces, request.status) == ([], Status.COMPLETED)
