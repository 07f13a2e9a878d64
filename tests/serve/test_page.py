"""The page at `/`: its events, and their display in a browser while a job runs."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout import ServeConfig
from rollout.cli.main import main
from rollout.control.commands import FleetResults, fleet_stats
from rollout.control.reports import FleetStats
from rollout.coordinator.client.streams import RequestFuture
from rollout.serve.page import fleet as fleet_module
from rollout.serve.page import recent, routes
from rollout.serve.page.fleet import FleetFeed
from rollout.serve.page.recent import MAX_SAMPLES, RecentSamples
from tests.apis.fleets import weights
from tests.serve.chromium import PROGRAM, Tab, open_tab
from tests.serve.served import Served, served_directory
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.distributed
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
TEXT = """the a one we let then so if is of to and for sum two add three times gives answer number
    first next step find each value total has by from with that which therefore because all"""
STEMS = TEXT.split()


# A thousand samples of 200 tokens at once, as after a long watch.
MANY_SAMPLES = """addSamples(Array.from({length: 1000}, (_, i) => ({
    serial: 1e6 + i, time: 0, finish_reason: "stop", version: 3, num_prompt_tokens: 0,
    num_tokens: 200, prompt: "", tokens: Array(200).fill("x"), versions: Array(200).fill(3),
    kv_staleness: Array(200).fill(0), log_probs: null, policy_counts: {0: 200}, kv_counts: {0: 200},
    first_token_s: 0.1, token_s: null,
})))"""
# Text that would change the page, or run, if it were HTML, a style or a control character.
HOSTILE = (
    *("<img src=x onerror=document.title='run'>", "</script><script>document.title='run'</script>"),
    *(
        "<style>*{display:none}</style>",
        "\u202eright to left",
        "\x1b[31m\0",
        "a\n\nevent: fleet\n\n",
    ),
    *("&lt;b&gt;", "'; touch x; '", "${document.title='run'}", "e" + "\u0301" * 200),
)


class Words:
    """A tokenizer whose ids are words."""

    eos_id = bos_id = None
    vocab_size = VOCAB_SIZE

    def __init__(self, stems: Sequence[str] = STEMS) -> None:
        self._stems = stems

    def encode(self, text: str) -> list[int]:
        return [STEMS.index(word) if word in STEMS else 1 for word in text.split()] or [0]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {self._stems[i % len(self._stems)]}" for i in ids)


@contextmanager
def job_on(server: Served) -> Iterator[None]:
    """Eight clients that ask for completions, and an update in flight now and then."""
    is_over = threading.Event()

    def ask(seed: int) -> None:
        while not is_over.is_set():
            seed += 8
            body = {
                "prompt": "if we add two and three then the sum is",
                "max_tokens": 80 + seed * 31 % 240,
                "logprobs": 0,
                "seed": seed,
            }
            assert server.post("/v1/completions", body).status == 200

    def update() -> None:
        version = 0
        while not is_over.wait(1.0):
            version += 1
            tensors = weights(version % 3).state_dict()
            server.do(server.llm.update_weights(tensors, in_flight=True))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    threads.append(threading.Thread(target=update))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def events_of(server: Served, num_events: int, query: str = "") -> list[tuple[str, Any]]:
    """The first events of a new watcher."""

    async def read() -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{server.url}/events{query}") as answer,
        ):
            assert answer.status == 200
            kind = ""
            async for line in answer.content:
                text = line.decode().rstrip("\n")
                if text.startswith("event: "):
                    kind = text.removeprefix("event: ")
                elif text.startswith("data: "):
                    found.append((kind, json.loads(text.removeprefix("data: "))))
                if len(found) == num_events:
                    return found
        return found

    return asyncio.run(read())


def test_events_describe_engines_and_finished_samples(served: Served) -> None:
    body = {"prompt": [3, 4], "max_tokens": 5, "seed": 1, "logprobs": 0, "return_token_ids": True}
    (choice,) = served.completed("/v1/completions", body)[0]
    (_, server), (kind, fleet), (last, samples) = events_of(served, 3)
    assert server["model"]
    assert not server["needs_key"]
    assert (kind, last) == ("fleet", "samples")
    (engine,) = fleet["engines"]
    assert (engine["rank"], engine["state"], engine["weights_version"]) == (0, "RUNNING", 0)
    assert engine["num_finished"] >= 1
    assert engine["num_first_tokens"] >= 1
    assert engine["num_later_tokens"] >= 4
    assert engine["first_token_seconds"] > 0 < engine["token_seconds"]
    sample = samples[-1]
    assert sample["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert sample["log_probs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    assert (sample["versions"], sample["policy_counts"]) == ([0] * 5, {"0": 5})
    assert sample["kv_counts"] == {"0": 5}
    assert sample["first_token_s"] > 0 < sample["token_s"]


def reply_of(served: Served, body: dict[str, Any]) -> list[Any]:
    """Return the choices of a completion of three samples."""
    own = {"prompt": [5, 6], "max_tokens": 60, "seed": 4, "n": 3, "logprobs": 1}
    return served.completed("/v1/completions", {**own, **body})[0]


@pytest.mark.parametrize("stream", [False, True])
def test_events_have_the_tokens_of_running_samples(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(routes, "RUNNING_INTERVAL_S", 0.001)
    body = {"stream": stream, "return_token_ids": True}
    expected = reply_of(served, body)
    tokens: dict[int, list[str]] = {}
    has_tokens = asyncio.Event()

    async def ask() -> None:
        while not has_tokens.is_set():
            assert await asyncio.to_thread(reply_of, served, body) == expected, "as without a page"

    async def read(content: aiohttp.StreamReader) -> None:
        """Read events until one has tokens of a sample that runs."""
        kind = ""
        async for line in content:
            if line.startswith(b"event: "):
                kind = line.decode().removeprefix("event: ").strip()
            if not line.startswith(b"data: ") or kind != "running":
                continue
            for sample in json.loads(line.removeprefix(b"data: ")):
                tokens.setdefault(sample["serial"], []).extend(sample["tokens"])
                assert len(sample["tokens"]) == len(sample["versions"])
                assert sample["num_tokens"] == len(tokens[sample["serial"]])
            if any(tokens.values()):
                return

    async def watch() -> None:
        async with (
            aiohttp.ClientSession(read_bufsize=2**22) as session,
            session.get(f"{served.url}/events?samples=1") as answer,
        ):
            asking = asyncio.create_task(ask())
            await read(answer.content)
            has_tokens.set()
            await asking

    asyncio.run(watch())
    texts = [[f"token_id:{i}" for i in choice["token_ids"]] for choice in expected]
    for shown in tokens.values():
        assert any(shown == text[: len(shown)] for text in texts)


@pytest.mark.parametrize("protocols", [("openai", "vllm"), ("sglang",)])
@pytest.mark.parametrize("tokenizer", [None, "words"])
def test_example_request_is_answered(protocols: tuple[str, ...], tokenizer: str | None) -> None:
    config = ServeConfig(port=0, protocols=protocols)
    with closing(served_directory(config, None if tokenizer is None else Words())) as server:
        _, about = events_of(server, 1)[0]
        example = about["example"]
        answer = server.post("/" + example["path"], json.loads(example["body"]))
        assert answer.status == 200, answer.body
        assert num_generated_of(answer.json()) == 64


def num_generated_of(reply: dict[str, Any]) -> int:
    """Return the number of generated tokens in a reply of the openai or sglang protocol."""
    if "usage" in reply:
        return int(reply["usage"]["completion_tokens"])
    return int(reply["meta_info"]["completion_tokens"])


def test_example_request_is_a_chat_where_the_model_has_a_template(chat_server: Served) -> None:
    example = events_of(chat_server, 1)[0][1]["example"]
    assert example["path"] == "v1/chat/completions"
    assert chat_server.post("/" + example["path"], json.loads(example["body"])).status == 200


def test_example_request_is_absent_where_no_protocol_generates() -> None:
    with closing(served_directory(ServeConfig(port=0, protocols=("vllm",)))) as server:
        assert events_of(server, 1)[0][1]["example"] is None


class CountingFleet:
    """An LLM that can only be asked for counters."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.answer_delay_s = 0.0

    async def fleet_stats(self) -> FleetStats:
        self.num_asked += 1
        await asyncio.sleep(self.answer_delay_s)
        return fleet_stats(FleetResults(state="RUNNING", weights_version=0))


