"""Example turns before each prompt, and rows of functions through a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.text import RenderedText
from trainer_hooks.prompts.chat_format import ChatFormat
from trainer_hooks.prompts.ledger import PromptItem
from trainer_hooks.prompts.sources import FormattedPrompts, JsonlPrompts


class Template:
    """A tokenizer with a template that writes one line for each message."""

    chat_template = "lines"

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"{each['role'][0]}:{each['content']}\n" for each in messages) + "a:"


FORMAT = ChatFormat(Template(), "be brief", examples=[("1+1", "2"), ("2+2", "4")])
PREFIX = "s:be brief\nu:1+1\na:2\nu:2+2\na:4\n"


def test_chat_format_puts_examples_between_the_system_prompt_and_the_prompt() -> None:
    assert FORMAT([{"role": "user", "content": "3+3"}]) == PREFIX + "u:3+3\na:"
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    assert FORMAT(own) == PREFIX.replace("be brief", "own") + "u:x\na:"


def test_chat_format_adds_examples_once_to_the_rows_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+3", "answer": "6"}\n')
    item = JsonlPrompts(tmp_path / "rows.jsonl", chat_template=FORMAT)[0]
    assert item.prompt == PREFIX + "u:3+3\na:"
    assert isinstance(item.prompt, RenderedText)
    assert [message["content"] for message in item.columns["messages"]][-1] == "3+3"
    assert len(item.columns["messages"]) == 6


def test_formatted_prompts_render_texts_and_messages_and_leave_ids_and_rendered_text() -> None:
    rows: list[Any] = ["3+3", {"prompt": [{"role": "user", "content": "x"}], "answer": "y"}]
    rows += [[5, 6], (7, 8), RenderedText("u:1\na:")]
    items = list(FormattedPrompts(rows, FORMAT))
    texts = [PREFIX + "u:3+3\na:", PREFIX + "u:x\na:"]
    assert [item.prompt for item in items] == [*texts, *rows[2:]]
    assert items[1].columns["answer"] == "y"
    assert items[2:] == [PromptItem(ids_or_text) for ids_or_text in rows[2:]]
    assert isinstance(items[4].prompt, RenderedText)


def test_formatted_prompts_name_the_row_that_the_template_refuses(tmp_path: Path) -> None:
    class Refusing(Template):
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            raise ValueError("no such role")

    with pytest.raises(ConfigError, match=r"row 1 of the prompts.*no such role"):
        FormattedPrompts([[1], "x"], ChatFormat(Refusing()))[1]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1.*no such role"):
        FormattedPrompts(JsonlPrompts(tmp_path / "rows.jsonl"), ChatFormat(Refusing()))[0]
