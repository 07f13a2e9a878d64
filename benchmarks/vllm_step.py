"""Compare the CPU time of a step of vLLM alone with a step of vLLM under rollout's Engine.

    python -m benchmarks.vllm_step              # 64 and 256 rows of a shape of 0.5B parameters
    python -m benchmarks.vllm_step --model 4M --rows 16

A program, run by hand. Needs vLLM (docs/how-to/vllm.md). Two vLLM EngineCores hold the same model.
One is stepped as vLLM itself does, the other by Engine.step. Their steps alternate. The program
prints median CPU milliseconds per decode step, and the median ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import at_least_one, table_row
from benchmarks.peers import CACHE
from benchmarks.peers_models import MODELS, model_directory
from rollout import InferenceConfig, SamplingParams
from rollout_vllm.engine import VllmEngine, make_engine

PROMPT_LEN, MAX_LENGTH, BLOCK_SIZE = 32, 256, 32


def seconds_of(step: Callable[[], object]) -> float:
    """Return the CPU seconds of a step."""
    start = time.process_time()
    step()
    return time.process_time() - start


def new_engine(directory: Path, num_rows: int) -> VllmEngine:
    """Return an engine with room for `num_rows` sequences."""
    config = InferenceConfig(
        engine="vllm",
        engine_options={"num_gpu_blocks_override": num_rows * MAX_LENGTH // BLOCK_SIZE + 8},
        max_sequence_length=MAX_LENGTH,
        max_requests=num_rows,
        max_tokens=max(num_rows, 2048),
        block_size_tokens=BLOCK_SIZE,
        dtype="float32",
        device="cpu",
        num_threads=1,
        seed=0,
    )
    return make_engine(directory, config)


def plain_step(engine: VllmEngine) -> Callable[[], object]:
    """Return a function that steps the engine's core as vLLM's EngineCoreProc does."""
    core = engine.core

    def step() -> None:
        _, has_run = core.step_fn()
        core.post_step(has_run)

    return step


def add_rows(engine: VllmEngine, num_rows: int) -> None:
    """Add requests that outlast the measurement."""
    params = SamplingParams(return_log_probs=True, termination_id=-1)
    for row in range(num_rows):
        engine.add_request([(row * 31 + i) % 1000 + 1 for i in range(PROMPT_LEN)], params)


def use_plain_scheduler(engine: VllmEngine) -> None:
    """Give the engine's core vLLM's own scheduler class, which records no versions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    engine.core.scheduler.__class__ = Scheduler


def measure(directory: Path, num_rows: int, num_steps: int) -> tuple[float, float, float]:
    """Return the CPU seconds of a step of vLLM alone and of a step under Engine, and their
    ratio."""
    plain, ours = new_engine(directory, num_rows), new_engine(directory, num_rows)
    use_plain_scheduler(plain)
    steps = plain_step(plain), ours.step
    try:
        for engine in (plain, ours):
            add_rows(engine, num_rows)
        for step in steps:
            for _ in range(num_rows * PROMPT_LEN // 2048 + 4):  # prefills, and warms up
                step()
        pairs = [(seconds_of(steps[0]), seconds_of(steps[1])) for _ in range(num_steps)]
    finally:
        plain.shutdown()
        ours.shutdown()
    own, of_engine = (statistics.median(column) for column in zip(*pairs, strict=True))
    return own, of_engine, statistics.median(b / a for a, b in pairs)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row of a table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="0.5B")
    parser.add_argument("--rows", nargs="+", type=at_least_one, default=[64, 256])
    parser.add_argument("--steps", type=at_least_one, default=20)
    arguments = parser.parse_args(argv)
    directory = model_directory(arguments.model, "float32", CACHE)
    print(table_row(["rows", "vLLM, ms", "under Engine, ms", "ratio"]))
    print("|---:|---:|---:|---:|")
    for num_rows in arguments.rows:
        own, of_engine, ratio = measure(directory, num_rows, arguments.steps)
        cells = [str(num_rows), f"{own * 1e3:.1f}", f"{of_engine * 1e3:.1f}", f"{ratio:.3f}"]
        print(table_row(cells), flush=True)


if __name__ == "__main__":
    restart_with_one_thread()
    main()
