"""Launch what the GPU benchmark launches, on a stand-in for the device that computes nothing.

`python -m tests.backends.benchmark_launches FILE` appends the launches to FILE. Models have the
benchmark's shapes and one layer, for all layers launch the same. Run it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu_engines import DecodingRows, pool_config
from benchmarks.gpu_measures import DecodeSizes, layer_batch
from benchmarks.gpu_shapes import BLOCK_TOKENS, PLAN, PoolShape
from benchmarks.workloads import random_prompts
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.backends.select import create_backend
from rollout.models import CausalLM
from rollout.models.spec import ModelSpec
from scripts.kernel_launches import Recorder, recorded
from tests.backends.launching_device import launching_device

NUM_STEPS = 3
MODES = ("persist", "offload", "recompute")
BOTH = ("kv_cache", "weights")


def launch_engine(
    recorder: Recorder, spec: ModelSpec, pool: PoolShape, batches: Sequence[int]
) -> None:
    """Warm up, decode each batch with suspends between steps, prefill, truncate, update."""
    spec = replace(spec, num_layers=1)
    with launching_device(recorder, computes=False):
        config = pool_config(spec, pool, "cuda", memory_kind=PLAN.memory_kind)
        engine = DynamicInferenceEngine.from_model(CausalLM(spec, "cpu"), config)
        engine.warm_up()
        for batch in batches:
            sizes = DecodeSizes(
                batch=batch,
                context_len=pool.context_len,
                num_warm_up=PLAN.num_warm_up,
                num_steps=NUM_STEPS * len(MODES),
            )
            prompt_len = sizes.prompt_len
            rows = DecodingRows(engine=engine, spec=spec, num_rows=batch, prompt_len=prompt_len)
            rows.start(sizes.num_new)
            for mode in MODES:
                for _ in range(NUM_STEPS):
                    engine.step()
                engine.pause()
                engine.suspend(mode, release=BOTH)
                engine.resume()
                engine.unpause()
            rows.end()
        prompt_len = min(PLAN.prompt_len, pool.context_len - 1)
        prompts = random_prompts(
            spec.vocab_size, [prompt_len] * min(max(batches), PLAN.num_prompts)
        )
        one = SamplingParams(num_tokens_to_generate=1, ignore_eos=True, seed=0)
        few = replace(one, top_k=20, top_p=0.9)
        for sampling in (one, few):
            engine.add_groups([(prompt, [sampling]) for prompt in prompts])
            while engine.has_unfinished_requests():
                engine.step()
        source = CausalLM(spec, "cpu").read_weights()
        engine.commit_weights(engine.stage_weights(source), in_flight=True)
        engine.shutdown()


def launch_layer(recorder: Recorder, spec: ModelSpec, num_rows: int) -> None:
    """Attention of one decode layer by itself."""
    with launching_device(recorder, computes=False):
        attention = create_backend(InferenceConfig(device="cuda", memory_kind="device")).attention
        batch = layer_batch(attention, spec, num_rows, PLAN.context_len, "cuda")
        q_RHD, k_RGD, v_RGD = (
            torch.zeros(num_rows, num_heads, spec.head_dim, dtype=spec.dtype)
            for num_heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        attention.attend(q_RHD, k_RGD, v_RGD, 0, attention.begin(batch))


def main(path: Path) -> None:
    generate = PoolShape(
        num_rows=PLAN.num_generate_rows,
        context_len=PLAN.generate_prompt_len + PLAN.generate_output_len,
    )
    host = PoolShape(num_rows=max(PLAN.host_batches), context_len=BLOCK_TOKENS)
    with recorded(path) as recorder:
        for spec in PLAN.shapes.values():
            launch_engine(recorder, spec, PLAN.pool, PLAN.batches)
        launch_engine(recorder, PLAN.host_spec, host, PLAN.host_batches)
        launch_engine(recorder, PLAN.shapes[PLAN.generate_shape], generate, (generate.num_rows,))
        for num_rows in PLAN.layer_batches:
            launch_layer(recorder, next(iter(PLAN.shapes.values())), num_rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
