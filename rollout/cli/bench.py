"""rollout bench: measures throughput and latency of an LLM that it creates, or of a running server.

`rollout.cli.main` calls `run`, which prints the measurements and writes no files. `rollout bench
serving` measures a server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from rollout import apis, requests
from rollout.cli.bench_serving import BenchLoad, ServingLoad, measure_serving
from rollout.cli.measurements import Summary, Timing
from rollout.cli.models import (
    CONFIG_HELP,
    FLEET_HELP,
    LLM_HINTS,
    LLM_KINDS,
    is_fleet,
    make_llm,
    settings_help,
    with_model,
)
from rollout.cli.prompt_files import error_of
from rollout.cli.settings import (
    Parser,
    UsageError,
    fields_of,
    help_of,
    is_setting,
    read_settings,
    require,
)
from rollout.ranges import PositiveInt
from rollout.sampling_params import SamplingParams

# Names of vLLM's and SGLang's benchmarks, and of requests -> the setting here.
_LOAD_HINTS = {
    **{name: "prompt_tokens" for name in ("input_len", "random_input_len", "random_input", "isl")},
    **{
        name: "num_tokens"
        for name in (
            *("output_len", "random_output_len", "random_output", "osl", "max_new_tokens"),
            "num_tokens_to_generate",
        )
    },
    "batch_size": "num_prompts (all run at once)",
}
_SERVING_HINTS = _LOAD_HINTS | {
    "max_tokens": "num_tokens",
    "max_concurrency": "concurrency",
    "batch_size": "concurrency",
    "request_rate": "rate",
    "base_url": "url",
    "address": "url",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLoad(BenchLoad):
    """The load of an LLM that the command creates.

    num_prompts: number of prompts.
    prompt_tokens: length of each prompt.
    num_tokens: tokens that each request generates.
    max_token_id: prompts are random ids from 1 to this one.
    n: samples of each prompt.
    """

    n: PositiveInt = 1


def run(words: Sequence[str]) -> int:
    """Run the load and print its measurements. Returns 1 if a request failed, else 0. `words` are
    the command's arguments. Raises UsageError for wrong arguments."""
    if words[:1] == ["serving"]:
        return _run_serving(words[1:])
    parser = Parser(
        "bench", "Measure an engine's offline throughput; `bench serving` measures a server."
    )
    parser.epilog = settings_help(
        "the load:\n" + help_of(OfflineLoad),
        FLEET_HELP,
        CONFIG_HELP,
        "`rollout bench serving --help` lists the settings of the other benchmark.\n",
    )
    of_serving = {"url": "a setting of `rollout bench serving`, not of `rollout bench`,"}
    groups, hints = (fields_of(OfflineLoad), LLM_KINDS), LLM_HINTS | _LOAD_HINTS | of_serving
    given = parser.parse(words, *groups, hints=hints)
    if any(word in ("server", "serve", "online") for word in given.settings):
        raise UsageError("a server is measured by `rollout bench serving url=http://HOST:PORT`")
    values, of_llm = read_settings(with_model(given.settings), *groups, hints=hints)
    load = OfflineLoad(**values)
    with make_llm(of_llm) as llm:
        summary = _measure(llm, load, knows_cpu_time=not is_fleet(of_llm))
    _show(summary, f"offline, {of_llm['model']}", is_json=given.json)
    return 1 if summary.num_failed else 0


def _run_serving(words: Sequence[str]) -> int:
    parser = Parser("bench serving", "Measure a server through its OpenAI protocol.")
    parser.epilog = "settings:\n" + help_of(ServingLoad)
    kinds = fields_of(ServingLoad)
    given = parser.parse(words, kinds, hints=_SERVING_HINTS)
    settings = [word if is_setting(word) else f"url={word}" for word in given.settings]
    (values,) = read_settings(settings, kinds, hints=_SERVING_HINTS)
    require(values, "url", "http://127.0.0.1:8000")
    load = ServingLoad(**values)
    summary = asyncio.run(measure_serving(load))
    _show(summary, f"serving, {load.url}", is_json=given.json)
    return 1 if summary.num_failed else 0


def _measure(llm: apis.LLM, load: OfflineLoad, *, knows_cpu_time: bool) -> Summary:
    """Return the measurements of all prompts run at once, after one short request to warm up.
    `knows_cpu_time` tells whether the engine runs in this process. Otherwise CPU time is not
    measured."""
    prompts = load.prompts()
    params = SamplingParams(num_tokens_to_generate=load.num_tokens, ignore_eos=True)
    llm.generate(prompts[0][:1], SamplingParams(num_tokens_to_generate=2, ignore_eos=True))
    start, cpu_start = time.perf_counter(), time.process_time()
    ended = llm.generate(prompts, params, load.n)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert isinstance(ended, list)
    done = [request for request in ended if request.succeeded()]
    return Summary.of(
        [_timing(request) for request in done],
        errors=[error_of(request) for request in ended if request.failed()],
        seconds=seconds,
        cpu_seconds=cpu_seconds if knows_cpu_time else None,
    )


def _timing(request: requests.DynamicInferenceRequest) -> Timing:
    assert request.ttft is not None
    assert request.latency is not None
    return Timing(
        num_prompt_tokens=len(request.prompt_tokens),
        num_generated_tokens=request.num_generated_tokens,
        first_token_s=request.ttft,
        total_s=request.latency,
    )


def _show(summary: Summary, title: str, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(summary.as_json()))
    else:
        console = Console()
        console.print(summary.headline(title), "", summary.table(), highlight=False, sep="\n")
        if summary.num_failed:
            text = f"{summary.num_failed} of {summary.num_requests} failed: {summary.first_error}"
            print(f"rollout: {text}", file=sys.stderr)
