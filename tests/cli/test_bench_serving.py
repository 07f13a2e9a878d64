"""bench serving against a small server that streams completions at a known pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from rollout.cli.bench_serving import ServingLoad, measure_serving
from rollout.cli.main import main
from rollout.cli.settings import UsageError
from tests.loopback_server import serving


class FakeServer:
    """Streams `max_tokens` chunks; a prompt of nothing but ones gets an error."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_open = self.most_open = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"data": [{"id": "tiny"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if set(body["prompt"]) == {1}:
            return web.json_response({"error": {"message": "no"}}, status=400)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(body["max_tokens"]):
            await answer.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await asyncio.sleep(0.002)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode())
        await answer.write(b"\n\ndata: [DONE]\n\n")
        self.num_open -= 1
        return answer


@pytest.fixture
def served() -> Iterator[tuple[FakeServer, str]]:
    fake = FakeServer()
    with serving(fake.app()) as url:
        yield fake, url


def test_every_request_is_timed_within_the_concurrency(
    served: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = served
    words = ["bench", "serving", f"url={url}", "api_key=secret", "num_prompts=12", "num_tokens=5"]
    assert main([*words, "prompt_tokens=7", "concurrency=3", "max_token_id=1", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["num_requests"], result["num_failed"]) == (12, 12), "all prompts are ones"
    assert result["first_error"].startswith("status 400")

    assert main([*words, "prompt_tokens=7", "concurrency=3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_failed"], result["num_generated_tokens"]) == (0, 60)
    assert result["num_prompt_tokens"] == 84
    assert 1 < fake.most_open <= 3
    assert result["per_token_s"]["p50"] >= 0.002
    assert result["first_token_s"]["p50"] < result["total_s"]["p50"]
    assert {body["model"] for body in fake.bodies} == {"tiny"}


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_bench_serving_takes_the_base_url_of_openai_clients(
    served: tuple[FakeServer, str], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serving", f"{served[1]}{end}", "api_key=secret", "num_prompts=1"]
    assert main([*words, "num_tokens=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_generated_tokens"] == 2


def test_bench_serving_reports_refused_requests(
    served: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serving", f"url={served[1]}"]) == 1
    assert "GET /v1/models answered 401" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bench", "serving", "url={}"], ["top", "{}"]])
def test_bench_serving_reports_a_foreign_server_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        """HTML where JSON is wanted; of /events, a connection that ends before its stream does."""
        if request.path != "/events":
            return web.Response(text="<html>", content_type="text/html")
        answer = web.StreamResponse()
        await answer.prepare(request)
        assert request.transport is not None
        request.transport.close()
        return answer

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    with serving(app) as url:
        assert main([word.format(url) for word in words]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"rollout: error: {url} did not answer")
        assert error.count("\n") == 1


def test_a_rate_spreads_the_starts(served: tuple[FakeServer, str]) -> None:
    load = ServingLoad(
        url=served[1], model="m", num_prompts=5, num_tokens=1, prompt_tokens=2, rate=100.0
    )
    summary = asyncio.run(measure_serving(load))
    assert summary.num_failed == 0
    assert summary.per_token_s.p50 is None, "requests of one token have no later token"


@pytest.mark.parametrize(
    ("field", "value"), [("concurrency", 0), ("rate", 0.0), ("url", "localhost:1")]
)
def test_an_impossible_load_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        ServingLoad(**{"url": "http://x", field: value})
