"""Cost of HTTP: a server with 32 streams, compared with LLM.generate on the same requests.

    python -m benchmarks.serving [--rounds 5] [--model 44M] [--no-vllm]

A program, run by hand. It compares tokens per CPU second of all processes, and the time to the
first token. vLLM's server is measured too if `benchmarks.peers` has installed vLLM. The program
starts the servers, prints a Markdown page, and writes it and a JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, publish, results_parser, table_row
from benchmarks.peers_models import model_directory
from benchmarks.serving_processes import ServerProcess, rollout_server, vllm_server
from rollout import LLM, DynamicInferenceRequest, InferenceConfig, SamplingParams
from rollout.cli.bench_serving import ServingLoad, measure_serving

# Aims of rollout's server.
MIN_OF_GENERATE = 0.85
MAX_FIRST_TOKEN_ABOVE_MS = 5.0


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page: the machine, a table of all servers, and the aims."""
    machine, work, (low, high) = results["machine"], results["work"], results["load_averages"]
    lines = [
        f"# Serving, {results['date']}",
        "",
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['instruction_set']}, one "
        f"computing thread, Python {machine['python']}. Model {results['model']}, float32. "
        f"{work['num_prompts']} prompts of {work['prompt_tokens']} tokens, {work['num_tokens']} "
        f"generated tokens each, {work['concurrency']} at once: as one batch of `LLM.generate`, "
        "and as streams of a server in other processes. Medians of "
        f"{len(results['rounds'])} rounds, in which all ways take turns; ratios and differences "
        "are taken within a round. CPU seconds are those of all processes of a server; *with the "
        "client*: and of the one that asks. First tokens: one request at a time, through a server "
        "as its client sees them, in `LLM.generate` as the engine counts them.",
        "",
        f"Load averages of the machine meanwhile, with this benchmark's own load: {low:.1f} to "
        f"{high:.1f}.",
        "",
        "| way | tokens/CPU s | of `LLM.generate` | with the client | tokens/s "
        "| first token, ms | above `LLM.generate`, ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for way, row in results["medians"].items():
        with_client = row.get("tokens_per_cpu_s_with_client_of_generate")
        cells = [
            way,
            f"{row['tokens_per_cpu_s']:,.0f}",
            f"**{row['tokens_per_cpu_s_of_generate']:.2f}**",
            "" if with_client is None else f"{with_client:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['first_token_ms']:.1f}",
            f"{row['first_token_ms_above_generate']:.1f}",
        ]
        lines.append(table_row(cells))
    lines += ["", *_shares(results), "", "## What was aimed at", "", *_aims(results)]
    return "\n".join(lines) + "\n"


def _shares(results: dict[str, Any]) -> list[str]:
    """Return a sentence for each server, with the CPU shares of its processes."""
    lines = []
    for way, row in results["medians"].items():
        prefix = "cpu_share_of_"
        shares = [
            f"{name.removeprefix(prefix)} {value:.0%}"
            for name, value in row.items()
            if name.startswith(prefix)
        ]
        if shares:
            lines.append(f"CPU time of {way}: {', '.join(shares)}.")
    if results["missing"]:
        lines.append(f"vLLM took no part: {results['missing']}.")
    return lines


def _aims(results: dict[str, Any]) -> list[str]:
    row = results["medians"]["rollout serve"]
    ratio, above = row["tokens_per_cpu_s_of_generate"], row["first_token_ms_above_generate"]
    return [
        f"- Tokens per CPU second of all processes at least {MIN_OF_GENERATE} of `LLM.generate`: "
        f"**{ratio:.2f}**.",
        f"- First token at most {MAX_FIRST_TOKEN_ABOVE_MS:g} ms later than the engine's own: "
        f"**{above:.1f} ms**.",
    ]


CACHE = Path.home() / ".cache" / "rollout-bench"
MAX_SEQUENCE_LENGTH = 512


def own_generation(llm: LLM, load: ServingLoad, concurrency: int) -> dict[str, float]:
    """Generate the requests of `load` with LLM.generate, `concurrency` prompts at a time.

    Returns tokens per CPU second and per wall second.
    """
    params = SamplingParams(num_tokens_to_generate=load.num_tokens, ignore_eos=True)
    start, start_cpu = time.perf_counter(), time.process_time()
    prompts = load.prompts()
    for first in range(0, len(prompts), concurrency):
        llm.generate(prompts[first : first + concurrency], params)
    cpu_s, seconds = time.process_time() - start_cpu, time.perf_counter() - start
    num_tokens = load.num_prompts * load.num_tokens
    return {"tokens_per_cpu_s": num_tokens / cpu_s, "tokens_per_s": num_tokens / seconds}


def served_generation(server: ServerProcess, load: ServingLoad) -> dict[str, float]:
    """Send the requests of `load` to a server as streams.

    Returns tokens per wall second and per CPU second, with and without the client's CPU time, and
    each process's share of the CPU time. Raises RuntimeError if a request fails.
    """
    before, own_before = server.cpu_seconds(), time.process_time()
    summary = asyncio.run(measure_serving(load))
    if summary.num_failed:
        raise RuntimeError(f"{summary.num_failed} requests failed: {summary.first_error}")
    after, own_after = server.cpu_seconds(), time.process_time()
    by_process = {name: after[name] - before.get(name, 0.0) for name in after}
    cpu_s, client_s = sum(by_process.values()), own_after - own_before
    return {
        "tokens_per_cpu_s": summary.num_generated_tokens / cpu_s,
        "tokens_per_cpu_s_with_client": summary.num_generated_tokens / (cpu_s + client_s),
        "tokens_per_s": summary.num_generated_tokens / summary.seconds,
        **{f"cpu_share_of_{name}": seconds / cpu_s for name, seconds in by_process.items()},
    }


