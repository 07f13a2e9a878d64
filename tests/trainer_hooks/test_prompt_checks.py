"""check_rows and PromptCheck: all rows are checked before a job, refused by name or skipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout.errors import ConfigError
from rollout.text import RenderedText
from tests.tokenizer_layouts import LAYOUTS
from tests.trainer_hooks.test_prompt_sources import write_lines
from trainer_hooks.prompts.checks import CheckedWhenRead, PromptCheck, check_rows, place_of
from trainer_hooks.prompts.ledger import as_prompt_item
from trainer_hooks.prompts.sources import JsonlPrompts
from trainer_hooks.train.settings import ModelSettings
from trainer_hooks.train.task import prompt_check


def letters(texts: Sequence[str]) -> list[list[int]]:
    """Return one token per letter."""
    return [[ord(letter) - ord("a") for letter in text.replace(" ", "")] for text in texts]


CHECK = PromptCheck(encode_all=letters, vocab_size=26, max_sequence_length=6)
BAD_LINES = [
    ('{"prompt": ""}', "is ''"),
    ('{"prompt": null}', "is None"),
    ('{"answer": "a"}', "no column 'prompt'"),
    ('{"prompt": "abcdef"}', "6 tokens leaves no room to answer in engine.max_sequence_length=6"),
    ('{"prompt": "  "}', "the prompt is empty: it has no token"),
    ('{"prompt": [3, 26]}', r"token ids must be in \[0, 26\); these are in \[3, 26\]"),
    ('{"prompt": [-1]}', r"token ids must be in \[0, 26\)"),
    ('{"prompt": "a", "answer": "\\ud83d"}', "half a surrogate pair"),
    ('{"prompt": "a"', "is not JSON"),
    ("[]", "is a list; it must be an object"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_check_rows_names_a_bad_row_by_file_and_line(
    tmp_path: Path, line: str, message: str
) -> None:
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "abc"}\n', "\n", line + "\n")
    match = rf"p\.jsonl, line 3.*{message}.*data\.on_bad_row=skip"
    with pytest.raises(ConfigError, match=match):
        check_rows(JsonlPrompts(path), CHECK, "refuse", "data")


def test_on_bad_row_skip_skips_and_counts_bad_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [line for bad, _ in BAD_LINES for line in (bad + "\n", '{"prompt": "good"}\n')]
    path = write_lines(tmp_path / "p.jsonl", *lines)
    with caplog.at_level(logging.WARNING):
        checked = check_rows(JsonlPrompts(path), CHECK, "skip", "data")
    assert [checked.rows[i].prompt for i in range(len(checked.rows))] == ["good"] * len(BAD_LINES)
    assert len(set(checked.keys)) == 1
    assert checked.num_skipped == len(BAD_LINES)
    (record,) = caplog.records
    assert "data: 10 of 20 rows are bad and skipped" in record.getMessage()
    assert "and 7 more bad rows" in record.getMessage()
    assert place_of(checked.rows, 2) == f"{path}, line 6"


def test_check_rows_refuses_a_source_without_a_good_row() -> None:
    with pytest.raises(ConfigError, match="data has no row to train on, all 2 are bad: row 0"):
        check_rows(["", ""], CHECK, "skip", "data")


def test_check_rows_leaves_good_rows_as_they_are() -> None:
    rows = ["a", {"prompt": [1, 2], "answer": None}]
    checked = check_rows(rows, CHECK, "refuse", "data")
    assert (checked.rows, checked.num_skipped) == (rows, 0)
    assert len(set(checked.keys)) == 2


@pytest.mark.parametrize("answer", [None, True, ["17"], {"value": 17}])
def test_answer_column_must_hold_texts_or_numbers(answer: Any) -> None:
    check = PromptCheck(encode_all=letters, answer_column="answer")
    rows = [{"prompt": "a", "answer": good} for good in ("17", 17, 1.5)]
    assert check_rows(rows, check, "refuse", "data").num_skipped == 0
    with pytest.raises(ConfigError, match=r"row 3 .*'answer', which is .* text or a number"):
        check_rows([*rows, {"prompt": "a", "answer": answer}], check, "refuse", "data")
    with pytest.raises(ConfigError, match=r"row 3 .*has hint; set warmup\.answer_column"):
        check_rows([*rows, {"prompt": "a", "hint": ""}], check, "refuse", "data")


def test_checked_when_read_replaces_a_bad_row_by_the_next_good_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = CheckedWhenRead(["a", "", "abcdefgh", "b"], CHECK)
    with caplog.at_level(logging.WARNING):
        assert [rows[i].prompt for i in range(len(rows))] == ["a", "b", "b", "b"]
    assert "row 2 of the prompts: a prompt of 8 tokens" in caplog.text
    with pytest.raises(IndexError):
        rows[4]
    with pytest.raises(ConfigError, match="2 successive rows are bad: row 0 of the prompts"):
        CheckedWhenRead(["", ""], CHECK)[0]


def test_check_rows_encodes_prompts_in_batches() -> None:
    calls = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        calls.append(len(texts))
        return letters(texts)

    check = PromptCheck(encode_all=encode, max_sequence_length=6)
    assert len(check_rows(["abc"] * 1000, check, "refuse", "data").keys) == 1000
    assert sum(calls) == 1000
    assert len(calls) < 5
    assert check.faults([as_prompt_item([1, 2])]) == [None]


def test_prompt_check_counts_the_engines_tokens_of_a_prompt(
    tmp_path: Path,
) -> None:
    LAYOUTS["llama bpe with bos"](tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 1000}')
    text = "The quick brown fox"
    with_bos, without = len(tokenizer(text).input_ids), len(tokenizer.tokenize(text))
    assert with_bos == without + 1
    check = prompt_check(ModelSettings(path=str(tmp_path)), tokenizer, with_bos)
    items = [as_prompt_item(text), as_prompt_item(RenderedText(text))]
    raw, rendered = check.faults(items)
    assert raw is not None
    assert f"a prompt of {with_bos} tokens leaves no room" in raw
    assert rendered is None
