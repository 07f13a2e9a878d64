"""What Python takes of a decode step on a CPU: all CPU time outside the compiled kernels.

`python -m benchmarks.python_share` lets a 44M-parameter model decode 1 and 64 rows on one thread.
The share is 1 less the kernels' CPU time over that of the whole step; a step has few calls, so
timing them costs it little. Products that were chosen from torch or oneDNN count as Python; with
`ROLLOUT_TUNE=native` there are none.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.models import M45
from benchmarks.one_thread import restart_with_one_thread
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.backends.cpu import kernels as native
from rollout.models import CausalLM

BATCHES = (1, 64)
PROMPT_LEN = 128


class KernelClock:
    """CPU seconds inside the compiled functions of all `Kernels` made while it is installed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any) -> Any:
            start = time.process_time()
            result = function(*arguments)
            self.seconds += time.process_time() - start
            return result

        return timed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Kernels made in here are timed."""
        plain = native.Kernels.__init__

        def init(kernels: native.Kernels, library: Any) -> None:
            plain(kernels, library)
            for name in native._SIGNATURES:
                setattr(kernels, name, self.wrap(getattr(kernels, name)))

        native.Kernels.__init__ = init  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            native.Kernels.__init__ = plain  # type: ignore[method-assign]


def decoding_engine(batch: int, num_steps: int, dtype: str) -> DynamicInferenceEngine:
    """An engine in which `batch` requests decode."""
    config = InferenceConfig(
        device="cpu", num_threads=1, max_sequence_length=1024, buffer_size_gb=0.5, dtype=dtype
    )
    model = CausalLM.random(M45, dtype=getattr(torch, dtype))
    engine = DynamicInferenceEngine.from_model(model, config)
    for row in range(batch):
        params = SamplingParams(
            num_tokens_to_generate=num_steps + 8, ignore_eos=True, return_log_probs=True, seed=row
        )
        engine.add_request([row + 1] * PROMPT_LEN, params)
    while engine.stats().num_running < batch:
        engine.step()
    for _ in range(4):
        engine.step()
    return engine


def measure(batch: int, num_steps: int, dtype: str) -> tuple[float, float]:
    """(CPU milliseconds of a step, Python's share of it), medians."""
    clock = KernelClock()
    with clock.installed():
        engine = decoding_engine(batch, num_steps, dtype)
    seconds, shares = [], []
    for _ in range(num_steps):
        clock.seconds = 0.0
        start = time.process_time()
        engine.step()
        seconds.append(time.process_time() - start)
        shares.append(1 - clock.seconds / seconds[-1])
    return 1e3 * statistics.median(seconds), statistics.median(shares)


def main() -> None:
    """Print a line for each batch."""
    restart_with_one_thread()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=40, help="measured steps")
    options = parser.parse_args()
    logging.getLogger("rollout").setLevel(logging.WARNING)
    for batch in BATCHES:
        milliseconds, share = measure(batch, options.steps, options.dtype)
        print(f"{batch:>3} rows, {options.dtype}: {milliseconds:.1f} ms, Python {share:.1%}")


if __name__ == "__main__":
    main()
