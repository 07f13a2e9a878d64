"""A text has the same ids on every route, and its completion the same text.

The tokenizer is one of Llama's kind: it adds BOS, and its decoder strips the first space.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rollout import LLM, AsyncLLM, SamplingParams, ServeConfig
from rollout.cli.main import main
from rollout.text import RenderedText
from tests.serve.served import CONFIG, Served
from tests.tiny_models import tiny_model
from tests.tokenizer_layouts import LAYOUTS
from trainer_hooks import evaluate
from trainer_hooks.prompts.chat_format import ChatFormat
from trainer_hooks.prompts.sources import JsonlPrompts
from trainer_hooks.trl_rollouts import TRLRollouts

pytestmark = pytest.mark.distributed

TEXT = "The quick brown"
MESSAGES = [{"role": "user", "content": "The quick brown fox"}]
ONE = SamplingParams(num_tokens_to_generate=1)


@cache
def directory() -> str:
    path = tempfile.mkdtemp(prefix="rollout-test-text-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    LAYOUTS["llama bpe with bos"](Path(path))
    model = tiny_model("qwen3", seed=5, vocab_size=len(hf_tokenizer(path)))
    model.save_pretrained(path)
    return path


def hf_tokenizer(path: str | None = None) -> Any:
    return AutoTokenizer.from_pretrained(path or directory())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served(lambda: AsyncLLM(directory(), None, CONFIG), ServeConfig(port=0))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(directory(), None, CONFIG) as made:
        yield made


def ids_of_trl(prompt: Any) -> list[int]:
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(process_index=0, unwrap_model=lambda model: model),
        model=tiny_model("qwen3", seed=5, vocab_size=len(hf_tokenizer())),
        processing_class=hf_tokenizer(),
        state=SimpleNamespace(global_step=0),
        eos_token_ids=[],
        args=SimpleNamespace(generation_kwargs=None),
        **{"chat_template": None, "chat_template_kwargs": {}, "tools": None},
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None},
        **{"repetition_penalty": 1.0, "max_completion_length": 1},
    )
    with LLM(directory(), None, CONFIG) as llm, torch.no_grad():
        return TRLRollouts(llm)([prompt], trainer)["prompt_ids"][0]


def ids_of_job(row: Any, chat: ChatFormat | None, tmp_path: Path) -> list[list[int]]:
    """The ids that engines get for a row of a file: encoded by the llm, or before it."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": row}))
    prompts = JsonlPrompts(tmp_path / "rows.jsonl", chat_template=chat)
    seen: list[list[int]] = []

    async def run() -> None:
        async with AsyncLLM(directory(), None, CONFIG) as llm:

            async def generate(prompt: Any, params: Any, n: int = 1) -> Any:
                request = await llm.generate(prompt, params)
                seen.append(request.prompt_tokens.tolist())
                return request

            takes_text = SimpleNamespace(generate=generate, tokenizer=llm.tokenizer)
            await evaluate(takes_text, prompts, lambda **_: [0.0], ONE)
            takes_ids = SimpleNamespace(generate=generate)
            await evaluate(takes_ids, prompts, lambda **_: [0.0], ONE, tokenizer=hf_tokenizer())

    asyncio.run(run())
    return seen


