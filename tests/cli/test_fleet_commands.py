"""serve and top: commands over engine processes."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollout import AsyncLLM, EngineStats
from rollout.cli.main import main
from rollout.cli.top import view_of
from rollout.control.commands import FleetResults, fleet_stats
from rollout.control.reports import FleetStats
from rollout.serve.page.fleet import FleetSnapshot, FleetView
from tests.apis.fleets import Load, directory, with_fleet

pytestmark = pytest.mark.distributed
STOP = "Ctrl-C to stop\n"


def test_serve_prints_a_request_that_works_and_ends_with_0_at_sigterm() -> None:
    """The model has no tokenizer."""
    words = [f"model={directory()}", "port=0", "buffer_size_gb=0.02", "num_threads=1"]
    server = subprocess.Popen(
        [sys.executable, "-m", "rollout", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        printed = dict(line.split(None, 1) for line in iter(server.stdout.readline, STOP))
        assert answer_of(printed["try"])["usage"]["completion_tokens"] > 0
        with urllib.request.urlopen(f"{printed['API'].strip()}/models", timeout=60) as answer:
            (model,) = json.load(answer)["data"]
        assert model["root"] == directory()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=100) == 0
        assert server.stderr is not None
        log = server.stderr.read()
        assert "serving" in log
        assert "lost" not in log, "a normal end is no loss"
    finally:
        server.kill()
        server.communicate()


def answer_of(curl: str) -> Any:
    """Send the request of a curl command and return its JSON answer."""
    _, url, _, header, _, body = shlex.split(curl)
    name, value = header.split(": ")
    request = urllib.request.Request(url, body.encode(), {name: value})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("prot=8000", "did you mean port?"),
        ("host=0.0.0.0", "set api_key"),
        ("port=x", "an integer"),
    ],
)
def test_serve_refuses_before_it_starts_anything(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", f"model={directory()}", word]) == 2
    assert message in capsys.readouterr().err


def test_serve_answers_a_model_without_weights_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(directory(), "config.json"), tmp_path)
    capfd.readouterr()
    assert main(["serve", str(tmp_path), "port=0", "seed=1", "num_threads=1"]) == 1
    (said,) = capfd.readouterr().err.splitlines()  # of this process and of the engine's
    assert said.startswith(f"rollout: error: {tmp_path} has neither model.safetensors nor")


def test_top_shows_what_the_engines_do(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(llm: AsyncLLM) -> None:
        load = Load(llm, 4, 30)
        await load.more(1)
        words = ["top", llm.address, "interval_s=0.2"]
        assert await asyncio.to_thread(main, [*words, "count=3", "--json"]) == 0
        first, *_, last = map(json.loads, capsys.readouterr().out.splitlines())
        assert [engine["rank"] for engine in last["engines"]] == [0, 1]
        assert last["state"] == "RUNNING"
        assert all(engine["generated_tokens_per_s"] == 0 for engine in first["engines"])
        assert sum(engine["generated_tokens_per_s"] for engine in last["engines"]) > 0
        assert await asyncio.to_thread(main, [*words, "count=2"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("RUNNING   2 engines") == 2, "a file gets every snapshot"
        assert printed.endswith("\n")
        await load.end()

    with_fleet(2, work)


def test_top_needs_one_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "interval_s=1"]) == 2
    assert "give one coordinator's address" in capsys.readouterr().err
    assert main(["top", "ipc:///nowhere", "interval_s=0"]) == 2


NO_ENGINES = fleet_stats(FleetResults(state="RUNNING", weights_version=3))


def stats_of(**changes: Any) -> EngineStats:
    return replace(NO_ENGINES.together, **changes)


def fleet_of(engines: dict[int, EngineStats], **changes: Any) -> FleetStats:
    return replace(NO_ENGINES, engines=engines, **changes)


def test_rates_are_differences_over_time_and_never_negative() -> None:
    view = FleetView()
    view.snapshot(fleet_of({9: stats_of(num_sampled_tokens=50), 10: stats_of()}), 10.0)
    engines = {9: stats_of(num_sampled_tokens=1), 10: stats_of(num_sampled_tokens=30)}
    snapshot = view.snapshot(fleet_of(engines), 12.0)
    assert [engine["rank"] for engine in snapshot.engines] == [9, 10]
    rates = [engine["generated_tokens_per_s"] for engine in snapshot.engines]
    assert rates == [0.0, 15.0], "rank 9 was started again"
    assert snapshot.total("generated_tokens_per_s") == 15.0
    assert "refused" not in shown(snapshot)


def test_top_shows_refused_peers_by_reason() -> None:
    refused = {"num_unknown_keys": 1_200, "num_malformed": 0, "num_unknown_peers": 1}
    snapshot = FleetView().snapshot(fleet_of({0: stats_of()}, refused=refused))
    assert "refused: 1,200 unknown keys, 1 unknown peers" in shown(snapshot)


def test_top_fits_80_columns() -> None:
    engine = stats_of(
        num_waiting=1024, num_running=256, num_paused=17, num_finished=1_234_567, num_failed=3
    )
    view = FleetView()
    view.snapshot(fleet_of({0: engine}), 10.0)
    busy = replace(engine, num_sampled_tokens=12_345, num_blocks_used=9, num_blocks_total=20)
    lines = shown(view.snapshot(fleet_of({0: busy, 1: busy}), 11.0)).splitlines()
    assert len([line for line in lines if line.strip()]) == 4, "a headline, a header, two engines"
    assert max(map(len, lines)) <= 80
    for text in ("1,234,567", "17", "45%", "12,345", "running"):
        assert any(text in line for line in lines), text
    assert not any("…" in line for line in lines)


def shown(snapshot: FleetSnapshot) -> str:
    console = Console(width=80, record=True, file=StringIO())
    console.print(view_of(snapshot))
    return console.export_text()
