"""Counts the Python calls and files of `rollout` that one operation of an engine passes through.

    python benchmarks/call_counts.py                    # seconds
    python benchmarks/call_counts.py --files            # the files too, with the calls in each
    python benchmarks/call_counts.py --json PATH        # writes the counts to a file as well

The counts show how much code one reads to follow an operation. They do not depend on the machine's
speed. A tiny model runs in this process, on the CPU. `sys.setprofile` reports the calls, and those
of Python functions defined in `rollout` count: a generator once for each value, a class once if it
defines `__init__`. C functions and the `__init__` of dataclasses, which is generated, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import rollout
from benchmarks.gpu_shapes import NEAR_NOTHING
from benchmarks.one_thread import restart_with_one_thread
from rollout import (
    DynamicInferenceEngine,
    InferenceConfig,
    KVCacheManagementMode,
    SamplingParams,
)
from rollout.backends.cpu.products import SWITCH
from rollout.models import CausalLM

PACKAGE_FOLDER = Path(rollout.__file__).parent
SPEC = replace(
    NEAR_NOTHING,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    dtype=torch.float32,
)
PROMPT_LEN = 8
NUM_ROWS = 2
NUM_WARM_STEPS = 4  # the decode step that is counted takes no new block


def count_calls(operation: Callable[[], Any]) -> Counter[str]:
    """Run `operation` once. Returns the number of Python calls by file, relative to `rollout`."""
    folder = f"{PACKAGE_FOLDER}/"
    calls: Counter[str] = Counter()

    def observe(frame: FrameType, event: str, _argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(folder):
            calls[path.removeprefix(folder)] += 1

    sys.setprofile(observe)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return calls


@contextmanager
def products_by_rule() -> Iterator[None]:
    """Let the engine choose matrix products by rule: measuring them would make counts vary.

    Sets the environment variable SWITCH, and restores it at the end.
    """
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def decoding_engine() -> DynamicInferenceEngine:
    """Return an engine in which NUM_ROWS requests decode."""
    config = InferenceConfig(
        device="cpu",
        num_threads=1,
        max_requests=NUM_ROWS + 1,
        max_sequence_length=256,
        kv_cache_management_mode=KVCacheManagementMode.PERSIST,
    )
    with products_by_rule():
        engine = DynamicInferenceEngine.from_model(CausalLM.random(SPEC), config)
    for row in range(NUM_ROWS):
        _submit(engine, row)
    for _ in range(NUM_WARM_STEPS):
        engine.step()
    assert engine.stats().num_running == NUM_ROWS
    return engine


def _submit(engine: DynamicInferenceEngine, seed: int) -> None:
    params = SamplingParams(
        num_tokens_to_generate=64, ignore_eos=True, return_log_probs=True, seed=seed
    )
    engine.add_request([seed + 1] * PROMPT_LEN, params)


def measure() -> dict[str, Counter[str]]:
    """Return the calls by file for each operation, in the order in which they run."""
    engine = decoding_engine()
    weights = {name: tensor.clone() for name, tensor in engine_weights(engine).items()}

    def suspend_and_resume() -> None:
        engine.suspend()
        engine.resume()

    counts = {
        f"one decode step of {NUM_ROWS} rows": count_calls(engine.step),
        "one submit": count_calls(lambda: _submit(engine, NUM_ROWS)),
    }
    engine.pause()
    counts["suspend and resume (persist)"] = count_calls(suspend_and_resume)
    counts["update_weights"] = count_calls(lambda: engine.update_weights(weights))
    return counts


def engine_weights(engine: DynamicInferenceEngine) -> dict[str, Any]:
    """Return the weights that a trainer of this model would push, by Hugging Face name."""
    return dict(CausalLM.random(SPEC).read_weights())


def as_text(counts: dict[str, Counter[str]], *, with_files: bool) -> str:
    """Return a table with a row per operation and, if `with_files`, its files below the row."""
    lines = [f"{'operation':<32}{'calls':>8}{'files':>8}"]
    for operation, calls in counts.items():
        lines.append(f"{operation:<32}{calls.total():>8}{len(calls):>8}")
        if with_files:
            lines += [f"    {path:<44}{number:>4}" for path, number in calls.most_common()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict[str, Counter[str]]:
    """Count and print; write a file if asked. Returns the calls by operation and file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", action="store_true", help="name the files of each operation")
    parser.add_argument("--json", type=Path, help="write the counts to this file as well")
    arguments = parser.parse_args(argv)
    counts = measure()
    print(as_text(counts, with_files=arguments.files))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(counts, indent=1), encoding="utf-8")
    return counts


if __name__ == "__main__":
    restart_with_one_thread()
    main()
