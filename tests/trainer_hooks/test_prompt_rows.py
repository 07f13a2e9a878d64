"""as_item: rows of files and datasets as prompts: bytes, surrogates, messages, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rollout.errors import ConfigError
from rollout.serve.openai.chat_template import ChatTemplate
from tests.trainer_hooks.test_prompt_sources import MESSAGES, joined, write_parquet
from trainer_hooks.prompts.chat_format import ChatFormat
from trainer_hooks.prompts.ledger import PromptItem, PromptLedger
from trainer_hooks.prompts.sources import DatasetPrompts, JsonlPrompts, ParquetPrompts

CALL = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}
OTHER_CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CONVERSATIONS = [
    [{"role": "user", "content": "Bonn?"}, {"role": "assistant", "tool_calls": [CALL]}],
    [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "tool_calls": [OTHER_CALL]}],
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}],
]


def as_json(messages: Any) -> str:
    """Render messages as JSON: a template that shows everything in a message."""
    return json.dumps(messages)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"prompt": "é"}\n'.encode("latin1"),
            "line 1 is not UTF-8: its byte 13 is 0xe9; .*LATIN1",
        ),
        (b'{"prompt": "a"}\n{"prompt": "\xed\xa0\xbd"}\n', "line 2 is not UTF-8: its byte 13"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "line 1 is not UTF-8: its byte 1 .* -f UTF-16"),
        (b'{"prompt": "\\ud83d!"}\n', r"line 1 holds half a surrogate pair, '\\ud83d!'"),
        (b'{"prompt": "a", "answer": ["\\ud83d"]}\n', "line 1 holds half a surrogate pair"),
        (b'{"prompt": "a", "\\ud83d": 1}\n', "line 1 holds half a surrogate pair"),
    ],
)
def test_jsonl_prompts_refuse_a_line_that_is_not_utf_8(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"p\.jsonl, {message}"):
        list(JsonlPrompts(tmp_path / "p.jsonl"))


def test_jsonl_prompts_accept_a_byte_order_mark_and_surrogate_pairs(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "\\ud83d\\ude00"}\r\n{"prompt": "\xc3\xa9"}\r\n')
    assert [item.prompt for item in JsonlPrompts(path)] == ["😀", "é"]
    path.write_bytes(b"\xef\xbb\xbf\n" + b'{"prompt": "a"}\n')
    assert [item.prompt for item in JsonlPrompts(path)] == ["a"]


def test_text_parts_of_a_message_become_its_content_and_other_parts_are_refused(
    tmp_path: Path,
) -> None:
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2"}]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": parts}]}))
    assert JsonlPrompts(path, chat_template=joined)[0].prompt == joined(MESSAGES)
    parts += [{"type": "image", "image": "picture.png"}]
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": parts}]}))
    with pytest.raises(
        ConfigError, match=r"line 1.*part that is not text, \{'type': 'image'.*text only"
    ):
        JsonlPrompts(path, chat_template=joined)[0]
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": 4}]}))
    with pytest.raises(ConfigError, match=r"line 1.*has the content 4"):
        JsonlPrompts(path, chat_template=joined)[0]


def test_arrow_messages_have_only_the_keys_of_their_own_row(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": messages, "answer": "x"} for messages in CONVERSATIONS]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_json = [json.loads(item.prompt) for item in JsonlPrompts(path, chat_template=as_json)]
    assert of_json == CONVERSATIONS
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    filled = table.slice(0, 1).to_pylist()[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]
    assert filled == {"city": "Bonn", "a": None, "b": None}, "Arrow has filled in the keys"
    parquet = write_parquet(tmp_path / "p.parquet", rows)
    for prompts in (
        ParquetPrompts(parquet, chat_template=as_json),
        DatasetPrompts(datasets.Dataset(table), chat_template=as_json),
    ):
        own = [json.loads(item.prompt) for item in prompts]
        for messages in own:  # in Arrow, missing and null contents are equal
            assert messages[1].pop("content", None) in (None, "Hi")
        expected = [
            [m[0], {k: v for k, v in m[1].items() if k != "content"}] for m in CONVERSATIONS
        ]
        assert own == expected


def test_tool_call_arguments_as_json_text_keep_their_nulls(
    tmp_path: Path,
) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Bonn", "unit": null}'}}
    messages = [{"role": "assistant", "content": None, "name": None, "tool_calls": [call]}]
    path = write_parquet(tmp_path / "p.parquet", [{"prompt": messages}])
    (read,) = json.loads(str(ParquetPrompts(path, chat_template=as_json)[0].prompt))
    assert read["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn", "unit": None}
    assert "name" not in read


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "name": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": [{"type": None, "text": "a"}, {"text": "b"}]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": ""}}]},
        {"role": "assistant", "content": "", "reasoning_content": None},
    ],
)
def test_prompt_row_and_chat_request_of_one_message_have_the_same_text(
    tmp_path: Path, message: dict[str, Any]
) -> None:
    source = "{% for m in messages %}{{ m.content }}|{{ m | tojson }}{% endfor %}"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": [message]}))

    def by_server(messages: Any) -> str:
        return ChatTemplate(None, source).render(messages, add_generation_prompt=True)

    def by_row(messages: Any) -> str:
        return str(
            PreTrainedTokenizerBase().apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=True
            )
        )

    assert JsonlPrompts(tmp_path / "p.jsonl", chat_template=by_row)[0].prompt == by_server(
        [message]
    )


def test_chat_template_error_names_file_and_line(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        chat_template="{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}",
    )
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in (MESSAGES, system)))
    for template in (tokenizer, ChatFormat(tokenizer)):
        prompts = JsonlPrompts(path, chat_template=template)
        assert prompts[0].prompt == "2 + 2"
        with pytest.raises(ConfigError, match=r"p\.jsonl, line 2.*System role not supported"):
            prompts[1]


# ---- IterableDataset


def test_dataset_prompts_read_an_iterable_dataset_once() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(20)]
    streams = [
        datasets.Dataset.from_list(rows).to_iterable_dataset(),
        datasets.IterableDataset.from_generator(lambda: iter(rows)),
    ]
    for stream in streams:
        prompts = DatasetPrompts(stream)
        assert list(prompts) == [PromptItem(f"p{i}", {"answer": i}) for i in range(20)]
        for source in (prompts, stream):
            first, whole = PromptLedger(source, seed=3), PromptLedger(rows, seed=3)
            orders = [[ledger.issue() for _ in range(30)] for ledger in (first, whole)]
            assert orders[0] == orders[1], "the order of rows by number"
            for ticket in orders[0][:25]:
                first.consume(ticket)
            resumed = PromptLedger(source, seed=3)
            resumed.load_state_dict(first.state_dict())
            assert [resumed.issue() for _ in range(5)] == orders[0][25:]


def test_dataset_prompts_refuse_an_iterable_dataset_that_may_never_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("trainer_hooks.prompts.ledger.MAX_ITERATED_ROWS", 5)

    def endless() -> Any:
        while True:
            yield {"prompt": "again"}

    stream = datasets.IterableDataset.from_generator(endless)
    for open_rows in (DatasetPrompts, PromptLedger):
        with pytest.raises(ConfigError, match=r"IterableDataset .*may never end.*take\(n\)"):
            open_rows(stream)
    assert len(DatasetPrompts(stream.take(5))) == 5


def test_dataset_prompts_choose_a_split_by_name() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "a"}])
    for splits in (
        datasets.DatasetDict({"train": rows}),
        datasets.IterableDatasetDict({"train": rows.to_iterable_dataset()}),
    ):
        assert DatasetPrompts(splits, split="train")[0].prompt == "a"
        with pytest.raises(ConfigError, match="holds the splits train; split=None"):
            DatasetPrompts(splits)