def test_the_engines_are_asked_only_while_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "INTERVAL_S", 0.005)
    fleet = CountingFleet()

    async def watch(counters: FleetFeed, num_snapshots: int) -> None:
        async with aclosing(counters.snapshots()) as snapshots:
            async for _ in snapshots:
                num_snapshots -= 1
                if not num_snapshots:
                    return

    async def run() -> None:
        counters = FleetFeed(fleet)  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        assert fleet.num_asked == 0
        await asyncio.gather(watch(counters, 3), watch(counters, 5))
        assert 5 <= fleet.num_asked <= 7, "once for all watchers"
        num_asked = fleet.num_asked
        await asyncio.sleep(0.02)
        assert fleet.num_asked == num_asked
        waiting = asyncio.ensure_future(watch(counters, 10**6))
        await asyncio.sleep(0.01)
        counters.close()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(run())


def test_a_watcher_that_is_slow_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "INTERVAL_S", 0.005)
    fleet = CountingFleet()

    async def run() -> None:
        counters = FleetFeed(fleet)  # type: ignore[arg-type]
        async with aclosing(counters.snapshots()) as snapshots:
            await anext(snapshots)
            fleet.answer_delay_s = 0.02
            await asyncio.sleep(0.015)
            counters.close()  # while the engines are asked
            await asyncio.sleep(0.05)
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(anext(snapshots), 5)

    asyncio.run(run())


