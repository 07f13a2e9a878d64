"""Launch what the GPU benchmark launches, on a stand-in for the device that computes nothing.

`python -m tests.backends.benchmark_launches FILE` appends the launches to FILE. Models have the
benchmark's shapes and one layer, for all layers launch the same. Run it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_engines import DecodingRows, pool_config
from benchmarks.gpu_shapes import NEAR_NOTHING, QWEN3, PoolShape
from benchmarks.workloads import random_prompts
from rollout import DynamicInferenceEngine, SamplingParams
from rollout.models import CausalLM
from rollout.models.spec import ModelSpec
from scripts.kernel_launches import Recorder, recorded
from tests.backends.launching_device import launching_device

BATCHES = (256, 64, 1)
CONTEXT_LEN = 512
PROMPT_LEN = 400  # leaves room for what rows decode
NUM_NEW = 64
NUM_STEPS = 3
MEMORY_KIND = "vmm"
MODES = ("persist", "offload", "recompute")
BOTH = ("kv_cache", "weights")


def launch_benchmark(recorder: Recorder, spec: ModelSpec, batches: Sequence[int]) -> None:
    """Warm up, decode each batch, prefill, suspend, resume and update."""
    spec = replace(spec, num_layers=1)
    pool = PoolShape(num_rows=max(batches), context_len=CONTEXT_LEN)
    with launching_device(recorder, computes=False):
        config = pool_config(spec, pool, "cuda", memory_kind=MEMORY_KIND)
        engine = DynamicInferenceEngine.from_model(CausalLM(spec, "cpu"), config)
        engine.warm_up()
        for batch in batches:
            rows = DecodingRows(engine=engine, spec=spec, num_rows=batch, prompt_len=PROMPT_LEN)
            rows.start(NUM_NEW)
            for mode in MODES:
                for _ in range(NUM_STEPS):
                    engine.step()
                engine.pause()
                engine.suspend(mode, release=BOTH)
                engine.resume()
                engine.unpause()
            rows.end()
        prompts = random_prompts(spec.vocab_size, [CONTEXT_LEN - NUM_NEW] * max(batches))
        one = SamplingParams(num_tokens_to_generate=1, ignore_eos=True, seed=0)
        engine.add_groups([(prompt, [one]) for prompt in prompts])
        while engine.has_unfinished_requests():
            engine.step()
        source = CausalLM(spec, "cpu").read_weights()
        engine.commit_weights(engine.stage_weights(source), in_flight=True)
        engine.shutdown()


def main(path: Path) -> None:
    with recorded(path) as recorder:
        for spec in (NEAR_NOTHING, QWEN3["0.6B"], QWEN3["8B"]):
            launch_benchmark(recorder, spec, BATCHES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
