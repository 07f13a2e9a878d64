"""Order of a token's alternatives in each protocol: the token itself, then the most likely."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.served import Served

pytestmark = pytest.mark.distributed

PROMPT = list(range(40, 52))
# Any of 264 tokens: the sampled one is rarely among the likeliest.
SAMPLING = {"max_tokens": 8, "seed": 3, "temperature": 3.0}
NUM_TOP = (0, 1, 4)


@pytest.fixture(scope="module")
def served(chat_server: Served) -> Served:
    return chat_server


def reply(served: Served, path: str, **body: Any) -> Any:
    answer = served.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json()


def assert_token_then_likeliest(
    entries: list[tuple[int, float, int]], token: tuple[int, float, int], num_top: int
) -> None:
    """`entries`: (id, log-prob, rank) of a token and its alternatives."""
    own_id, own_log_prob, own_rank = token
    assert entries[0] == (own_id, own_log_prob, own_rank)
    others = entries[1:]
    assert [lp for _, lp, _ in others] == sorted((lp for _, lp, _ in others), reverse=True)
    ranks = [rank for _, _, rank in others]
    assert ranks == [r for r in range(1, num_top + 1) if r != own_rank], "no rank twice or left out"
    assert own_id not in [i for i, _, _ in others]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", NUM_TOP)
def test_top_logprobs_of_tokens_out_begin_with_the_token(
    served: Served, num_top: int, stream: bool
) -> None:
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING | {"logprobs": num_top}}
    path = "/inference/v1/generate"
    if stream:
        choices = [e["choices"][0] for e in served.events(path, body | {"stream": True})]
    else:
        choices = reply(served, path, **body)["choices"]
    content = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert len(content) == 8
    assert any(entry["rank"] > num_top for entry in content), "not all are among the likeliest"
    for entry in content:
        top = [(e["token_id"], e["logprob"], e["rank"]) for e in entry["top_logprobs"]]
        token = (entry["token_id"], entry["logprob"], entry["rank"])
        assert_token_then_likeliest(top, token, num_top)


@pytest.mark.parametrize("num_top", NUM_TOP)
def test_top_logprobs_of_a_completion_begin_with_the_token(served: Served, num_top: int) -> None:
    body = {"prompt": PROMPT, "logprobs": num_top, "return_tokens_as_token_ids": True}
    (choice,) = reply(served, "/v1/completions", **body, **SAMPLING)["choices"]
    logprobs = choice["logprobs"]
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    for token, log_prob, top in rows:
        first, *others = top.items()
        assert first == (token, log_prob)
        assert num_top <= len(top) <= num_top + 1
        assert [lp for _, lp in others] == sorted((lp for _, lp in others), reverse=True)


@pytest.mark.parametrize("num_top", NUM_TOP)
def test_top_logprobs_of_a_chat_begin_with_the_token(served: Served, num_top: int) -> None:
    body = {"prompt_token_ids": PROMPT, "logprobs": True, "top_logprobs": num_top}
    body |= {"return_tokens_as_token_ids": True}
    (choice,) = reply(served, "/v1/chat/completions", **body, **SAMPLING)["choices"]
    content = choice["logprobs"]["content"]
    for entry in content:
        top = [(e["token"], e["logprob"]) for e in entry["top_logprobs"]]
        assert len(top) == num_top
        assert top[:1] == [(entry["token"], entry["logprob"])][:num_top]


@pytest.mark.parametrize("num_top", NUM_TOP)
@pytest.mark.parametrize(
    ("path", "prompt_key"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "prompt_token_ids"),
        ("/inference/v1/generate", "token_ids"),
    ],
)
def test_prompt_logprobs_begin_with_the_prompts_token(
    served: Served, path: str, prompt_key: str, num_top: int
) -> None:
    fields: dict[str, Any] = {"prompt_logprobs": num_top, "max_tokens": 1}
    body = {"sampling_params": fields} if "inference" in path else fields
    answer = reply(served, path, **{prompt_key: PROMPT}, **body)
    scores = answer["choices"][0]["prompt_logprobs"] if "v1/comp" in path else None
    scores = answer["prompt_logprobs"] if scores is None else scores
    assert scores[0] is None
    for token_id, row in zip(PROMPT[1:], scores[1:], strict=True):
        entries = [(int(i), own["logprob"], own["rank"]) for i, own in row.items()]
        own = row[str(token_id)]
        assert_token_then_likeliest(entries, (token_id, own["logprob"], own["rank"]), num_top)