def ids_of_command(row: dict[str, Any], tmp_path: Path) -> list[int]:
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    words = [directory(), "num_tokens_to_generate=1", "buffer_size_gb=0.02"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", *words, *files, "--token-ids"]) == 0
    ids: list[int] = json.loads((tmp_path / "out.jsonl").read_text())["prompt_token_ids"]
    return ids


def test_each_route_encodes_a_text_as_transformers(
    served: Served, llm: LLM, tmp_path: Path
) -> None:
    expected = hf_tokenizer()(TEXT).input_ids
    assert expected[0] == hf_tokenizer().bos_token_id
    completion = {"prompt": TEXT, "max_tokens": 1, "return_token_ids": True}
    score = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    scored = served.post("/generate", {"text": TEXT, "logprob_start_len": 0, **score}).json()
    found = {
        "LLM": llm.generate(TEXT, ONE).prompt_tokens.tolist(),
        "AsyncLLM": served.do(served.llm.generate(TEXT, ONE)).prompt_tokens.tolist(),
        "completions": served.post("/v1/completions", completion).json()["choices"][0][
            "prompt_token_ids"
        ],
        "tokenize": served.post("/tokenize", {"prompt": TEXT}).json()["tokens"],
        "SGLang": [token for _, token, *_ in scored["meta_info"]["input_token_logprobs"]],
        "TRLRollouts": ids_of_trl(TEXT),
        "command": ids_of_command({"prompt": TEXT}, tmp_path),
        **{f"job {i}": ids for i, ids in enumerate(ids_of_job(TEXT, None, tmp_path))},
    }
    assert found == dict.fromkeys(found, expected)


def test_each_route_encodes_a_chat_as_transformers_with_one_bos(
    served: Served, llm: LLM, tmp_path: Path
) -> None:
    theirs = hf_tokenizer()
    options = {"add_generation_prompt": True}
    expected = theirs.apply_chat_template(MESSAGES, return_dict=False, **options)
    assert expected.count(theirs.bos_token_id) == 1
    chat = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    with_bos = SamplingParams(num_tokens_to_generate=1, add_BOS=True)
    found = {
        "chat": served.post("/v1/chat/completions", chat).json()["prompt_token_ids"],
        "tokenize": served.post("/tokenize", {"messages": MESSAGES}).json()["tokens"],
        "TRLRollouts": ids_of_trl(MESSAGES),
        "rendered": llm.generate(RenderedText(text), ONE).prompt_tokens.tolist(),
        "add_BOS": llm.generate(RenderedText(text), with_bos).prompt_tokens.tolist(),
        "command": ids_of_command({"messages": MESSAGES}, tmp_path),
        **{
            f"job {i}": ids
            for i, ids in enumerate(ids_of_job(MESSAGES, ChatFormat(theirs), tmp_path))
        },
    }
    assert found == dict.fromkeys(found, expected)


def only(text: str) -> dict[str, Any]:
    """Sampling that can draw no other token than that of the word `text` after a space."""
    (token_id,) = (hf_tokenizer().convert_tokens_to_ids(f"\u2581{text}"),)
    return {"allowed_token_ids": [token_id], "ignore_eos": True}


def test_a_completion_keeps_its_first_space_and_a_stop_with_it_fires(
    served: Served, llm: LLM
) -> None:
    fields = {"prompt": "The quick", "max_tokens": 3, **only("brown")}
    for stop, text in ((None, " brown brown brown"), (" brow", ""), ("n b", " brow")):
        body = fields if stop is None else {**fields, "stop": stop}
        kept = served.post("/v1/completions", body | {"include_stop_str_in_output": True}).json()
        assert kept["choices"][0]["text"].startswith(text + (stop or ""))
        assert served.post("/v1/completions", body).json()["choices"][0]["text"] == text
        events = served.events("/v1/completions", body | {"stream": True})
        assert "".join(event["choices"][0]["text"] for event in events) == text
        params = SamplingParams(
            num_tokens_to_generate=3, stop_words=None if stop is None else [stop], **only("brown")
        )
        assert llm.generate("The quick", params).generated_text == text
        bias = {str(fields["allowed_token_ids"][0]): 100.0}
        sampling = {"max_new_tokens": 3, "stop": stop, "logit_bias": bias}
        reply = served.post("/generate", {"text": "The quick", "sampling_params": sampling}).json()
        assert reply["text"] == text


def test_echo_has_text_offset_of_each_token(served: Served) -> None:
    fields = {"max_tokens": 2, "logprobs": 1, "echo": True, **only("brown")}
    for prompt, echo in (
        ("The quick", "The quick"),
        (hf_tokenizer()("The quick").input_ids, "<s> The quick"),
        ("Zwölf 🎉", "Zwölf 🎉"),
    ):
        choice = served.post("/v1/completions", {"prompt": prompt, **fields}).json()["choices"][0]
        text, found = choice["text"], choice["logprobs"]
        assert text == f"{echo} brown brown"
        num_prompt = len(found["tokens"]) - 2
        assert found["text_offset"][num_prompt:] == [len(echo), len(echo) + len(" brown")]
        assert found["tokens"][num_prompt:] == [" brown", " brown"]
        starts = [*found["text_offset"], len(text)]
        assert starts == sorted(starts)
        assert starts[0] == 0
        for token, start, end in zip(found["tokens"], starts, starts[1:], strict=False):
            if "\ufffd" not in token and end > start:
                assert text[start:end] == token.lstrip(" " if start == 0 else "")


def test_echo_of_a_truncated_prompt_is_truncated(served: Served) -> None:
    body = {"prompt": "The quick brown", "truncate_prompt_tokens": 1, "max_tokens": 1}
    reply = served.post("/v1/completions", {**body, "echo": True, **only("fox")}).json()
    assert reply["choices"][0]["text"] == "brown fox"


def test_streamed_text_offset_equals_the_whole_reply(served: Served) -> None:
    body = {"prompt": "The", "max_tokens": 12, "seed": 3, "logprobs": 1, "stop": " brow"}
    (choice,) = served.post("/v1/completions", body).json()["choices"]
    chunks = [
        e["choices"][0]["logprobs"]
        for e in served.events("/v1/completions", {**body, "stream": True})
    ]
    streamed = [offset for chunk in chunks if chunk for offset in chunk["text_offset"]]
    assert streamed == choice["logprobs"]["text_offset"]


def test_logprobs_bytes_of_a_partial_character_are_its_own(served: Served) -> None:
    theirs = hf_tokenizer()
    parts = [theirs.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é".encode()]
    for part, byte in zip(parts, "é".encode(), strict=True):
        body = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
        body |= {"allowed_token_ids": [part]}
        (choice,) = served.post("/v1/chat/completions", body).json()["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert (entry["token"], entry["bytes"]) == ("\ufffd", [byte])
        assert entry["top_logprobs"][0]["bytes"] is not None
