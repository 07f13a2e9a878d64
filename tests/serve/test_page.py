"""The page at `/`: its events, and their display in a browser while a job runs."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
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
from rollout.serve.page import recent
from rollout.serve.page.fleet import FleetFeed
from rollout.serve.page.recent import MAX_SAMPLES, RecentSamples
from tests.apis.fleets import weights
from tests.serve.chromium import PROGRAM, Tab, open_tab
from tests.serve.served import Served, served_directory
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.distributed
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
SCREENSHOTS = os.environ.get("ROLLOUT_TEST_SCREENSHOTS")  # a folder that keeps them
TEXT = """the a one we let then so if is of to and for sum two add three times gives answer number
    first next step find each value total has by from with that which therefore because all"""
STEMS = TEXT.split()


# A thousand samples of 200 tokens at once, as after a long watch.
MANY_SAMPLES = """addSamples(Array.from({length: 1000}, (_, i) => ({
    serial: 1e6 + i, time: 0, finish_reason: "stop", version: 3, num_prompt_tokens: 0,
    num_tokens: 200, prompt: "", tokens: Array(200).fill("x"), versions: Array(200).fill(3),
    kv_staleness: Array(200).fill(0), log_probs: null, policy_counts: {0: 200}, kv_counts: {0: 200},
})))"""


class Words:
    """A tokenizer whose ids are words."""

    eos_id = bos_id = None
    vocab_size = VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        return [STEMS.index(word) if word in STEMS else 1 for word in text.split()] or [0]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {STEMS[i % len(STEMS)]}" for i in ids)


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


def test_events_tell_of_engines_and_of_finished_samples(served: Served) -> None:
    body = {"prompt": [3, 4], "max_tokens": 5, "seed": 1, "logprobs": 0, "return_token_ids": True}
    (choice,) = served.completed("/v1/completions", body)[0]
    (_, server), (kind, fleet), (last, samples) = events_of(served, 3)
    assert server["model"]
    assert (kind, last) == ("fleet", "samples")
    (engine,) = fleet["engines"]
    assert (engine["rank"], engine["state"], engine["weights_version"]) == (0, "RUNNING", 0)
    assert engine["num_finished"] >= 1
    sample = samples[-1]
    assert sample["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert sample["log_probs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    assert (sample["versions"], sample["policy_counts"]) == ([0] * 5, {"0": 5})
    assert sample["kv_counts"] == {"0": 5}


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
def test_a_browser_shows_the_running_job(tmp_path: Path) -> None:
    server = served_directory(ServeConfig(port=0), Words())

    async def look() -> None:
        async with open_tab(tmp_path / "profile") as tab:
            await tab.open(server.url)
            await tab.until("document.querySelectorAll('#engines tbody tr').length == 1")
            await tab.until("Number(document.getElementById('version').textContent) >= 3")
            await tab.until("document.querySelectorAll('.token').length > 300")
            await tab.until("parseInt(document.getElementById('rate').textContent) > 0")
            await tab.until("document.querySelectorAll('#policy-histogram i').length > 1")
            # Tokens of several versions have several colours.
            await tab.until(
                "new Set([...document.querySelectorAll('.token')]"
                ".map((token) => token.style.getPropertyValue('--hue'))).size > 1"
            )
            shown = await tab.evaluate(
                "({finished: document.getElementById('finished').textContent,"
                " state: document.getElementById('state').textContent})"
            )
            assert shown["state"] == "running"
            stats = server.do(server.llm.stats())
            assert 0 < int(shown["finished"].replace(",", "")) <= stats.num_finished
            await tab.evaluate("document.querySelectorAll('.token')[40].click()")
            about = await tab.evaluate("document.getElementById('about-token').textContent")
            assert "log-prob -" in about
            assert "policy staleness" in about
            if SCREENSHOTS:
                await tab.until("Number(document.getElementById('version').textContent) >= 12")
                await tab.screenshot(Path(SCREENSHOTS, "page.png"))
                await tab.screenshot(Path(SCREENSHOTS, "page-dark.png"), dark=True)
                await tab.resize(390, 844)
                await tab.screenshot(Path(SCREENSHOTS, "page-phone.png"))
            await tab.call("Performance.enable")
            num_layouts = await num_layouts_of(tab)
            await tab.evaluate(MANY_SAMPLES)
            await tab.until("document.getElementById('num-samples').textContent == '1000'")
            num_tokens = await tab.evaluate("document.querySelectorAll('.token').length")
            assert num_tokens < 200 * 60, "only samples near the window have elements for tokens"
            assert await num_layouts_of(tab) < num_layouts + 200, "not one for each sample"
            assert tab.errors == []

    try:
        with job_on(server):
            asyncio.run(look())
    finally:
        server.close()