def test_top_reads_the_same_events(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", served.url, "count=2", "--json"]) == 0
    _, snapshot = map(json.loads, capsys.readouterr().out.splitlines())
    assert [engine["rank"] for engine in snapshot["engines"]] == [0]


def test_the_page_is_whole_and_loads_nothing_from_elsewhere(served: Served) -> None:
    for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
        answer = served.get(path)
        assert answer.status == 200
        assert kind in answer.headers["Content-Type"]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
    assert served.get("/events?samples=9999").status == 400


def test_with_a_key_the_data_is_behind_it() -> None:
    server = served_directory(ServeConfig(port=0, api_key="sesame"))
    try:
        assert server.get("/").status == 200
        assert server.get("/events").status == 401
    finally:
        server.close()


class EndedFuture:
    """Stands for a RequestFuture with a record of `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        self.requests = [type("Segment", (), {"num_tokens": num_tokens})]

    def done(self) -> bool:
        return True

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self


def test_the_ring_is_bounded_by_samples_and_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(num_tokens: int) -> list[RequestFuture]:
        return [EndedFuture(num_tokens)]  # type: ignore[list-item]

    ring = RecentSamples()
    for _ in range(MAX_SAMPLES + 5):
        ring.add_ended(ended(1))
    assert [s.serial for s in ring.since(0, 2)] == [MAX_SAMPLES + 3, MAX_SAMPLES + 4]
    assert len(ring.since(0, 10**6)) == MAX_SAMPLES
    monkeypatch.setattr(recent, "MAX_TOKENS", 100)
    ring.add_ended(ended(60))
    ring.add_ended(ended(60))
    assert len(ring.since(0, 10**6)) == 1
    assert ring.since(ring.num_added, 5) == []


async def num_layouts_of(tab: Tab) -> float:
    metrics = (await tab.call("Performance.getMetrics"))["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "LayoutCount"))


@needs_browser
def test_page_shows_the_running_job(tmp_path: Path) -> None:
    server = served_directory(ServeConfig(port=0), Words())

    async def look() -> None:
        async with open_tab(tmp_path / "profile") as tab:
            await tab.open(server.url)
            await tab.until("document.querySelectorAll('#engines tbody tr').length == 1")
            await tab.until("Number(document.getElementById('version').textContent) >= 3")
            await tab.until("document.querySelectorAll('.sample .token').length > 300")
            await tab.until("document.querySelectorAll('.slot:not([hidden]) .token').length > 3")
            await tab.until("parseInt(document.getElementById('rate').textContent) > 0")
            await tab.until("document.querySelectorAll('#policy-histogram i').length > 1")
            for name in ("first-token", "between-tokens"):
                await tab.until(f"document.getElementById('{name}').textContent.endsWith('s')")
            # Tokens of several versions have several colours.
            await tab.until(
                "new Set([...document.querySelectorAll('.coloured .token')]"
                ".map((token) => getComputedStyle(token).backgroundColor)).size > 1"
            )
            shown = await tab.evaluate(
                "({finished: document.getElementById('finished').textContent,"
                " state: document.getElementById('state').textContent})"
            )
            assert shown["state"] == "running"
            stats = server.do(server.llm.stats())
            assert 0 < int(shown["finished"].replace(",", "")) <= stats.num_finished
            await tab.evaluate("document.querySelectorAll('.sample .token')[40].click()")
            about = await tab.evaluate("document.getElementById('about-token').textContent")
            assert "log-prob -" in about
            assert "policy staleness" in about
            await tab.call("Performance.enable")
            num_layouts = await num_layouts_of(tab)
            await tab.evaluate(MANY_SAMPLES)
            await tab.until("document.getElementById('num-samples').textContent == '1000'")
            num_tokens = await tab.evaluate("document.querySelectorAll('.sample .token').length")
            assert num_tokens < 200 * 60, "only samples near the window have elements for tokens"
            assert await num_layouts_of(tab) < num_layouts + 200, "not one for each sample"
            await tab.resize(390, 844)
            assert await widest_of(tab, "body *") <= 390, "fits a phone"
            assert tab.errors == []

    try:
        with job_on(server):
            asyncio.run(look())
    finally:
        server.close()


async def widest_of(tab: Tab, selector: str) -> float:
    """Return the rightmost edge of the elements of a selector that are not clipped, in pixels."""
    return float(
        await tab.evaluate(
            f"Math.max(...[...document.querySelectorAll({selector!r})]"
            ".filter((each) => !each.closest('.text-of'))"
            ".map((each) => each.getBoundingClientRect().right))"
        )
    )


@needs_browser
def test_idle_page_has_a_curl_line_that_works_and_no_colours_for_one_version(
    tmp_path: Path,
) -> None:
    """The model's name and all texts are hostile."""
    name = """it's "so" <b>$(touch x)</b>"""
    config = ServeConfig(port=0, served_model_name=name, api_key="sesame")
    server = served_directory(config, Words(HOSTILE))

    async def look() -> None:
        async with open_tab(tmp_path / "profile") as tab:
            await tab.open(server.url)
            await tab.until("document.getElementById('key-form')?.hidden === false")
            assert await tab.evaluate("document.getElementById('main').hidden")
            await tab.evaluate(
                "document.getElementById('key').value = 'sesame',"
                "document.querySelector('#key-form button').click()"
            )
            await tab.until("document.getElementById('num-engines').textContent == '1 engine'")
            assert await tab.evaluate("document.getElementById('url').textContent") == server.url
            assert await tab.evaluate("document.title") == name
            line = await tab.evaluate("document.getElementById('curl').textContent")
            assert await tab.evaluate("document.getElementById('try').open")
            shell = await asyncio.create_subprocess_exec(
                *("sh", "-c", line.replace("curl ", "curl -sS ")),
                stdout=asyncio.subprocess.PIPE,
                cwd=tmp_path,
                env={**os.environ, "ROLLOUT_API_KEY": "sesame", "no_proxy": "*"},
            )
            answer, _ = await shell.communicate()
            text = json.loads(answer)["choices"][0]["text"]
            assert not (tmp_path / "x").exists()
            await tab.until("document.querySelectorAll('.sample .token').length == 64")
            assert not await tab.evaluate("document.getElementById('try').open")
            # Each text is as it was sent, and made no elements.
            found = await tab.evaluate(
                "[...document.querySelectorAll('.sample .token')].map((each) => each.textContent)"
            )
            assert "".join(found) == text
            assert {each.strip(" ") for each in found} == {each.strip(" ") for each in HOSTILE}
            inside = "document.querySelectorAll('main :is(img, script, style, b b)').length"
            assert await tab.evaluate(inside) == 0
            assert await tab.evaluate("document.title") == name
            assert await tab.evaluate("document.querySelectorAll('.coloured').length") == 0
            note = await tab.evaluate("document.getElementById('colour-note').textContent")
            assert "version 0" in note
            # The browser logs the 401 before the key was there.
            assert [each for each in tab.errors if "401" not in each] == []

    try:
        asyncio.run(look())
    finally:
        server.close()
