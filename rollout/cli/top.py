"""rollout top: shows engines, queues, KV blocks and throughput of a fleet, live in a terminal.

`rollout.cli.main` calls `run`. It reads counters of a coordinator or a server and prints them; it
changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict
from typing import Any

import aiohttp
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollout.cli.http_faults import named_http_faults
from rollout.cli.settings import Kinds, Parser, UsageError, read_settings
from rollout.control.commands import fleet_stats
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.net.key_folder import CLIENT, peer_keys
from rollout.coordinator.net.security import CurveKeys
from rollout.errors import RolloutError
from rollout.serve.page.fleet import FleetSnapshot, FleetView

_KINDS: Kinds = {"interval_s": float, "count": int | None, "api_key": str | None}
_BAR_WIDTH = 20


def run(words: Sequence[str]) -> int:
    """Show snapshots until Ctrl-C, or as many as the setting `count` says. Returns 0. words: the
    command's arguments. Raises UsageError for wrong arguments."""
    parser = Parser(
        "top",
        "Watch the engines of a fleet: rollout top ADDRESS. ADDRESS is the address of a\n"
        "coordinator, or the URL of a server, such as http://127.0.0.1:8000.",
    )
    parser.epilog = (
        "settings:\n"
        "  interval_s=1   seconds between two snapshots of a coordinator\n"
        "  count=N        number of snapshots; default: until Ctrl-C\n"
        "Set the variable ROLLOUT_API_KEY for a server that needs a key.\n"
    )
    parser.add_argument(
        "--keys", metavar="DIR", help="folder of a client's keys, made by `rollout keys`"
    )
    given = parser.parse(words)
    targets = [word for word in given.settings if _is_target(word)]
    if len(targets) != 1:
        raise UsageError(
            f"give one coordinator's address or server's URL, not {len(targets)}: rollout top "
            "http://127.0.0.1:8000"
        )
    (values,) = read_settings([w for w in given.settings if w not in targets], _KINDS)
    interval_s, count = values.get("interval_s", 1.0), values.get("count")
    if interval_s <= 0:
        raise UsageError(f"interval_s={interval_s} must be above 0")
    if targets[0].startswith("http"):
        snapshots = of_server(targets[0], values.get("api_key"))
    else:
        curve = None if given.keys is None else peer_keys(given.keys, CLIENT)
        snapshots = of_coordinator(targets[0], interval_s, curve)
    with named_http_faults(targets[0]):
        asyncio.run(_show(snapshots, count, is_json=given.json))
    return 0


def _is_target(word: str) -> bool:
    return "://" in word.partition("=")[0] or "=" not in word


async def of_coordinator(
    address: str, interval_s: float, curve: CurveKeys | None = None
) -> AsyncGenerator[FleetSnapshot, None]:
    """Yield a snapshot of the fleet every `interval_s` seconds, without end. curve: this client's
    keys; None without encryption. Raises CoordinatorLostError if the coordinator disconnects."""
    view = FleetView()
    async with InferenceClient(address, name="top", curve=curve) as client:
        while True:
            yield view.snapshot(fleet_stats(await client.engine_stats()))
            await asyncio.sleep(interval_s)


async def of_server(url: str, api_key: str | None) -> AsyncGenerator[FleetSnapshot, None]:
    """Yield the snapshots that a server sends to its page, until it closes the stream. Raises
    RolloutError if the server refuses, aiohttp's errors if the connection fails."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**22
        ) as session,
        session.get(url.rstrip("/") + "/events", params={"samples": "0"}) as response,
    ):
        if response.status != 200:
            raise RolloutError(f"GET /events answered {response.status}")
        kind = b""
        async for line in response.content:
            if line.startswith(b"event: "):
                kind = line[len(b"event: ") :].strip()
            elif line.startswith(b"data: ") and kind == b"fleet":
                yield FleetSnapshot(**json.loads(line[len(b"data: ") :]))


async def _show(
    snapshots: AsyncGenerator[FleetSnapshot, None], count: int | None, *, is_json: bool
) -> None:
    live = Live(auto_refresh=False)
    num_shown = 0
    with nullcontext() if is_json else live:
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                if is_json:
                    print(json.dumps(asdict(snapshot)), flush=True)
                else:
                    live.update(view_of(snapshot), refresh=True)
                num_shown += 1
                if num_shown == count:
                    return


def view_of(snapshot: FleetSnapshot) -> RenderableType:
    """Return what the terminal shows: a headline, and a table with one row for each engine."""
    rate = snapshot.total("generated_tokens_per_s")
    headline = Text.assemble(
        (snapshot.state, "bold green" if snapshot.state == "RUNNING" else "bold yellow"),
        f"   version {snapshot.weights_version}   {len(snapshot.engines)} engines   ",
        (f"{rate:,.0f} tokens/s", "bold"),
        f"   prefill {snapshot.total('prefill_tokens_per_s'):,.0f} tokens/s",
    )
    refused = [(name, count) for name, count in snapshot.refused.items() if count]
    if refused:
        words = ", ".join(f"{count:,} {_reason(name)}" for name, count in refused)
        headline.append(f"\nrefused: {words}", style="bold red")
    table = Table(box=None, pad_edge=False)
    for name in ("engine", "state", "version", "waiting", "running", "paused", "KV blocks", ""):
        table.add_column(name, justify="left" if name in ("state", "KV blocks") else "right")
    for name in ("tokens/s", "finished", "failed"):
        table.add_column(name, justify="right")
    for engine in snapshot.engines:
        table.add_row(*_cells(engine))
    return Group(headline, "", table)


def _reason(name: str) -> str:
    """Return the name of a counter such as `num_unknown_keys` as words."""
    return name.removeprefix("num_").replace("_", " ")


def _cells(engine: dict[str, Any]) -> list[str]:
    used, total = engine["num_blocks_used"], engine["num_blocks_total"]
    filled = round(_BAR_WIDTH * used / total) if total else 0
    return [
        str(engine["rank"]),
        engine["state"],
        str(engine["weights_version"]),
        *(f"{engine[name]:,}" for name in ("num_waiting", "num_running", "num_paused")),
        "█" * filled + "░" * (_BAR_WIDTH - filled),
        f"{used:,}/{total:,}",
        f"{engine['generated_tokens_per_s']:,.0f}",
        f"{engine['num_finished']:,}",
        f"{engine['num_failed']:,}",
    ]
