"""rollout bench: measures throughput and latency of an LLM that it creates.

`rollout bench serving` measures a running server instead. `rollout.cli.main` calls `run`, which
prints the measurements and writes no files.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from rollout.apis.llm import LLM
from rollout.cli.bench_serving import BenchLoad, ServingLoad, measure_serving
from rollout.cli.measurements import Summary, Timing
from rollout.cli.models import MODEL_HELP, is_fleet, llm_kinds, make_llm, with_model
from rollout.cli.prompt_files import error_of
from rollout.cli.settings import Parser, fields_of, read_settings, require
from rollout.config import CONFIG_HINTS
from rollout.ranges import PositiveInt
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams

_LOAD_HELP = """\
  num_prompts=64        requests
  prompt_tokens=128     tokens of each prompt, random ids from 1 to max_token_id=100
  num_tokens=128        tokens that each request generates
  n=1                   samples of each prompt (offline)
"""
_SERVING_HELP = """\
bench serving:
  url=http://HOST:PORT  an OpenAI-compatible server
  concurrency=32        requests at once
  rate=R                requests per second, at random times; none: one starts when one ends
  api_key=KEY           bearer token; better in the variable ROLLOUT_API_KEY
  model=NAME            default: the first model that the server lists
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLoad(BenchLoad):
    """The load of an LLM that the command creates. n: samples of each prompt."""

    n: PositiveInt = 1


def run(words: Sequence[str]) -> int:
    """Run the load and print its measurements. Returns 1 if a request failed, else 0. words: the
    command's arguments. Raises UsageError for wrong arguments."""
    if words[:1] == ["serving"]:
        return _run_serving(words[1:])
    parser = Parser(
        "bench", "Measure an engine's offline throughput; `bench serving` measures a server."
    )
    parser.epilog = f"{MODEL_HELP}{_LOAD_HELP}{_SERVING_HELP}"
    given = parser.parse(words)
    values, of_llm = read_settings(
        with_model(given.settings), fields_of(OfflineLoad), llm_kinds(), hints=CONFIG_HINTS
    )
    load = OfflineLoad(**values)
    with make_llm(of_llm) as llm:
        summary = _measure(llm, load, knows_cpu_time=not is_fleet(of_llm))
    _show(summary, f"offline, {of_llm['model']}", is_json=given.json)
    return 1 if summary.num_failed else 0


def _run_serving(words: Sequence[str]) -> int:
    parser = Parser("bench serving", "Measure a server through its OpenAI protocol.")
    parser.epilog = f"settings:\n{_LOAD_HELP}{_SERVING_HELP}"
    given = parser.parse(words)
    (values,) = read_settings(given.settings, fields_of(ServingLoad))
    require(values, "url", "http://127.0.0.1:8000")
    load = ServingLoad(**values)
    summary = asyncio.run(measure_serving(load))
    _show(summary, f"serving, {load.url}", is_json=given.json)
    return 1 if summary.num_failed else 0


def _measure(llm: LLM, load: OfflineLoad, *, knows_cpu_time: bool) -> Summary:
    """Run all prompts at once, after one short request to warm up, and return the measurements.
    knows_cpu_time: whether the engine runs in this process; a fleet's CPU time is not measured."""
    prompts = load.prompts()
    params = SamplingParams(num_tokens_to_generate=load.num_tokens, ignore_eos=True)
    llm.generate(prompts[0][:1], SamplingParams(num_tokens_to_generate=2, ignore_eos=True))
    start, cpu_start = time.perf_counter(), time.process_time()
    requests = llm.generate(prompts, params, load.n)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert isinstance(requests, list)
    done = [request for request in requests if request.succeeded()]
    return Summary.of(
        [_timing(request) for request in done],
        errors=[error_of(request) for request in requests if request.failed()],
        seconds=seconds,
        cpu_seconds=cpu_seconds if knows_cpu_time else None,
    )


def _timing(request: DynamicInferenceRequest) -> Timing:
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
        Console().print(summary.table(title))
        if summary.num_failed:
            text = f"{summary.num_failed} of {summary.num_requests} failed: {summary.first_error}"
            print(f"rollout: {text}", file=sys.stderr)
