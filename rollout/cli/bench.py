"""rollout bench: throughput and latency of an engine in this process, or of a server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from rollout.apis.llm import LLM
from rollout.cli.bench_serving import ServingLoad, measure_serving
from rollout.cli.measurements import Summary, Timing
from rollout.cli.models import MODEL_HELP, is_fleet, llm_kinds, make_llm
from rollout.cli.prompt_files import error_of
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, read_settings, require
from rollout.config import CONFIG_HINTS
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
  rate=R                requests per second, started at random times; none: as fast as they end
  api_key=KEY           sent as a bearer token
  model=NAME            (the first one that the server lists)
"""
_LOAD_KINDS: Kinds = {
    "num_prompts": int,
    "prompt_tokens": int,
    "num_tokens": int,
    "max_token_id": int,
    "n": int,
}


def run(words: Sequence[str]) -> int:
    """Returns 1 if a request failed, else 0."""
    if words[:1] == ["serving"]:
        return _run_serving(words[1:])
    parser = Parser("bench", "Measure offline throughput, or `bench serving` that of a server.")
    parser.epilog = f"{MODEL_HELP}{_LOAD_HELP}{_SERVING_HELP}"
    given = parser.parse(words)
    load, of_llm = read_settings(given.settings, _LOAD_KINDS, llm_kinds(), hints=CONFIG_HINTS)
    for name, value in load.items():
        if value < 1:
            raise UsageError(f"{name}={value} must be at least 1")
    with make_llm(of_llm) as llm:
        summary = _measure(llm, knows_cpu_time=not is_fleet(of_llm), **load)
    _show(summary, f"offline, {of_llm['model']}", is_json=given.json)
    return 1 if summary.num_failed else 0


def _run_serving(words: Sequence[str]) -> int:
    parser = Parser("bench serving", "Measure a server through its OpenAI door.")
    parser.epilog = f"settings:\n{_LOAD_HELP}{_SERVING_HELP}"
    given = parser.parse(words)
    (values,) = read_settings(given.settings, fields_of(ServingLoad))
    require(values, "url", "http://127.0.0.1:8000")
    load = ServingLoad(**values)
    summary = asyncio.run(measure_serving(load))
    _show(summary, f"serving, {load.url}", is_json=given.json)
    return 1 if summary.num_failed else 0


def _measure(
    llm: LLM,
    *,
    knows_cpu_time: bool,
    num_prompts: int = 64,
    prompt_tokens: int = 128,
    num_tokens: int = 128,
    max_token_id: int = 100,
    n: int = 1,
) -> Summary:
    """Run all prompts at once, after one short request that warms the engine up.

    The engines of a fleet work in other processes, whose CPU time is not known here.
    """
    prompts = np.random.default_rng(0).integers(1, max_token_id + 1, (num_prompts, prompt_tokens))
    params = SamplingParams(num_tokens_to_generate=num_tokens, ignore_eos=True)
    llm.generate(prompts[0, :1].tolist(), SamplingParams(num_tokens_to_generate=2, ignore_eos=True))
    start, cpu_start = time.perf_counter(), time.process_time()
    requests = llm.generate([prompt.tolist() for prompt in prompts], params, n)
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
