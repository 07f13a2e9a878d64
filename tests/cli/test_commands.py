"""The commands of `rollout`: output, errors and exit codes."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout import LLM, SamplingParams
from rollout.backends.cpu.library import load_library
from rollout.cli.main import COMMANDS, main
from tests.apis.fleets import directory
from tests.tiny_mixtures import tiny_mixture

SMALL = ("buffer_size_gb=0.02", "block_size_tokens=8", "num_threads=1")


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def give_stdin(monkeypatch: pytest.MonkeyPatch, *rows: object) -> None:
    text = "".join(f"{json.dumps(row) if isinstance(row, dict) else row}\n" for row in rows)
    give_stdin_bytes(monkeypatch, text.encode())


def give_stdin_bytes(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


# ---- errors


def test_mistakes_are_one_line_and_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    model = f"model={directory()}"
    capsys.readouterr()
    for words, message in (
        (["generat"], "unknown command 'generat'; did you mean generate?"),
        (
            ["bench", "model=/none"],
            "model=/none is not a directory; models are not downloaded here",
        ),
        (["explain"], "model is missing; give model=DIR"),
        (["bench", model, "block_size_tokens=3"], "must be a power of two"),
        (["bench", "serving"], "url is missing"),
        (["generate", "--input"], "expected one argument"),
        (["generate", model, "--input", "/none"], "give a file of prompts, or leave --input out"),
        (["bench", model, "gpu_memory_utilization=0.9"], "is buffer_size_gb (the GiB of the KV"),
        (["generate", model, "max_tokens=4"], "max_tokens is num_tokens_to_generate (and engine."),
        (["generate", model, "max_num_batched_tokens=4"], "is engine.max_tokens here"),
    ):
        assert main(words) == 2, words
        shown = capsys.readouterr()
        assert message in shown.err
        assert shown.err.startswith("rollout: error: ")
        assert shown.err.count("\n") == 1
        assert shown.out == ""


def test_faults_exit_with_1_and_json_errors_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serving", "url=http://127.0.0.1:9", "--json"]
    assert main(words) == 1
    (error,) = lines_of(capsys.readouterr().err)
    assert error["error"]["type"] == "RolloutError"
    assert (
        "no server answers at http://127.0.0.1:9 (connection refused)" in error["error"]["message"]
    )
    assert "rollout serve" in error["error"]["message"]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main([]) == 2


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rollout {rollout.__version__}\n"


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "nothing"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rollout: error: unknown command 'nothing'")


# ---- generate


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_rich", [True, False], ids=["", "without rich"])
def test_generate_shows_a_progress_bar_in_a_terminal_if_rich_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_rich: bool
) -> None:
    give_stdin(monkeypatch, {"prompt": [1, 2, 3]}, {"prompt": [4]})
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["generate", directory(), *SMALL, "num_tokens_to_generate=2"]) == 0
    assert len(lines_of(capsys.readouterr().out)) == 2
    shown = terminal.getvalue()
    assert ("prompts" in shown and "2/2" in shown and "tokens/s" in shown) == has_rich


def test_generate_on_a_terminal_says_how_to_type_and_how_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, {"prompt": [1, 2, 3]})
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate", directory(), *SMALL, "num_tokens_to_generate=1"]) == 0
    assert capsys.readouterr().err.startswith("type prompts, one a line; Ctrl-D on an empty line")


def test_generate_writes_the_samples_of_llm_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, {"prompt": [1, 2, 3], "task": "a"}, {"prompt_token_ids": [7]})
    words = ["generate", f"model={directory()}", *SMALL, "seed=5", "num_tokens_to_generate=6"]
    words.append("engine.max_tokens=4")  # a step's, which changes no output
    assert main([*words, "n=2", "--token-ids", "--logprobs", "--versions", "--json"]) == 0
    shown = capsys.readouterr()
    rows = lines_of(shown.out)
    config = {"buffer_size_gb": 0.02, "block_size_tokens": 8, "num_threads": 1, "seed": 5}
    with LLM(directory(), **config) as llm:
        params = SamplingParams(num_tokens_to_generate=6, return_log_probs=True)
        requests = llm.generate([[1, 2, 3], [7]], params, 2)
    assert isinstance(requests, list)
    assert [row["token_ids"] for row in rows] == [r.generated_tokens for r in requests]
    for row, request in zip(rows, requests, strict=True):
        assert row["log_probs"] == pytest.approx([float(x) for x in request.generated_log_probs])
    assert [(row["index"], row["sample"], row.get("task")) for row in rows] == [
        (0, 0, "a"),
        (0, 1, "a"),
        (1, 0, None),
        (1, 1, None),
    ]
    assert rows[0]["weight_versions"] == [{"version": 0, "start": 0, "end": 6}]
    assert rows[0]["policy_staleness"] == [0] * 6
    (summary,) = lines_of(shown.err)
    assert (summary["num_samples"], summary["num_generated_tokens"]) == (4, 24)
    assert summary["seed"] == 5


def test_a_failed_request_has_its_error_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, {"prompt": [1]}, {"prompt": [2] * 600})
    assert main(["generate", f"model={directory()}", *SMALL, "num_tokens_to_generate=2"]) == 1
    shown = capsys.readouterr()
    good, bad = lines_of(shown.out)
    assert good["finish_reason"] == "length"
    assert "error" not in good
    assert bad["finish_reason"] == "error"
    assert "512" in bad["error"]
    assert "1 of 2 failed" in shown.err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": [1]}', "oops"], "stdin, line 2 is not JSON"),
        (['{"prompt": "ab"', '{"prompt": "cd"}'], "stdin, line 1 is not JSON"),
        (['{"question": 1}'], "line 1 must be an object with one of prompt,"),
        (['{"question": 1}'], "messages; it has the keys ['question']"),
        (['{"messages": "hello"}'], "line 1: messages must be a list of objects"),
        (['{"messages": [{"role": "user"}]}'], "has no chat template"),
        (['{"prompt": ["a"]}'], "line 1: prompt must be text or a list of token ids"),
        (["hello"], "text prompts need a tokenizer"),
        (['{"prompt": [1]}', '{"prompt": []}'], "line 2: prompt must be text or a list of token"),
        (['{"prompt": ""}'], "line 1: prompt must be text or a list of token ids, and not empty"),
        (['{"prompt": "\\ud83d"}'], r"line 1 holds half a surrogate pair, '\ud83d'"),
        (['{"prompt": [1], "answer": {"a": ["\\udc00"]}}'], "line 1 holds half a surrogate pair"),
    ],
)
def test_bad_prompts_are_named_before_anything_runs(
    rows: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_stdin(monkeypatch, *rows)
    assert main(["generate", f"model={directory()}", *SMALL]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Straße\n".encode("latin1"), "line 1 is not UTF-8: its byte 5 is 0xdf; save the file as"),
        (b'{"prompt": [1]}\n{"prompt": "\xe9"}\n', "line 2 is not UTF-8: its byte 13 is 0xe9"),
        ('{"prompt": [1]}\n'.encode("utf-16"), "line 1 is not UTF-8: its byte 1"),
        (b'{"prompt": "\xed\xa0\xbd"}\n', "line 1 is not UTF-8: its byte 13 is 0xed"),
    ],
)
def test_generate_refuses_bytes_that_are_not_utf_8(
    content: bytes,
    message: str,
    in_a_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, words = tmp_path / "in.jsonl", ["generate", f"model={directory()}", *SMALL]
    if in_a_file:
        source.write_bytes(content)
        words.append(f"--input={source}")
    else:
        give_stdin_bytes(monkeypatch, content)
    assert main(words) == 2
    assert f"{source if in_a_file else 'stdin'}, {message}" in capsys.readouterr().err


def test_generate_writes_utf_8_whatever_the_encoding_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_stdin(monkeypatch, {"prompt": [1], "task": "日本"})
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["generate", f"model={directory()}", *SMALL, "num_tokens_to_generate=1"]) == 0
    (row,) = lines_of(written.getvalue().decode())
    assert row["task"] == "日本"


def test_generate_reads_over_a_byte_order_mark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin_bytes(monkeypatch, b'\xef\xbb\xbf{"prompt": [1, 2], "task": "\xc3\xa4"}\r\n')
    assert main(["generate", f"model={directory()}", *SMALL, "num_tokens_to_generate=1"]) == 0
    (row,) = lines_of(capsys.readouterr().out)
    assert (row["prompt"], row["task"]) == ([1, 2], "ä")


def test_text_is_read_from_a_file_and_written_to_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({chr(i): i - 32 for i in range(32, 127)}, unk_token="?")
    )
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}!{% endfor %}>"
    tokenizer.save_pretrained(tmp_path)
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    base = ["generate", f"model={directory()}", f"tokenizer={tmp_path}", *SMALL]
    files = ["--input", str(source), "--output", str(target), "--token-ids"]
    source.write_text("ab\n\n{c\n")
    assert main([*base, *files, "num_tokens_to_generate=3"]) == 0
    rows = lines_of(target.read_text())
    assert [row["prompt_token_ids"] for row in rows] == [[65, 66], [91, 67]]
    assert all(isinstance(row["text"], str) for row in rows)
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    assert main([*base, *files, "num_tokens_to_generate=3"]) == 0
    (row,) = lines_of(target.read_text())
    assert row["prompt_token_ids"] == [65, 1, 30], "a, ! and > by the template"
    assert f"moved the earlier {target} to {target}.previous" in capsys.readouterr().err
    assert lines_of(Path(f"{target}.previous").read_text()) == rows
    source.write_text('{"prompt": "ab"\n{"prompt": "cd"}\n')
    assert main([*base, *files]) == 2
    assert f"{source}, line 1 is not JSON" in capsys.readouterr().err


# ---- bench and explain


def test_bench_counts_all_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["num_prompts=3", "prompt_tokens=5", "num_tokens=4", "n=2"]
    assert main(["bench", f"model={directory()}", *SMALL, *load, "--json"]) == 0
    (result,) = lines_of(capsys.readouterr().out)
    assert (result["num_requests"], result["num_failed"]) == (6, 0)
    assert (result["num_generated_tokens"], result["num_prompt_tokens"]) == (24, 30)
    assert result["generated_tokens_per_s"] == pytest.approx(24 / result["seconds"])
    for name in ("first_token_s", "per_token_s", "total_s"):
        assert 0 < result[name]["p50"] <= result[name]["p99"]
    assert main(["bench", f"model={directory()}", *SMALL, *load]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("offline, ")
    assert any(line.endswith(" generated tokens/s") for line in lines)
    assert any(line.startswith("time to first token, ms") for line in lines)


def test_explain_shows_values_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"model={directory()}", *SMALL, "max_requests=4", "--json"]) == 0
    (sections,) = lines_of(capsys.readouterr().out)
    facts = {
        fact["name"]: fact for name in sections if name != "products" for fact in sections[name]
    }
    assert facts["max_requests"] == {"name": "max_requests", "value": 4, "why": "as given"}
    assert facts["block_size_tokens"]["value"] == 8
    assert facts["num_blocks"]["why"] == "what buffer_size_gb=0.02 holds"
    assert facts["max_sequence_length"]["value"] == 512
    assert facts["max_sequence_length"]["why"] == "the model's longest"
    assert facts["num_layers"]["value"] == 2
    one_call = "never" if load_library() is None else "for any number of rows"
    assert facts["forward pass in one call"]["value"] == one_call
    assert main(["explain", f"model={directory()}", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("qwen3, 2 layers, float32 on cpu: ")
    assert "matrix products: --products lists them" in shown or load_library() is None
    assert "KV blocks" in shown
    assert "as given" in shown


def test_explain_shows_positions_of_a_rope_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(directory(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    assert main(["explain", f"model={tmp_path}", *SMALL, "--json"]) == 0
    (sections,) = lines_of(capsys.readouterr().out)
    (fact,) = (each for each in sections["limits"] if each["name"] == "max_sequence_length")
    assert (fact["value"], fact["why"]) == (1024, "the model's longest")


def test_explain_shows_experts_and_recorded_routing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_mixture("glm4_moe").save_pretrained(tmp_path)
    words = ["explain", f"model={tmp_path}", *SMALL, "record_routing=true", "--json"]
    assert main(words) == 0
    (sections,) = lines_of(capsys.readouterr().out)
    (experts,) = (fact for fact in sections["model"] if fact["name"] == "num_experts")
    assert experts["value"] == 8
    assert experts["why"] == "2 of them for a token, in 1 of 2 layers"
    assert any(fact["name"] == "routing" for fact in sections["memory"])
