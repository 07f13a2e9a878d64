"""The process of rollout.LLM in `benchmarks.peers`.

Started by `benchmarks.peers_environments`, and answers requests on stdin.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.contestants import RolloutEngine
from benchmarks.peers_worker import KV_CACHE_GIB, MAX_NUM_SEQUENCES, MAX_SEQUENCE_LENGTH, serve
from benchmarks.workloads import Generated, Workload
from rollout import LLM, InferenceConfig


class Rollout:
    """Runs rollout.LLM on a Hugging Face directory."""

    def load(self, model: Path, precision: str, num_threads: int) -> None:
        config = InferenceConfig(
            num_threads=num_threads,
            dtype=precision,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            max_requests=MAX_NUM_SEQUENCES,
            buffer_size_gb=KV_CACHE_GIB,
        )
        self._engine = RolloutEngine(LLM(model, inference_config=config))

    def generate(self, workload: Workload, seed: int) -> Generated:
        return self._engine.run(workload, seed)


if __name__ == "__main__":
    serve(Rollout())
