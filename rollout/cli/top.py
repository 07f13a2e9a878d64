"""rollout top: shows engines, queues, KV blocks and throughput of a fleet, live in a terminal.

`rollout.cli.main` calls `run`. The command reads counters from a coordinator or a server, and
prints them. It changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
from rich.console import Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollout.cli.http_faults import named_http_faults, server_root
from rollout.cli.settings import (
    Kinds,
    Parser,
    UsageError,
    fields_of,
    help_of,
    is_setting,
    read_settings,
)
from rollout.control.commands import fleet_stats
from rollout.coordinator.net.key_folder import CLIENT, peer_keys
from rollout.coordinator.net.security import CurveKeys
from rollout.errors import RolloutError
from rollout.ranges import Name, PositiveInt, PositiveSeconds, check_fields
from rollout.serve.page.fleet import FleetSnapshot, FleetView

_BAR_WIDTH = 8
_CONNECT_S = 10.0  # for a coordinator's first answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSettings:
    """What `rollout top` shows, and how often.

    interval_s: seconds between two snapshots of a coordinator.
    count: number of snapshots. None shows them until Ctrl-C.
    api_key: key of the server; better in the variable ROLLOUT_API_KEY."""

    interval_s: PositiveSeconds = 1.0
    count: PositiveInt | None = None
    api_key: Name | None = None

    def __post_init__(self) -> None:
        check_fields(self, UsageError)


_KINDS: Kinds = fields_of(TopSettings)


def run(words: Sequence[str]) -> int:
    """Show snapshots until Ctrl-C, or `count` snapshots. Returns 0. `words` are the command's
    arguments. Raises UsageError for wrong arguments."""
    parser = Parser(
        "top",
        "Watch the engines of a fleet: rollout top ADDRESS. ADDRESS is the address of a\n"
        "coordinator, or the URL of a server, such as http://127.0.0.1:8000.",
    )
    parser.epilog = "settings:\n" + help_of(TopSettings)
    parser.add_argument(
        "--keys", metavar="DIR", help="folder of a client's keys, made by `rollout keys`"
    )
    given = parser.parse(words, _KINDS)
    targets = [word for word in given.settings if not is_setting(word)]
    if len(targets) != 1:
        raise UsageError(
            f"give one coordinator's address or server's URL, not {len(targets)}: rollout top "
            "http://127.0.0.1:8000"
        )
    (target,) = targets
    (values,) = read_settings(list(filter(is_setting, given.settings)), _KINDS)
    settings = TopSettings(**values)
    if target.startswith(("http://", "https://")):
        snapshots = of_server(target, settings.api_key)
    elif target.startswith(("tcp://", "ipc://")) or target.isdecimal():
        curve = None if given.keys is None else peer_keys(given.keys, CLIENT)
        snapshots = of_coordinator(target, settings.interval_s, curve)
    else:
        raise UsageError(
            f"{target} is not an address: give a server's URL, http://HOST:PORT, or a "
            "coordinator's address, tcp://HOST:PORT, ipc://PATH or a port (loopback)"
        )
    with named_http_faults(target):
        asyncio.run(_show(snapshots, settings.count, is_json=given.json))
    return 0


async def of_coordinator(
    address: str, interval_s: float, curve: CurveKeys | None = None
) -> AsyncGenerator[FleetSnapshot, None]:
    """Yield a snapshot of the fleet every `interval_s` seconds, without end. `curve` holds this
    client's keys, or None without encryption. Raises CoordinatorLostError if no coordinator answers
    or if it disconnects."""
    # Imports torch, which takes seconds and which a server's snapshots do not need.
    from rollout.coordinator.client.inference_client import InferenceClient

    view, client = FleetView(), InferenceClient(address, name="top", curve=curve)
    try:
        await client.start(timeout_s=_CONNECT_S)
        while True:
            yield view.snapshot(fleet_stats(await client.engine_stats()))
            await asyncio.sleep(interval_s)
    finally:
        await client.aclose()


async def of_server(url: str, api_key: str | None) -> AsyncGenerator[FleetSnapshot, None]:
    """Yield the snapshots that a server sends to its web page, until it closes the stream. Raises
    RolloutError if the server refuses, and aiohttp's errors if the connection fails."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**22
        ) as session,
        session.get(server_root(url) + "events", params={"samples": "0"}) as response,
    ):
        if response.status != 200:
            raise RolloutError(_refusal(url, response.status))
        kind = b""
        async for line in response.content:
            if line.startswith(b"event: "):
                kind = line[len(b"event: ") :].strip()
            elif line.startswith(b"data: ") and kind == b"fleet":
                yield FleetSnapshot(**json.loads(line[len(b"data: ") :]))


