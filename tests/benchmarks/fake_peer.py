"""A contestant's process without an engine: `python -m tests.benchmarks.fake_peer HABIT`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.peers_worker import serve
from benchmarks.workloads import Generated, Workload


class FakePeer:
    """Repeats the last token of a prompt, unless its habit is another."""

    def __init__(self, habit: str) -> None:
        self.habit = habit

    def load(self, model: Path, precision: str, num_threads: int) -> None:
        if self.habit == "refuses":
            raise RuntimeError(f"no {precision} on this processor")

    def generate(self, workload: Workload, seed: int) -> Generated:
        print("what an engine prints is no reply")
        if self.habit == "dies" or self.habit == f"dies at {workload.name}":
            print("a last word", file=sys.stderr)
            sys.exit(3)
        if self.habit == "hangs":
            time.sleep(1000)
        if self.habit == "dawdles":
            end = time.process_time() + 0.3
            while time.process_time() < end:
                pass
        extra = 1 if self.habit == "says more" else 0
        step = 1 if self.habit == "counts" else 0
        rows = [
            [prompt[-1] + step * index for index in range(length + extra)]
            for prompt, length in zip(workload.prompts, workload.output_lens, strict=True)
            for _ in range(workload.num_samples)
        ]
        scores = [[-1.0] * len(row) for row in rows] if workload.wants_logprobs else None
        return Generated(tokens=rows, logprobs=scores)


def convert(model: Path, target: Path, precision: str) -> None:
    (target / precision).write_text(model.name)


if __name__ == "__main__":
    if sys.argv[1] == "babbles":
        print("not JSON", flush=True)
    serve(FakePeer(sys.argv[1]), convert)
