"""Chat: the template's ids, texts as they stream, tools, and fields that agents read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout import LLM, SamplingParams
from tests.serve import chat_model
from tests.serve.chat_model import CALL, END, LLAMA_CALL, START
from tests.serve.served import CONFIG, Served

pytestmark = pytest.mark.distributed

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = f"{START}user\nHello{END}\n{START}assistant\n"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(chat_server: Served) -> Served:
    return chat_server


def ids_of(text: str) -> list[int]:
    return chat_model.tokenizer().encode(text, add_special_tokens=False).ids


def test_chat_generates_from_the_rendered_ids(served: Served) -> None:
    with LLM(chat_model.directory(), None, CONFIG) as llm:
        expected = llm.generate(
            TEXT, SamplingParams(num_tokens_to_generate=20, seed=4, return_log_probs=True)
        )
    body = {
        "messages": MESSAGES,
        "max_tokens": 20,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "return_tokenized_data": True,
        "return_raw_text": True,
    }
    reply = served.post(PATH, body).json()
    (choice,) = reply["choices"]
    assert reply["object"] == "chat.completion"
    assert reply["prompt_token_ids"] == ids_of(TEXT)
    message, content = choice["message"], choice["logprobs"]["content"]
    assert message["content"] == message["raw_text"] == expected.generated_text
    assert choice["token_ids"] == message["generation_token_ids"] == expected.generated_tokens
    assert message["prompt_token_ids"] == ids_of(TEXT)
    log_probs = [entry["logprob"] for entry in content]
    assert log_probs == message["generation_log_probs"]
    assert log_probs == pytest.approx(expected.generated_log_probs.tolist(), abs=1e-4)
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    own = [bytes(entry["bytes"]) for entry in content]
    assert [each.decode(errors="replace") for each in own] == [e["token"] for e in content]
    assert b"".join(own).decode(errors="replace") == message["content"]
    assert reply["usage"]["prompt_tokens"] == len(ids_of(TEXT))


def test_streamed_chat_equals_the_whole_reply(served: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 24, "seed": 8, "n": 2, "return_token_ids": True}
    whole = served.post(PATH, body).json()["choices"]
    streamed = body | {"stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    *events, usage = served.events(PATH, streamed)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole)
    for choice in whole:
        mine = [e for e in events if e["choices"][0]["index"] == choice["index"]]
        assert mine[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[0]["prompt_token_ids"] == ids_of(TEXT)
        parts = [event["choices"][0] for event in mine]
        assert (
            "".join(p["delta"].get("content") or "" for p in parts)
            == (choice["message"]["content"])
        )
        ids = [i for p in parts for i in p.get("token_ids", [])]
        assert ids == choice["token_ids"]
        assert sum(len(p["logprobs"]["content"]) for p in parts if p["logprobs"]) == len(ids)
        assert [p["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(("call", "city"), [(CALL, "Oslo"), (LLAMA_CALL, "Bergen")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_is_parsed(served: Served, call: str, city: str, stream: bool) -> None:
    (call_id,), (end_id,) = ids_of(call), ids_of(END)
    body = {
        "messages": MESSAGES,
        "tools": [TOOL],
        "max_tokens": 1,
        "logit_bias": {str(call_id): 100.0},
        "stop_token_ids": [call_id],
        "include_stop_str_in_output": True,
        "stream": stream,
    }
    assert end_id != call_id
    if stream:
        parts = [event["choices"][0] for event in served.events(PATH, body)]
        (message,) = [p["delta"] for p in parts if "tool_calls" in p["delta"]]
        assert message["tool_calls"][0]["index"] == 0
        assert not any(p["delta"].get("content") for p in parts)
        reason = parts[-1]["finish_reason"]
    else:
        (choice,) = served.post(PATH, body).json()["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        assert message["content"] is None
    (made,) = message["tool_calls"]
    assert made["type"] == "function"
    assert made["function"]["name"] == "get_weather"
    assert json.loads(made["function"]["arguments"]) == {"city": city}
    assert reason == "tool_calls"


def test_tools_are_rendered_but_not_parsed_with_tool_choice_none(served: Served) -> None:
    (call_id,) = ids_of(CALL)
    body = {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "none",
        "max_tokens": 1,
        "logit_bias": {str(call_id): 100.0},
        "return_token_ids": True,
    }
    reply = served.post(PATH, body).json()
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert len(reply["prompt_token_ids"]) > len(ids_of(TEXT))


def test_ids_of_earlier_turns_are_taken_as_they_are(served: Served) -> None:
    turn = ids_of(TEXT)
    body = {"max_tokens": 3, "seed": 1, "return_token_ids": True}
    by_ids = served.post(PATH, body | {"prompt_token_ids": turn}).json()
    by_text = served.post(PATH, body | {"messages": MESSAGES}).json()
    assert by_ids["prompt_token_ids"] == turn
    assert by_ids["choices"][0]["token_ids"] == by_text["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, TEXT),
        ({"chat_template_kwargs": {"shout": True}}, TEXT + "LOUD"),
        ({"add_generation_prompt": False}, TEXT.removesuffix(f"{START}assistant\n")),
        ({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "Hello"),
        (
            {
                "messages": [*MESSAGES, {"role": "assistant", "content": "I th"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            TEXT + "I th",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                    }
                ]
            },
            START + 'assistant\n{"a": 1}' + f"{END}\n{START}assistant\n",
        ),
    ],
)
def test_templates_get_what_they_expect(served: Served, fields: dict[str, Any], text: str) -> None:
    answer = served.post("/tokenize", {"messages": MESSAGES} | fields)
    assert answer.status == 200, answer.body
    assert answer.json()["tokens"] == ids_of(text)
    assert answer.json()["count"] == len(ids_of(text))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": "Hello"}, "messages"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template": "{{ raise_exception('no way') }}"}, "no way"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "unsafe"),
        ({"chat_template": "{% if %}"}, "template"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "maximum context length"),
    ],
)
def test_bad_conversations_are_refused(served: Served, fields: dict[str, Any], word: str) -> None:
    answer = served.post(PATH, {"messages": MESSAGES, "max_tokens": 2} | fields)
    assert answer.status == 400, answer.body
    assert word in answer.json()["error"]["message"]


def test_texts_stop_where_they_should(served: Served) -> None:
    without_calls = {str(i): -100.0 for text in (CALL, LLAMA_CALL) for i in ids_of(text)}
    body = {"prompt": "abc", "max_tokens": 40, "seed": 2, "echo": True, "return_token_ids": True}
    body["logit_bias"] = without_calls
    (plain,), _ = served.completed("/v1/completions", body)
    assert plain["text"].startswith("abc")
    assert plain["prompt_token_ids"] == ids_of("abc")
    word = plain["text"][10:12]
    place = plain["text"].index(word, 3)
    (cut,), _ = served.completed("/v1/completions", body | {"stop": [word]})
    assert cut["text"] == plain["text"][:place]
    assert cut["finish_reason"] == "stop"
    (kept,), _ = served.completed(
        "/v1/completions", body | {"stop": word, "include_stop_str_in_output": True}
    )
    assert kept["text"] == plain["text"][: place + 2]
    (streamed,), _ = served.completed("/v1/completions", body | {"stop": [word], "stream": True})
    assert streamed["text"] == cut["text"]


def test_special_tokens_are_shown_on_request(served: Served) -> None:
    (end_id,) = ids_of(END)
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "logit_bias": {str(end_id): 100.0},
        "ignore_eos": True,
        "logprobs": 0,
    }
    for stream in (False, True):
        (hidden,), _ = served.completed("/v1/completions", body | {"stream": stream})
        (shown,), _ = served.completed(
            "/v1/completions", body | {"skip_special_tokens": False, "stream": stream}
        )
        assert (hidden["text"], shown["text"]) == ("", END * 2)
        assert shown["logprobs"]["tokens"] == [END, END]
        assert shown["logprobs"]["text_offset"] == [0, len(END)]


def test_the_tokenizer_is_served(served: Served) -> None:
    answer = served.post("/tokenize", {"prompt": f"hé{END}", "return_token_strs": True}).json()
    assert answer["tokens"] == ids_of(f"hé{END}")
    # As the vocabulary writes bytes, and not as text, which half a character would not have.
    assert answer["token_strs"] == ["h", "Ã", "©", END]
    assert answer["max_model_len"] == 512
    assert served.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": f"hé{END}"}
    info = served.get("/tokenizer_info").json()
    assert info["eos_token"] == END
    assert info["chat_template"] == chat_model.TEMPLATE
    for path, body in (
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ):
        assert served.post(path, body).status == 400
