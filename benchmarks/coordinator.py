"""Compare the coordinator with a bare relay: requests per second, latency and CPU time.

    python -m benchmarks.coordinator            # ten minutes
    python -m benchmarks.coordinator --small    # seconds: shows that it runs, not how fast

A program, run by hand. Clients and engines are processes on loopback, connected in three ways:

- relay: DEALER sockets send ready-made frames. One ROUTER forwards them without decoding.
- bare: the same DEALERs and frames, with a coordinator process instead of the ROUTER. The
  difference from "relay" is the coordinator's work.
- real: `InferenceClient` and `Link` through a coordinator. The difference from "bare" is the work
  of clients and Links.

No model runs: engines reply at once with a ready-made record. Throughput is measured with many
unfinished requests, latency with one request at a time in each client process. CPU seconds count
only the relay's or coordinator's process. `benchmarks.routing` adds the cost of a routing
decision. The program writes a Markdown page and a JSON file.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from benchmarks import routing
from benchmarks.coordinator_fleet import WAYS, Fleet, fleets, preload
from benchmarks.coordinator_load import Load, reply_record
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, progress_bar, publish, results_parser, table_row

# Aims, for the smallest replies.
MIN_THROUGHPUT_OF_RELAY = 0.5
MAX_P50_ABOVE_RELAY_MS = 1.0
MAX_ROUTING_GROWTH = 4.0


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page: the machine, two tables for each size of reply, and the aims."""
    machine, (low, high) = results["machine"], results["load_averages"]
    lines = [
        f"# Coordinator, {results['date']}",
        "",
        f"{machine['cpu']}, {machine['num_cores']} cores, Python {machine['python']}. Medians of "
        f"{results['rounds']} rounds, in which all ways take turns; ratios and differences are "
        "taken within a round. *relay*: a ROUTER that only passes frames on, between bare "
        "DEALERs. *bare*: the coordinator between bare DEALERs. *real*: the coordinator between "
        "InferenceClients and Links. Engines answer at once.",
        "",
        f"Load averages of the machine meanwhile, with this benchmark's own load: "
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
    return table_row([str(case["num_clients"]), str(case["num_engines"]), *cells])


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a reply, and numbers of requests over all clients.

    num_tokens: tokens of a reply.
    num_under_way: unfinished requests at a time, in a throughput measurement.
    num_bare: requests of a throughput measurement of "relay" and of "bare".
    num_real: requests of a throughput measurement of "real".
    num_single: requests of a latency measurement.
    """

    name: str
    num_tokens: int
    num_under_way: int
    num_bare: int
    num_real: int
    num_single: int


SIZES = (
    Size(
        name="16 tokens",
        num_tokens=16,
        num_under_way=64,
        num_bare=2048,
        num_real=384,
        num_single=64,
    ),
    Size(
        name="8k tokens",
        num_tokens=8192,
        num_under_way=16,
        num_bare=96,
        num_real=32,
        num_single=32,
    ),
)
SMALL_SIZES = (
    Size(name="16 tokens", num_tokens=16, num_under_way=8, num_bare=32, num_real=16, num_single=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Figures of one way to connect, in one round.

    cpu_s: CPU seconds per request of the relay's or coordinator's process.
    loaded_p50_s, loaded_p99_s: latencies in the throughput measurement.
    p50_s, p99_s: latencies with one request at a time.
    """

    requests_per_s: float
    cpu_s: float
    loaded_p50_s: float
    loaded_p99_s: float
    p50_s: float
    p99_s: float


def play(fleet: Fleet, way: str, size: Size, num_clients: int) -> Sample:
    """Measure one fleet under load, then with one request at a time."""
    total = size.num_real if way == "real" else size.num_bare
    window = max(1, size.num_under_way // num_clients)
    loaded = fleet.measure(Load(num_requests=max(1, total // num_clients), window=window))
    single = fleet.measure(Load(num_requests=max(2, size.num_single // num_clients), window=0))
    return Sample(
        requests_per_s=loaded.requests_per_s,
        cpu_s=loaded.cpu_s,
        loaded_p50_s=statistics.median(loaded.latencies),
        loaded_p99_s=_p99(loaded.latencies),
        p50_s=statistics.median(single.latencies),
        p99_s=_p99(single.latencies),
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def measure_case(
    size: Size, num_clients: int, num_engines: int, rounds: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Measure all rounds of one case. Each round runs all ways to connect, in rotated order.

    Calls `advance` after each round. Returns the rounds, medians, ratios and differences.
    """
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    with fleets(num_clients, num_engines, reply_record(size.num_tokens)) as by_way:
        for way in WAYS:  # warm up
            play(by_way[way], way, size, num_clients)
        for index in range(rounds):
            first = index % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                samples[way].append(play(by_way[way], way, size, num_clients))
            advance()
    return {
        "reply": size.name,
        "num_clients": num_clients,
        "num_engines": num_engines,
        "rounds": {way: [asdict(sample) for sample in samples[way]] for way in WAYS},
        "medians": {way: _medians(samples[way]) for way in WAYS},
        "throughput_of_relay": _ratios(samples, "requests_per_s"),
        "cpu_of_relay": _ratios(samples, "cpu_s"),
        "p50_above_relay_s": {
            way: statistics.median(
                own.p50_s - relay.p50_s
                for own, relay in zip(samples[way], samples["relay"], strict=True)
            )
            for way in ("bare", "real")
        },
    }


def _medians(samples: Sequence[Sample]) -> dict[str, float]:
    rows = [asdict(sample) for sample in samples]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _ratios(samples: dict[str, list[Sample]], name: str) -> dict[str, float]:
    """Return, by way to connect, the median over rounds of its figure `name` over the relay's."""
    return {
        way: statistics.median(
            getattr(own, name) / getattr(relay, name)
            for own, relay in zip(samples[way], samples["relay"], strict=True)
        )
        for way in ("bare", "real")
    }


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all cases, and return all figures as plain values."""
    counts = [(clients, engines) for engines in arguments.engines for clients in arguments.clients]
    cases, loads = [], [os.getloadavg()[0]]
    with progress_bar(console) as progress:
        num_rounds = len(arguments.sizes) * len(counts) * arguments.rounds
        task = progress.add_task("coordinator and relay", total=num_rounds)
        for size in arguments.sizes:
            for clients, engines in counts:
                name = f"{size.name}, {clients} clients, {engines} engines"
                progress.update(task, description=name)
                cases.append(
                    measure_case(
                        *(size, clients, engines, arguments.rounds),
                        lambda: progress.advance(task),
                    )
                )
                loads.append(os.getloadavg()[0])
    return {
        **dated(),
        "load_averages": [min(loads), max(loads)],
        "rounds": arguments.rounds,
        "cases": cases,
        "routing": routing.measure(arguments.routing, console),
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = results_parser(__doc__, rounds=5, small="one case, few requests")
    arguments = parser.parse_args(argv)
    arguments.sizes, arguments.clients, arguments.engines = SIZES, (1, 4, 16), (1, 4)
    arguments.routing = routing.parse_arguments([])
    arguments.routing.ranks = (4,)
    if arguments.small:
        arguments.sizes, arguments.clients, arguments.engines = SMALL_SIZES, (2,), (2,)
        arguments.rounds, arguments.routing = 2, routing.parse_arguments(["--small"])
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    arguments = parse_arguments(argv)
    preload()
    console = Console(stderr=True)
    results = measure(arguments, console)
    publish(results, as_markdown(results), "coordinator", arguments.output, console)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
