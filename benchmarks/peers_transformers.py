"""The process of transformers' `generate` in `benchmarks.peers`.

Started by `benchmarks.peers_environments`, and answers requests on stdin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.contestants import TransformersGenerate
from benchmarks.peers_worker import serve
from benchmarks.workloads import Generated, Workload


class Transformers:
    """Runs transformers' `generate` with a dynamic cache. All prompts are one batch."""

    def load(self, model: Path, precision: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, precision)
        )
        self._generate = TransformersGenerate(loaded.eval(), cache="dynamic")

    def generate(self, workload: Workload, seed: int) -> Generated:
        return self._generate.run(workload, seed)


if __name__ == "__main__":
    serve(Transformers())
