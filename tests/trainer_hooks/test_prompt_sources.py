"""Prompt sources: their rows, how they are read, and what they refuse."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import ConfigError
from trainer_hooks.prompts.chat_format import ChatFormat
from trainer_hooks.prompts.ledger import PromptItem
from trainer_hooks.prompts.sources import (
    DatasetPrompts,
    JsonlPrompts,
    MixedPrompts,
    ParquetPrompts,
    ReasoningGymPrompts,
)

MESSAGES = [{"role": "user", "content": "2 + 2"}]


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 3) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def verl_row(i: int) -> dict[str, Any]:
    return {
        "data_source": "made/up",
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "split": "train"},
    }


def joined(messages: Sequence[Any]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


# ---- JSONL


def test_jsonl_prompts_give_the_prompt_and_columns_of_a_line(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": [5, 6], "answer": 2, "tags": ["x"]}]
    prompts = JsonlPrompts(write_rows(tmp_path / "p.jsonl", rows))
    assert list(prompts) == [
        PromptItem("a", {"answer": 1}),
        PromptItem([5, 6], {"answer": 2, "tags": ["x"]}),
    ]


def test_jsonl_prompts_read_any_line_across_files_without_empty_lines(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", "\n", {"q": "ä0"}, "\n", "  \n", {"q": "1"})
    empty = write_lines(tmp_path / "b.jsonl")
    second = write_lines(tmp_path / "c.jsonl", {"q": "2"}, "\n", {"q": "3"}, "\n")
    prompts = JsonlPrompts([first, empty, str(second)], prompt_column="q")
    expected = ["ä0", "1", "2", "3"]
    assert len(prompts) == 4
    for index in random.Random(0).choices(range(-4, 4), k=20):
        assert prompts[index].prompt == expected[index]
    assert [item.prompt for item in prompts[1:3]] == ["1", "2"]
    with pytest.raises(IndexError, match="prompt 4 of 4"):
        prompts[4]


def test_chat_template_renders_messages_by_a_callable_or_a_tokenizer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": MESSAGES}])
    assert JsonlPrompts(path, chat_template=joined)[0].prompt == "<user>2 + 2<assistant>"

    class Tokenizer:
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            assert options == {"tokenize": False, "add_generation_prompt": True}
            return joined(messages)

    assert JsonlPrompts(path, chat_template=Tokenizer())[0].prompt == "<user>2 + 2<assistant>"


def test_chat_template_of_a_transformers_tokenizer_is_used(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": MESSAGES}])
    assert JsonlPrompts(path, chat_template=tokenizer)[0].prompt == "[user]2 + 2[assistant]"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', r"p\.jsonl, line 2 is not JSON"),
        ("[1]", r"line 2 is a list; it must be an object"),
        ('{"question": "a", "answer": 1}', r"line 2 has no column 'prompt'; it has question, ans"),
        ('{"prompt": null}', r"line 2, column 'prompt' is None; it must be text, token ids"),
        ('{"prompt": ""}', r"line 2, column 'prompt' is ''"),
        ('{"prompt": [1, true]}', r"line 2, column 'prompt' is \[1, True\]"),
        (json.dumps({"prompt": MESSAGES}), r"line 2, column 'prompt' holds chat.*chat_template"),
    ],
)
def test_jsonl_prompts_name_a_bad_line_when_it_is_read(
    tmp_path: Path, line: str, message: str
) -> None:
    prompts = JsonlPrompts(write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}\n', line, "\n"))
    assert prompts[0].prompt == "a"
    with pytest.raises(ConfigError, match=message):
        prompts[1]


def test_jsonl_prompts_refuse_a_missing_or_changed_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: No such file"):
        JsonlPrompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no file"):
        JsonlPrompts([])
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}])
    prompts = JsonlPrompts(path)
    write_rows(path, [{"prompt": "bb"}])
    with pytest.raises(ConfigError, match=r"p\.jsonl was changed"):
        prompts[0]


def test_chat_template_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template='chatml'"):
        JsonlPrompts(write_rows(tmp_path / "p", [{"prompt": "a"}]), chat_template="chatml")


# ---- parquet


def test_parquet_prompts_give_ground_truth_of_verls_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", [verl_row(i) for i in range(8)])
    prompts = ParquetPrompts(path, chat_template=joined)
    assert len(prompts) == 8
    item = prompts[7]
    assert item.prompt == "<user>question 7<assistant>"
    assert item.columns["ground_truth"] == "7"
    assert item.columns["extra_info"] == {"index": 7, "split": "train"}
    assert (item.columns["data_source"], item.columns["ability"]) == ("made/up", "math")


def test_parquet_prompts_read_any_row_across_row_groups_and_files(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i, "unread": "x"} for i in range(10)]
    paths = [
        write_parquet(tmp_path / "a.parquet", rows[:7]),
        write_parquet(tmp_path / "b.parquet", rows[7:]),
    ]
    prompts = ParquetPrompts(paths, columns=["answer"])
    for index in random.Random(0).choices(range(10), k=40):
        assert prompts[index] == PromptItem(f"p{index}", {"answer": index})


def test_parquet_prompts_refuse_a_missing_column_or_prompt_and_a_bad_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", [{"prompt": "a"}, {"prompt": None}])
    with pytest.raises(ConfigError, match=r"p\.parquet has no column 'question'; it has prompt"):
        ParquetPrompts(path, prompt_column="question")
    with pytest.raises(ConfigError, match=r"p\.parquet has no column 'answer'"):
        ParquetPrompts(path, columns=["answer"])
    with pytest.raises(ConfigError, match=r"p\.parquet, row 1, column 'prompt' is None"):
        ParquetPrompts(path)[1]
    bad = write_lines(tmp_path / "bad.parquet", "no parquet")
    with pytest.raises(ConfigError, match=r"bad\.parquet cannot be read as parquet"):
        ParquetPrompts(bad)
    with pytest.raises(ConfigError, match=r"none\.parquet cannot be read as parquet"):
        ParquetPrompts(tmp_path / "none.parquet")


def test_parquet_prompts_without_pyarrow_name_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install pyarrow"):
        ParquetPrompts(tmp_path / "p.parquet")


# ---- reasoning-gym


def test_reasoning_gym_prompts_have_the_columns_of_their_verifier() -> None:
    pytest.importorskip("reasoning_gym")
    prompts = ReasoningGymPrompts("palindrome_generation", size=4, seed=1, max_length=5)
    item = prompts[3]
    assert len(prompts) == 4
    assert "palindrome" in item.prompt
    answer, entry = item.columns["answer"], item.columns["entry"]
    assert prompts.dataset.score_answer(answer, entry=entry) == 1.0
    assert ReasoningGymPrompts(prompts.dataset)[3] == item


def test_reasoning_gym_prompts_name_the_dataset_and_settings_of_an_error() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=r"'nope'.*not registered"):
        ReasoningGymPrompts("nope", size=1)
    with pytest.raises(ConfigError, match=r"'palindrome_generation'.*max_lenth"):
        ReasoningGymPrompts("palindrome_generation", size=1, max_lenth=3)


# ---- chat formats, datasets, mixtures


class RoleTokenizer:
    """Writes messages as `joined` does; `shout` is an option of its template."""

    chat_template = "made up"

    def apply_chat_template(self, messages: Any, shout: bool = False, **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return joined(messages).upper() if shout else joined(messages)


def test_chat_format_accepts_text_and_messages_after_a_system_prompt(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "mine"}, *MESSAGES]
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": p} for p in ("2 + 2", MESSAGES, own)])
    prompts = JsonlPrompts(path, chat_template=ChatFormat(RoleTokenizer(), "be brief"))
    expected = "<system>be brief<user>2 + 2<assistant>"
    assert [item.prompt for item in prompts[:2]] == [expected] * 2
    assert prompts[0].columns["messages"] == prompts[1].columns["messages"]
    assert prompts[2].prompt == "<system>mine<user>2 + 2<assistant>"
    loud = JsonlPrompts(path, chat_template=ChatFormat(RoleTokenizer(), options={"shout": True}))
    assert loud[0].prompt == "<USER>2 + 2<ASSISTANT>"


def test_chat_format_refuses_a_tokenizer_without_a_template() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFormat(object())


def test_dataset_prompts_read_a_directory_by_split_and_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"question": str(i), "answer": i} for i in range(3)])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    for prompts in (
        DatasetPrompts(rows, "question"),
        DatasetPrompts(tmp_path / "one", "question"),
        DatasetPrompts(tmp_path / "splits", "question", split="train"),
    ):
        assert list(prompts) == [PromptItem(str(i), {"answer": i}) for i in range(3)]
    for path, column, named in (
        (tmp_path / "one", "prompt", "no column 'prompt'; it has question, answer"),
        (tmp_path / "splits", "question", "holds the splits train; split=None must name"),
        (tmp_path / "none", "question", "holds no dataset"),
    ):
        with pytest.raises(ConfigError, match=named):
            DatasetPrompts(path, column)


def test_mixed_prompts_give_every_row_and_sources_by_weight() -> None:
    few = [{"prompt": "f", "data_source": "own"}]
    many = [{"prompt": str(i)} for i in range(6)]
    mixed = MixedPrompts({"many": (many, 3.0), "few": (few, 1.0)})
    assert [item.prompt for item in mixed] == ["0", "1", "f", "2", "3", "4", "f", "5"]
    assert [item.columns["data_source"] for item in mixed[1:3]] == ["many", "own"]
    with pytest.raises(ConfigError, match="'few' has 0 rows"):
        MixedPrompts({"few": ([], 1.0)})
    with pytest.raises(ConfigError, match=r"weight=0\.0"):
        MixedPrompts({"few": (few, 0.0)})
