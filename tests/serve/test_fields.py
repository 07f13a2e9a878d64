"""Fields of requests: all that vLLM, SGLang and the openai package have are served, neutral or
refused by name, and none is ignored. scripts/http_fields.py reads what the packages have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout.serve import app
from rollout.serve.config import PROTOCOLS
from rollout.serve.fields import Fields, Neutral, Refused, nested, statuses
from rollout.serve.state import Route
from tests.serve.served import Served

pytestmark = pytest.mark.distributed

PEERS = json.loads((Path(__file__).parent / "peer_keys.json").read_text(encoding="utf-8"))["keys"]
# Fields of other clients, and names that a released package no longer has.
OF_OTHERS = {"logits_processors", "prompt_embeds", "return_top_p_token_ids", "packed_num_buffers"}

CHAT, COMPLETION = "POST /v1/chat/completions", "POST /v1/completions"
TOKENS, GENERATE = "POST /inference/v1/generate", "POST /generate"
MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = [5, 6, 7]
DRAWN = {"max_tokens": 1, "seed": 3}
# The smallest body of each request that is answered with 200 or, for those that change engines, is
# refused for another reason than a field.
BODIES: dict[str, Any] = {
    COMPLETION: {"prompt": "hello", **DRAWN},
    CHAT: {"messages": MESSAGES, **DRAWN},
    TOKENS: {"token_ids": PROMPT, "sampling_params": DRAWN},
    GENERATE: {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1, "sampling_seed": 3},
    },
    "POST /tokenize": {"messages": MESSAGES},
    "POST /detokenize": {"tokens": PROMPT},
}
# What a client might send: each refused field gets all of these, each served one its own.
ANY: tuple[Any, ...] = ("x", 7, True, ["x"], {"x": "y"})
VALUES: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "allowed_token_ids": [1, 2],
    "cache_salt": "salt",
    "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"shout": True},
    "continue_final_message": False,
    "continuous_usage_stats": True,
    "documents": [{"title": "a", "text": "b"}],
    "echo": True,
    "extra_key": "key",
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "include_usage": True,
    "input_ids": PROMPT,
    "logit_bias": {"4": 2.0},
    "logprob_start_len": 0,
    "logprobs": 1,
    "max_completion_tokens": 2,
    "max_new_tokens": 2,
    "max_tokens": 2,
    "messages": MESSAGES,
    "min_new_tokens": 1,
    "min_p": 0.1,
    "min_tokens": 1,
    "model": "",
    "n": 1,
    "no_stop_trim": True,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt": "hello",
    "prompt_logprobs": 0,
    "prompt_token_ids": PROMPT,
    "reasoning_effort": "high",
    "repetition_penalty": 1.1,
    "request_id": "id",
    "return_logprob": True,
    "return_provenance": True,
    "return_raw_text": True,
    "return_text_in_logprobs": True,
    "return_token_ids": True,
    "return_token_strs": True,
    "return_tokenized_data": True,
    "return_tokens_as_token_ids": True,
    "return_weight_versions": True,
    "rid": "rid",
    "sampling_params": {},
    "sampling_seed": 4,
    "seed": 4,
    "separate_reasoning": False,
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [9],
    "stream": True,
    "stream_interval": 2,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "text": "hello",
    "token_ids": PROMPT,
    "tokens": PROMPT,
    "tool_choice": "none",
    "tools": [],
    "top_k": 3,
    "top_logprobs": 1,
    "top_logprobs_num": 1,
    "top_p": 0.5,
    "truncate_prompt_tokens": 2,
    "truncation_side": "right",
}
# What else a body needs so that a field is read.
BESIDE: dict[str, Any] = {
    "continuous_usage_stats": {"include_usage": True},
    "logprob_start_len": {"return_logprob": True},
    "max_completion_tokens": {"max_tokens": None},
    "return_text_in_logprobs": {"return_logprob": True},
    "return_tokens_as_token_ids": {"logprobs": 1},
    "stream_options": {"stream": True},
    "text": {"input_ids": None},
    "top_logprobs": {"logprobs": True},
    "top_logprobs_num": {"return_logprob": True},
    "truncation_side": {"truncate_prompt_tokens": 2},
}
# The same, of one route.
VALUES_OF: dict[str, Any] = {CHAT: {"logprobs": True}}
TEMPLATE = {"chat_template": "{{ documents }}{{ reasoning_effort }}{{ messages[0].content }}"}
OF_TEMPLATE = {"documents": TEMPLATE, "reasoning_effort": TEMPLATE}
BESIDE_OF: dict[str, Any] = {
    CHAT: {"return_tokens_as_token_ids": {"logprobs": True}, **OF_TEMPLATE},
    "POST /tokenize": {"prompt": {"messages": None}, **OF_TEMPLATE},
}


@cache
def routes() -> dict[str, list[Route]]:
    """All routes by method and path; two protocols may have one path."""
    found: dict[str, list[Route]] = {}
    for protocols in (PROTOCOLS, *((protocol,) for protocol in PROTOCOLS)):
        for route in app.routes_of(protocols):
            found.setdefault(f"{route.method} {route.path}", []).append(route)
    return found


def structs_of(place: str) -> list[type[Fields]]:
    """The structs at a place of PEERS: of a body, of an object in one, or of a query."""
    method, path, *inner = place.split()
    structs: list[Any] = []
    for route in routes()[f"{method} {path}"]:
        if inner == ["?"]:
            structs.append(route.query)
        else:
            assert route.body is not None
            structs.append(nested(route.body)[inner[0]] if inner else route.body)
    return structs


@pytest.mark.parametrize("place", PEERS)
def test_each_field_of_a_peer_has_a_status(place: str) -> None:
    for struct in structs_of(place):
        assert set(PEERS[place]) <= set(statuses(struct)), struct


def test_each_neutral_field_is_a_field_of_a_peer() -> None:
    known = {key for keys in PEERS.values() for key in keys} | OF_OTHERS
    for place in PEERS:
        for struct in structs_of(place):
            assert {name for name, each in statuses(struct).items() if each} <= known


def test_all_bodies_and_queries_declare_their_fields() -> None:
    for each in (route for both in routes().values() for route in both):
        for struct in (each.body, each.query):
            assert struct is None or issubclass(struct, Fields)
            for inner in () if struct is None else nested(struct).values():
                assert issubclass(inner, Fields)


def test_every_operation_declares_body_and_query() -> None:
    """A route that does not would ignore what comes."""
    for each in (route for both in routes().values() for route in both):
        if each.access is app.Access.ADMIN and each.method == "POST":
            assert None not in (each.body, each.query), each.path


# ---- each field alone, at a server


@pytest.fixture(scope="module")
def served(chat_server: Served) -> Served:
    return chat_server


def objects(route: str) -> Iterator[tuple[str, type[Fields]]]:
    """The body of a route as "", and the objects in it by name."""
    body = app_body(route)
    yield "", body
    yield from nested(body).items()


def app_body(route: str) -> type[Fields]:
    body = routes()[route][0].body
    assert body is not None
    return body


def body_with(route: str, inner: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The smallest body with `fields`, in the object `inner` of it."""
    body = dict(BODIES[route])
    if inner == "stream_options":
        body["stream"] = True
    if not inner:
        return body | fields
    return body | {inner: {**body.get(inner, {}), **fields}}