async def first_token_s(url: str, prompt: Sequence[int], num_requests: int) -> list[float]:
    """Return the seconds to the first event of each of `num_requests` streams, sent in turn."""
    found = []
    body = {"prompt": list(prompt), "max_tokens": 2, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession(base_url=url) as session:
        async with session.get("/v1/models") as answer:
            body["model"] = (await answer.json())["data"][0]["id"]
        for _ in range(num_requests):
            start = time.perf_counter()
            async with session.post("/v1/completions", json=body) as response:
                await response.content.readline()
                found.append(time.perf_counter() - start)
                await response.read()
    return found


def own_first_token_s(llm: LLM, prompt: Sequence[int], num_requests: int) -> list[float]:
    """Return the engine's time to first token of each request, with LLM.generate."""
    found = []
    params = SamplingParams(num_tokens_to_generate=2, ignore_eos=True)
    for _ in range(num_requests):
        request = llm.generate(list(prompt), params)
        assert isinstance(request, DynamicInferenceRequest)
        assert request.ttft is not None
        found.append(request.ttft)
    return found


def play_round(
    llm: LLM, servers: dict[str, ServerProcess], arguments: argparse.Namespace, index: int
) -> dict[str, dict[str, float]]:
    """Run LLM.generate and each server once, in reversed order if `index` is odd.

    Returns the figures by name.
    """
    rows: dict[str, dict[str, float]] = {}
    ways = ["LLM.generate", *servers]
    for way in ways if index % 2 == 0 else ways[::-1]:
        url = servers[way].url if way in servers else "http://none"
        load = ServingLoad(
            url=url,
            num_prompts=arguments.num_prompts,
            prompt_tokens=arguments.prompt_tokens,
            num_tokens=arguments.num_tokens,
            concurrency=arguments.concurrency,
        )
        prompt = load.prompts()[index % arguments.num_prompts]
        if way in servers:
            rows[way] = served_generation(servers[way], load)
            times_s = asyncio.run(first_token_s(url, prompt, arguments.num_firsts))
        else:
            rows[way] = own_generation(llm, load, arguments.concurrency)
            times_s = own_first_token_s(llm, prompt, arguments.num_firsts)
        rows[way]["first_token_ms"] = 1e3 * statistics.median(times_s)
    return rows


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Start the servers, run all rounds, and return all figures as plain values."""
    directory = model_directory(arguments.model, "float32", arguments.cache)
    config = InferenceConfig(max_sequence_length=MAX_SEQUENCE_LENGTH, num_threads=1)
    loads, missing = [os.getloadavg()[0]], ""
    with ExitStack() as stack:
        servers = {
            "rollout serve": stack.enter_context(rollout_server(directory, arguments.cache, config))
        }
        if arguments.vllm:
            try:
                servers["vLLM"] = stack.enter_context(
                    vllm_server(directory, arguments.cache, MAX_SEQUENCE_LENGTH)
                )
            except (OSError, TimeoutError) as fault:
                missing = str(fault)
                console.print(f"vLLM takes no part: {missing}", highlight=False)
        llm = stack.enter_context(LLM(directory, None, config))
        rounds = []
        for index in range(-1, arguments.rounds):  # the first one warms up
            rows = play_round(llm, servers, arguments, index + 1)
            loads.append(os.getloadavg()[0])
            if index >= 0:
                rounds.append(rows)
                console.print(f"round {index + 1} of {arguments.rounds}: {rows}", highlight=False)
    return {
        **dated(config),
        "load_averages": [min(loads), max(loads)],
        "model": arguments.model,
        "work": {
            name: getattr(arguments, name)
            for name in ("num_prompts", "prompt_tokens", "num_tokens", "concurrency", "num_firsts")
        },
        "missing": missing,
        "rounds": rounds,
        "medians": _medians(rounds),
    }


def _medians(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the medians of all figures, with ratios and differences to LLM.generate."""
    medians = {}
    for way, first in rounds[0].items():
        found = {name: statistics.median(rows[way][name] for rows in rounds) for name in first}
        own = [rows["LLM.generate"] for rows in rounds]
        pairs = list(zip(rounds, own, strict=True))
        for name in ("tokens_per_cpu_s", "tokens_per_cpu_s_with_client"):
            if name in first:
                found[f"{name}_of_generate"] = statistics.median(
                    rows[way][name] / base["tokens_per_cpu_s"] for rows, base in pairs
                )
        found["first_token_ms_above_generate"] = statistics.median(
            rows[way]["first_token_ms"] - base["first_token_ms"] for rows, base in pairs
        )
        medians[way] = found
    return medians


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = results_parser(__doc__, rounds=5, small="a small model, few tokens")
    parser.add_argument("--model", default="44M", help="a name in benchmarks/peers_models.py")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of models, environments")
    arguments = parser.parse_args(argv)
    arguments.num_prompts, arguments.prompt_tokens, arguments.num_tokens = 32, 64, 128
    arguments.concurrency, arguments.num_firsts = 32, 20
    if arguments.small:
        arguments.model, arguments.rounds, arguments.vllm = "small", 1, False
        arguments.num_prompts, arguments.num_tokens, arguments.num_firsts = 4, 4, 2
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    arguments = parse_arguments(argv)
    console = Console(stderr=True)
    results = measure(arguments, console)
    publish(results, as_markdown(results), "serving", arguments.output, console)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