def _refusal(url: str, status: int) -> str:
    if status in (401, 403):
        return f"{url} refuses the key (status {status}); set ROLLOUT_API_KEY to the server's key"
    return (
        f"{url} is not a server of `rollout serve`: GET /events answered {status}; give such a "
        "server's URL"
    )


async def _show(
    snapshots: AsyncGenerator[FleetSnapshot, None], count: int | None, *, is_json: bool
) -> None:
    live = Live(auto_refresh=False)
    num_shown = 0
    is_live = live.console.is_terminal and not is_json
    with live if is_live else nullcontext():
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                if is_json:
                    print(json.dumps(asdict(snapshot)), flush=True)
                elif is_live:
                    live.update(view_of(snapshot), refresh=True)
                else:  # a pipe or a file gets every snapshot
                    live.console.print(view_of(snapshot))
                num_shown += 1
                if num_shown == count:
                    return


def view_of(snapshot: FleetSnapshot) -> RenderableType:
    """Return the headline and a table with one row per engine, at most 80 columns wide."""
    num_engines = len(snapshot.engines)
    rate, prefill = (snapshot.total(f"{name}_tokens_per_s") for name in ("generated", "prefill"))
    headline = Text.assemble(
        (snapshot.state, "bold green" if snapshot.state == "RUNNING" else "bold yellow"),
        f"   {num_engines} engine{'' if num_engines == 1 else 's'}",
        f"   version {snapshot.weights_version}   ",
        (f"{rate:,.0f} tokens/s", "bold"),
        f"   prefill {prefill:,.0f}/s",
    )
    refused = [(name, count) for name, count in snapshot.refused.items() if count]
    if refused:
        words = ", ".join(f"{count:,} {_reason(name)}" for name, count in refused)
        headline.append(f"\nrefused: {words}", style="bold red")
    columns = [name for name in _COLUMNS if name not in _IF_ANY or snapshot.total(_IF_ANY[name])]
    gap = 2 if len(columns) < len(_COLUMNS) - 1 else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name in columns:
        justify: JustifyMethod = "left" if name in ("state", "KV cache") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for engine in snapshot.engines:
        table.add_row(*(_COLUMNS[name](engine) for name in columns))
    return Group(headline, "", table)


def _reason(name: str) -> str:
    return name.removeprefix("num_").replace("_", " ")


def _kv_cache(engine: dict[str, Any]) -> str:
    used, total = engine["num_blocks_used"], engine["num_blocks_total"]
    share = used / total if total else 0.0
    filled = round(_BAR_WIDTH * share)
    return f"{'█' * filled}{'░' * (_BAR_WIDTH - filled)} {share:4.0%}"


def _count_of(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda engine: f"{engine[name]:,.0f}"


# Column -> its text for an engine of a snapshot.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "engine": _count_of("rank"),
    "state": lambda engine: engine["state"].lower(),
    "ver": _count_of("weights_version"),
    "wait": _count_of("num_waiting"),
    "run": _count_of("num_running"),
    "paused": _count_of("num_paused"),
    "KV cache": _kv_cache,
    "tokens/s": _count_of("generated_tokens_per_s"),
    "done": _count_of("num_finished"),
    "failed": _count_of("num_failed"),
}
# Columns that are shown only if an engine's count is not 0.
_IF_ANY = {"paused": "num_paused", "failed": "num_failed"}