def place_of(inner: str, name: str) -> str:
    return f"{inner}.{name}" if inner else name


def path_of(route: str) -> str:
    return route.partition(" ")[2]


def message_of(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


def steady(answer: Any) -> Any:
    """An answer without names and times."""
    if answer.headers["Content-Type"].startswith("text/event-stream"):
        return [steady_object(line) for line in events_of(answer)]
    return steady_object(answer.json())


def events_of(answer: Any) -> list[Any]:
    lines = [line for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def steady_object(value: Any) -> Any:
    if isinstance(value, dict):
        varying = ("id", "created", "request_id", "e2e_latency", "cached_tokens")
        return {name: steady_object(each) for name, each in value.items() if name not in varying}
    return [steady_object(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("route", BODIES)
def test_a_neutral_field_changes_no_answer(served: Served, route: str) -> None:
    for inner, struct in objects(route):
        plain = steady(served.post(path_of(route), body_with(route, inner, {})))
        for index, (name, status) in enumerate(statuses(struct).items()):
            if isinstance(status, Neutral):
                fields = {name: ANY[index % len(ANY)]}
                answer = served.post(path_of(route), body_with(route, inner, fields))
                assert (answer.status, steady(answer)) == (200, plain), fields


@pytest.mark.parametrize("route", BODIES)
def test_a_refused_field_is_named_with_the_remedy(served: Served, route: str) -> None:
    for inner, struct in objects(route):
        plain = steady(served.post(path_of(route), body_with(route, inner, {})))
        for name, status in statuses(struct).items():
            if not isinstance(status, Refused):
                continue
            for value in ANY:
                if status.takes(value):
                    continue
                answer = served.post(path_of(route), body_with(route, inner, {name: value}))
                assert answer.status == 400, (name, value)
                assert message_of(answer).startswith(f"{name}=")
                assert status.remedy in message_of(answer)
                if route != GENERATE:  # SGLang's errors have no param
                    assert answer.json()["error"]["param"] == name
            (harmless, *_) = status.unless or ([None],)
            answer = served.post(path_of(route), body_with(route, inner, {name: harmless}))
            assert (answer.status, steady(answer)) == (200, plain), (name, harmless)


class Recorded:
    """A decoded object that knows which of its fields were read."""

    def __init__(self, struct: msgspec.Struct, read: set[str], place: str = "") -> None:
        self._struct, self._read, self._place = struct, read, place

    def __getattr__(self, name: str) -> Any:
        self._read.add(f"{self._place}{name}")
        value = getattr(self._struct, name)
        if isinstance(value, msgspec.Struct):
            return Recorded(value, self._read, f"{name}.")
        return value


@pytest.mark.parametrize("route", BODIES)
def test_a_served_field_is_read(
    served: Served, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    decoded = app.decoded
    monkeypatch.setattr(
        app, "decoded", lambda *given, **how: Recorded(decoded(*given, **how), read)
    )
    for inner, struct in objects(route):
        for name, status in statuses(struct).items():
            if status is not None:
                continue
            values, beside = VALUES | VALUES_OF.get(route, {}), BESIDE | BESIDE_OF.get(route, {})
            fields = {**beside.get(name, {}), name: values[name]}
            read.clear()
            answer = served.post(path_of(route), body_with(route, inner, fields))
            assert answer.status == 200, (name, answer.body)
            assert place_of(inner, name) in read


@pytest.mark.parametrize("route", BODIES)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(
    served: Served, route: str
) -> None:
    for inner, struct in objects(route):
        for name, status in statuses(struct).items():
            if status is None:
                fields = {name: [[[[0]]]]}
                answer = served.post(path_of(route), body_with(route, inner, fields))
                assert answer.status == 400, name
                assert f"$.{place_of(inner, name)}" in message_of(answer)


@pytest.mark.parametrize(
    ("route", "fields", "message", "param"),
    [
        (COMPLETION, {"max_tokens": "5"}, "max_tokens='5' cannot be read: Expected", "max_tokens"),
        (CHAT, {"logit_bias": {"dog": 1}}, "logit_bias={'dog': 1} cannot be read", "logit_bias"),
        (CHAT, {"logit_bias": {"1": "a"}}, "logit_bias={'1': 'a'} cannot", "logit_bias"),
        (COMPLETION, {"stop": ["a", 7]}, "stop[1]=7 cannot be read", "stop[1]"),
        (
            GENERATE,
            {"sampling_params": {"top_k": "many"}},
            "sampling_params.top_k='many' cannot be read",
            "sampling_params.top_k",
        ),
        (CHAT, {"max_tokens": "9" * 999}, "max_tokens='99", "max_tokens"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(
    served: Served, route: str, fields: dict[str, Any], message: str, param: str
) -> None:
    answer = served.post(path_of(route), BODIES[route] | fields)
    assert answer.status == 400
    assert message in message_of(answer)
    assert len(message_of(answer)) < 400
    if route != GENERATE:
        assert answer.json()["error"]["param"] == param


def test_an_unknown_field_is_ignored_and_logged_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = {"of_a_later_client": 7, "stream_options": {"qqqqqq": None}, "stream": True}
    plain = BODIES[CHAT] | {"logit_bias": {"1": 0.5}, "temperature": 0.0}
    whole = served.post("/v1/chat/completions", plain).json()
    for _ in range(2):
        answer = served.post("/v1/chat/completions", plain | {"of_a_later_client": 7})
        assert answer.json()["choices"] == whole["choices"]
        assert served.post("/v1/chat/completions", plain | unknown).status == 200
    for place in ("of_a_later_client", "stream_options.qqqqqq"):
        lines = [r for r in caplog.records if f"field {place} is unknown" in r.getMessage()]
        assert len(lines) == 1


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"prompt": [', b'{"max_tokens": "5", "prompt": [', b"[1]", b'{"prompt": "\xff"}'),
        *(b"null", b"\x00", b'{"prompt":' + b"[" * 9999),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(served: Served, body: bytes) -> None:
    answer = served.post("/v1/completions", body)
    assert answer.status == 400
    assert "cannot be read" in message_of(answer)


@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        (
            COMPLETION,
            {"temprature": 1},
            "temprature is not a field of this request; the nearest is te",
        ),
        (GENERATE, {"temperature": 1}, "the nearest is sampling_params.temperature"),
        (
            GENERATE,
            {"sampling_params": {"max_tokens": 1}},
            "sampling_params.max_tokens is not a field",
        ),
        (GENERATE, {"sampling_params": [{"topk": 1}]}, "the nearest is sampling_params.top_k"),
        (CHAT, {"stream_options": {"include_use": True}}, "stream_options.include_use is no"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
        (GENERATE, {"top_logprobs_num": 2}, "top_logprobs_num=2 needs return_logprob=true"),
        (GENERATE, {"text": "a"}, "give input_ids or text, not both"),
        (CHAT, {"documents": [{"text": "a"}]}, "documents are not read by the chat template"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort='high' is not read by the chat"),
        (CHAT, {"stream_options": {"include_usage": False}}, "stream_options need stream=true"),
        (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options need stream"),
        (TOKENS, {"stream_options": {"include_usage": True}}, "stream_options need stream=true"),
        (COMPLETION, {"stream_interval": 0}, "stream_interval=0 must be at least 1"),
        (COMPLETION, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 must be in [1, 512]"),
        (CHAT, {"truncate_prompt_tokens": 600}, "truncate_prompt_tokens=600 must be in [1, 512]"),
        (CHAT, {"truncation_side": "middle"}, "truncation_side"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(
    served: Served, route: str, fields: dict[str, Any], message: str
) -> None:
    answer = served.post(path_of(route), BODIES[route] | fields)
    assert answer.status == 400
    assert message in message_of(answer)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (("POST", "/pause?mod=keep"), "mod"),
        (("POST", "/pause", {"mode": "keep"}), "mode"),
        (("POST", "/resume", {"tags": ["weights"]}), "tags"),
        (("POST", "/reset_prefix_cache?reset_external=true"), "reset_external"),
        (("POST", "/flush_cache?timeout=3"), "timeout"),
        (("GET", "/v1/loads?dp_rank=1"), "dp_rank"),
        (("POST", "/begin_weight_update", {"selector": "draft"}), "selector"),
        (("POST", "/continue_generation", {"empty_cache": True}), "empty_cache"),
        (("POST", "/update_weights", {"update_info": {"nmes": []}}), "update_info.nmes"),
        (("POST", "/update_weights_from_disk", {"model_path": "x", "is_async": True}), "is_async"),
    ],
)
def test_an_operation_refuses_unknown_fields(
    served: Served, call: tuple[Any, ...], param: str
) -> None:
    answer = served.call(*call)
    assert answer.status == 400
    assert param in str(answer.json())
    assert served.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize(
    "call",
    [
        ("GET", "/get_world_size?include_dp=false"),
        ("GET", "/server_info?config_format=text"),
        ("GET", "/v1/loads?include=core&format=json&dp_rank=0"),
        ("POST", "/reset_prefix_cache?reset_external=false"),
        ("POST", "/flush_cache?timeout=0"),
        ("POST", "/continue_generation", {"torch_empty_cache": False}),
        ("POST", "/abort_request", {"rid": "x", "abort_message": "y"}),
    ],
)
def test_an_operation_accepts_neutral_fields(served: Served, call: tuple[Any, ...]) -> None:
    assert served.call(*call).status == 200


# ---- what served fields do


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
        ({"truncate_prompt_tokens": 512 - 20}, slice(None)),
    ],
)
def test_truncate_prompt_tokens_keeps_a_part_of_the_prompt(
    served: Served, fields: dict[str, Any], kept: slice
) -> None:
    for route, whole in ((COMPLETION, {"prompt": PROMPT * 3}), (CHAT, {"messages": MESSAGES})):
        body = BODIES[route] | whole | {"return_token_ids": True}
        place = served.post(path_of(route), body).json()
        reply = served.post(path_of(route), body | fields).json()
        if route == COMPLETION:
            place, reply = place["choices"][0], reply["choices"][0]
        assert reply["prompt_token_ids"] == place["prompt_token_ids"][kept]


def test_truncate_prompt_tokens_of_minus_1_fills_the_context(served: Served) -> None:
    body = {"prompt": "a" * 700, "max_tokens": 12, "truncate_prompt_tokens": -1, "echo": True}
    reply = served.post("/v1/completions", body | {"ignore_eos": True}).json()
    assert reply["usage"]["prompt_tokens"] == 512 - 12
    assert reply["choices"][0]["text"].startswith("a" * 500)
    body = {"messages": [{"role": "user", "content": "a" * 700}], "truncate_prompt_tokens": -1}
    reply = served.post("/v1/chat/completions", body).json()
    assert reply["usage"]["prompt_tokens"] == 511


def test_documents_and_reasoning_effort_reach_the_template(served: Served) -> None:
    template = "{{ documents[0].text }} {{ reasoning_effort }} {{ enable_thinking }}"
    body = {"messages": MESSAGES, "chat_template": template}
    fields = {"documents": [{"title": "t", "text": "facts"}], "reasoning_effort": "none"}
    ids = served.post("/tokenize", body | fields).json()["tokens"]
    assert served.post("/detokenize", {"tokens": ids}).json()["prompt"] == "facts none False"
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    ids = served.post("/tokenize", body | fields | own).json()["tokens"]
    assert served.post("/detokenize", {"tokens": ids}).json()["prompt"] == "facts none True"
    body = BODIES[CHAT] | body | fields | {"return_token_ids": True}
    ids = served.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    assert served.post("/detokenize", {"tokens": ids}).json()["prompt"] == "facts none False"


def test_stream_interval_groups_tokens(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_interval": 6}
    sizes = [
        len(event["choices"][0]["token_ids"]) for event in served.events("/v1/completions", body)
    ]
    assert sum(sizes) == 12
    assert max(sizes) >= 6


def test_sglangs_names_of_fields_are_read_in_chats_and_completions(served: Served) -> None:
    body = BODIES[COMPLETION] | {"rid": "mine"}
    assert served.post("/v1/completions", body).json()["id"] == "cmpl-mine"
    body = BODIES[CHAT] | {"input_ids": PROMPT, "return_token_ids": True}
    assert served.post("/v1/chat/completions", body).json()["prompt_token_ids"] == PROMPT
    bias = {"logit_bias": {str(ord("a") - ord("!")): 100.0}, "max_tokens": 4, "stop": ["aa"]}
    texts = [
        served.post("/v1/completions", BODIES[COMPLETION] | bias | fields).json()["choices"][0]
        for fields in ({}, {"no_stop_trim": True}, {"include_stop_str_in_output": True})
    ]
    assert [choice["text"] for choice in texts] == ["", "aa", "aa"]


def test_priority_has_the_order_of_each_server(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    add_groups = served.llm.add_groups

    def recorded(*groups: Any, priority: int, **rest: Any) -> Any:
        given.append(priority)
        return add_groups(*groups, priority=priority, **rest)

    monkeypatch.setattr(served.llm, "add_groups", recorded)
    for route in (COMPLETION, CHAT, TOKENS, GENERATE):
        assert served.post(path_of(route), BODIES[route] | {"priority": 7}).status == 200
    # Of vLLM lower ones go first, of SGLang and the engines higher ones.
    assert given == [-7, -7, -7, 7]


def test_return_text_in_logprobs_spells_the_tokens(served: Served) -> None:
    body = BODIES[GENERATE] | {"return_logprob": True, "logprob_start_len": 0}
    body |= {"top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = served.post("/generate", body).json()["meta_info"]
    spelled = [served.post("/detokenize", {"tokens": [i]}).json()["prompt"] for i in PROMPT]
    assert [row[2] for row in meta["input_token_logprobs"]] == spelled
    for row in (meta["output_token_logprobs"][0], meta["output_top_logprobs"][0][0]):
        assert row[2] == served.post("/detokenize", {"tokens": [row[1]]}).json()["prompt"]


def test_openapi_json_forbids_unknown_fields_where_they_are_refused(served: Served) -> None:
    document = served.get("/openapi.json").json()
    forbids = {}
    for path, operations in document["paths"].items():
        schema = operations.get("post", {}).get("requestBody")
        if schema is not None:
            name = schema["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            component = document["components"]["schemas"][name]
            forbids[path] = component.get("additionalProperties") is False
    ignoring = ("/v1/completions", "/v1/chat/completions", "/inference/v1/abort_requests")
    assert [forbids[path] for path in ignoring] == [False] * 3
    assert forbids["/start_weight_update"]
    assert forbids["/update_weights"]
