"""Compare the CPU time of a step and of an update: vLLM alone, and vLLM under Engine.

    python -m benchmarks.vllm_step              # 64 and 256 rows of a 0.5B and of a 4M shape
    python -m benchmarks.vllm_step --model 4M --rows 16

A program, run by hand. Needs vLLM (docs/how-to/vllm.md). Two vLLM EngineCores hold the same model.
One is driven as vLLM itself does, the other by rollout's Engine. Their decode steps alternate, and
so do their updates.

The program prints two tables. The first has median CPU milliseconds per step, and the median ratio
of neighbouring steps. The second has medians of an update with the same tensors while rows decode:
vLLM's `reload_weights`, `stage_weights` and `commit_weights`. Each measurement ends after
--seconds, but not before three pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import at_least_one, table_row
from benchmarks.peers import CACHE
from benchmarks.peers_models import MODELS, model_directory
from rollout import InferenceConfig, SamplingParams
from rollout.models.checkpoints.reader import Checkpoint
from rollout_vllm.engine import VllmEngine, make_engine

PROMPT_LEN, MAX_LENGTH, BLOCK_SIZE = 8, 128, 32
_MIN_PAIRS = 3
_TITLES = ["model", "rows", "vLLM, ms", "under Engine, ms", "ratio", "pairs"]
_UPDATE_TITLES = [
    "model",
    "MiB",
    "time",
    "vLLM reload, ms",
    "stage, ms",
    "commit, ms",
    "commit / reload",
    "(stage + commit) / reload",
    "pairs",
]


class Seconds(NamedTuple):
    """CPU and wall seconds of a call."""

    cpu: float
    wall: float


def seconds_of(call: Callable[[], object]) -> Seconds:
    """Return the CPU and wall seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def new_engine(directory: Path, num_rows: int) -> VllmEngine:
    """Return an engine with room for `num_rows` sequences."""
    config = InferenceConfig(
        engine="vllm",
        engine_options={"num_gpu_blocks_override": num_rows * MAX_LENGTH // BLOCK_SIZE + 8},
        buffer_size_gb=1.0,
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


def add_rows(engine: VllmEngine, num_rows: int) -> list[int]:
    """Add `num_rows` requests that outlast the measurement, and return their ids."""
    params = SamplingParams(return_log_probs=True, termination_id=-1)
    prompts = [[(row * 31 + i) % 1000 + 1 for i in range(PROMPT_LEN)] for row in range(num_rows)]
    return [engine.add_request(prompt, params) for prompt in prompts]


def use_plain_scheduler(engine: VllmEngine) -> None:
    """Give the engine's core vLLM's own scheduler class, which records no versions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    engine.core.scheduler.__class__ = Scheduler


class Pair:
    """vLLM alone and vLLM under Engine, with the same model.

    limit_s: a measurement ends after this many seconds, but not before its first pairs.
    max_pairs: maximum number of pairs in a measurement.
    """

    def __init__(self, directory: Path, num_rows: int, limit_s: float, max_pairs: int) -> None:
        self._plain = new_engine(directory, num_rows)
        self._ours = new_engine(directory, num_rows)
        use_plain_scheduler(self._plain)
        self._steps = plain_step(self._plain), self._ours.step
        self._limit_s, self._max_pairs = limit_s, max_pairs
        self._weights: dict[str, Tensor] = {
            name: tensor.clone() for name, tensor in Checkpoint.open(directory).items()
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of an update's tensors."""
        return sum(tensor.nbytes for tensor in self._weights.values())

    def close(self) -> None:
        self._plain.shutdown()
        self._ours.shutdown()

    @contextmanager
    def rows(self, num_rows: int) -> Iterator[None]:
        """Let both engines decode `num_rows` requests within the block."""
        of_plain, of_ours = add_rows(self._plain, num_rows), add_rows(self._ours, num_rows)
        for step in self._steps:
            for _ in range(num_rows * PROMPT_LEN // 2048 + 4):  # prefills, and warms up
                step()
        yield
        self._plain.core.abort_requests([str(request_id) for request_id in of_plain])
        for request_id in of_ours:
            self._ours.abort_request(request_id)

    def measure_steps(self) -> list[tuple[float, float]]:
        """Return the CPU seconds of neighbouring steps of vLLM alone and of Engine."""
        return [
            (seconds_of(self._steps[0]).cpu, seconds_of(self._steps[1]).cpu) for _ in self._pairs()
        ]

    def measure_updates(self) -> list[tuple[Seconds, Seconds, Seconds]]:
        """Return the seconds of neighbouring updates: vLLM's reload, then Engine's staging and
        commit."""
        self._update()  # the first one touches new memory
        found = []
        for _ in self._pairs():
            for step in self._steps:
                step()
            found.append(self._update())
        return found

    def _update(self) -> tuple[Seconds, Seconds, Seconds]:
        tensors = {"weights_iterator": iter(self._weights.items())}
        reload = seconds_of(
            lambda: self._plain.core.collective_rpc("reload_weights", kwargs=tensors)
        )
        staged: list[object] = []
        stage = seconds_of(lambda: staged.append(self._ours.stage_weights(self._weights)))
        commit = seconds_of(
            lambda: self._ours.commit_weights(staged[0], in_flight=True)  # type: ignore[arg-type]
        )
        return reload, stage, commit

    def _pairs(self) -> Iterator[int]:
        start = time.perf_counter()
        for index in range(self._max_pairs):
            if index >= _MIN_PAIRS and time.perf_counter() - start > self._limit_s:
                return
            yield index


def print_steps(model: str, num_rows: int, pairs: Sequence[tuple[float, float]]) -> None:
    own, of_engine = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = statistics.median(ours / plain for plain, ours in pairs)
    cells = [model, str(num_rows), f"{own:.1f}", f"{of_engine:.1f}", f"{ratio:.3f}"]
    print(table_row([*cells, str(len(pairs))]), flush=True)


def print_updates(
    model: str, num_bytes: int, found: Sequence[tuple[Seconds, Seconds, Seconds]]
) -> None:
    """Print a row with CPU times and a row with wall times of updates."""
    for index, kind in enumerate(Seconds._fields):
        times = [tuple(each[index] for each in update) for update in found]
        medians = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
        stall = statistics.median(commit / reload for reload, _, commit in times)
        whole = statistics.median((stage + commit) / reload for reload, stage, commit in times)
        cells = [model, f"{num_bytes / 2**20:.0f}", kind, *(f"{each:.1f}" for each in medians)]
        print(table_row([*cells, f"{stall:.2f}", f"{whole:.2f}", str(len(found))]), flush=True)


def print_titles(titles: Sequence[str]) -> None:
    print(table_row(titles))
    print("|" + "---:|" * len(titles), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all measurements, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["4M", "0.5B"])
    parser.add_argument("--rows", nargs="+", type=at_least_one, default=[64, 256])
    parser.add_argument("--pairs", type=at_least_one, default=20)
    parser.add_argument("--seconds", type=float, default=25.0)
    arguments = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it reports each reload
    updates = []
    print_titles(_TITLES)
    for model in arguments.model:
        directory = model_directory(model, "float32", CACHE)
        pair = Pair(directory, max(arguments.rows), arguments.seconds, arguments.pairs)
        try:
            for num_rows in arguments.rows:
                with pair.rows(num_rows):
                    print_steps(model, num_rows, pair.measure_steps())
                    if num_rows == min(arguments.rows):
                        updates.append((model, pair.num_bytes, pair.measure_updates()))
        finally:
            pair.close()
    print()
    print_titles(_UPDATE_TITLES)
    for model, num_bytes, found in updates:
        print_updates(model, num_bytes, found)


if __name__ == "__main__":
    restart_with_one_thread()
    main()
