"""The page of benchmarks/coordinator.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What was aimed at, of small replies.
MIN_THROUGHPUT_OF_RELAY = 0.5
MAX_P50_ABOVE_RELAY_MS = 1.0
MAX_ROUTING_GROWTH = 4.0


def as_markdown(results: dict[str, Any]) -> str:
    """A page: the machine, two tables for each size of reply, and what was aimed at."""
    machine, (low, high) = results["machine"], results["load_averages"]
    lines = [
        f"# Coordinator, {results['date']}",
        "",
        f"{machine['cpu']}, {machine['num_cores']} cores, Python {machine['python']}. Medians of "
        f"{results['rounds']} rounds, in which all ways take turns; ratios and differences are "
        "taken within a round. *relay*: a ROUTER that only passes frames on, between bare "
        "DEALERs. *bare*: the coordinator between the same. *real*: the coordinator between "
        "InferenceClients and Links. Engines answer at once.",
        "",
        f"Load averages of the machine meanwhile, with this benchmark's own share: "
        f"{low:.1f} to {high:.1f}.",
    ]
    for reply in dict.fromkeys(case["reply"] for case in results["cases"]):
        cases = [case for case in results["cases"] if case["reply"] == reply]
        lines += ["", f"## Replies of {reply}", "", *_throughput(cases), "", *_latency(cases)]
    lines += ["", "## What was aimed at", "", *_aims(results)]
    return "\n".join(lines) + "\n"


def _throughput(cases: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "Requests per second (CPU microseconds of the process in the middle per request), and "
        "these over the relay's.",
        "",
        "| clients | engines | relay | bare | real | bare / relay | real / relay "
        "| CPU, bare / relay |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        medians, ratios = case["medians"], case["throughput_of_relay"]
        cells = [
            f"{medians[way]['requests_per_s']:,.0f} ({medians[way]['cpu_s'] * 1e6:.0f})"
            for way in ("relay", "bare", "real")
        ]
        cells += [f"**{ratios['bare']:.2f}**", f"{ratios['real']:.2f}"]
        cells += [f"{case['cpu_of_relay']['bare']:.1f}"]
        lines.append(_row(case, cells))
    return lines


def _latency(cases: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "Milliseconds at p50 (p99), one request at a time in each process of clients; how much "
        "more than through the relay at p50; and under the load of the table above.",
        "",
        "| clients | engines | relay | bare | real | bare above | real above "
        "| relay, loaded | bare, loaded | real, loaded |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        medians, above = case["medians"], case["p50_above_relay_s"]
        cells = [_times(medians[way], "") for way in ("relay", "bare", "real")]
        cells += [f"{above['bare'] * 1e3:.2f}", f"**{above['real'] * 1e3:.2f}**"]
        cells += [_times(medians[way], "loaded_") for way in ("relay", "bare", "real")]
        lines.append(_row(case, cells))
    return lines


def _times(medians: dict[str, float], prefix: str) -> str:
    return f"{medians[prefix + 'p50_s'] * 1e3:.2f} ({medians[prefix + 'p99_s'] * 1e3:.1f})"


def _aims(results: dict[str, Any]) -> list[str]:
    small = [case for case in results["cases"] if case["reply"] == results["cases"][0]["reply"]]
    bare = [case["throughput_of_relay"]["bare"] for case in small]
    above = [case["p50_above_relay_s"]["real"] * 1e3 for case in small]
    growth = results["routing"]["largest_growth"]
    rows = [
        (
            f"throughput, bare peers, at least {MIN_THROUGHPUT_OF_RELAY:g} of the relay's",
            f"{min(bare):.2f} to {max(bare):.2f}",
            min(bare) >= MIN_THROUGHPUT_OF_RELAY,
        ),
        (
            f"latency at p50, real peers, at most {MAX_P50_ABOVE_RELAY_MS:g} ms above the relay's",
            f"{min(above):.2f} to {max(above):.2f} ms",
            max(above) <= MAX_P50_ABOVE_RELAY_MS,
        ),
        (
            f"a routing decision for 32 blocks grows at most {MAX_ROUTING_GROWTH:g} times from "
            f"{results['routing']['sizes'][0]:,} to {results['routing']['sizes'][-1]:,} blocks",
            f"{growth:.2f}",
            growth <= MAX_ROUTING_GROWTH,
        ),
    ]
    lines = ["Of the smallest replies:", "", "| aim | measured | met |", "|---|---:|---|"]
    return lines + [
        f"| {aim} | {found} | {'yes' if met else '**no**'} |" for aim, found, met in rows
    ]


def _row(case: dict[str, Any], cells: Sequence[str]) -> str:
    return f"| {case['num_clients']} | {case['num_engines']} | {' | '.join(cells)} |"
