"""The process of OpenVINO GenAI with continuous batching, in `benchmarks.peers`.

Started by `benchmarks.peers_environments`, and answers requests on stdin.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers_worker import KV_CACHE_GIB, MAX_NUM_SEQUENCES, serve
from benchmarks.workloads import Generated, Workload

# At least the longest prompt of a workload: a prompt in several chunks is slower.
_MAX_BATCHED_TOKENS = 2048
_FILE = "openvino_model.xml"


def convert(model: Path, target: Path, precision: str) -> None:
    """Export the Hugging Face directory `model` to OpenVINO's format, in the folder `target`.

    With precision "int8", matrices have one scale per row.
    """
    _require_instructions(precision)
    # nncf and optimum import torch, which the measured process must not load.
    import nncf
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    exported = target / "exported" if precision == "int8" else target
    task, config = "text-generation-with-past", OVConfig(dtype="fp32")
    main_export(str(model), str(exported), task=task, ov_config=config, device="cpu")
    if precision == "int8":
        exact = openvino.Core().read_model(exported / _FILE)
        compressed = nncf.compress_weights(exact, mode=nncf.CompressWeightsMode.INT8_SYM)
        openvino.save_model(compressed, target / _FILE, compress_to_fp16=False)
        for path in exported.glob("*.json"):
            shutil.copy(path, target)


def _require_instructions(precision: str) -> None:
    """Raise RuntimeError for bfloat16 if this CPU has no bfloat16 instructions."""
    # OpenVINO would compute in float32.
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision == "bfloat16" and "BF16" not in able:
        raise RuntimeError(f"no bfloat16 on this processor, only {', '.join(able)}")


class OpenVino:
    """Runs a model in OpenVINO's format, with float32, bfloat16 or int8 weights."""

    def load(self, model: Path, precision: str, num_threads: int) -> None:
        _require_instructions(precision)
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = KV_CACHE_GIB
        scheduling.max_num_batched_tokens = _MAX_BATCHED_TOKENS
        scheduling.max_num_seqs = MAX_NUM_SEQUENCES
        inference = "bf16" if precision == "bfloat16" else "f32"
        properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": inference,
            "KV_CACHE_PRECISION": inference,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduling, "CPU", properties
        )

    def generate(self, workload: Workload, seed: int) -> Generated:
        handles = []
        for index, prompt in enumerate(workload.prompts):
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            config = _generation_config(workload, workload.output_lens[index], seed)
            handles.append(self._pipeline.add_request(index, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        outputs = [output for handle in handles for output in handle.read_all()]
        logprobs = [list(output.generated_log_probs) for output in outputs]
        return Generated(
            tokens=[list(output.generated_ids) for output in outputs],
            logprobs=logprobs if workload.wants_logprobs else None,
        )


def _generation_config(
    workload: Workload, num_tokens: int, seed: int
) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.num_return_sequences = workload.num_samples
    config.logprobs = int(workload.wants_logprobs)
    if workload.temperature > 0:
        config.do_sample = True
        config.temperature = workload.temperature
        config.rng_seed = seed
    return config


if __name__ == "__main__":
    serve(OpenVino(), convert)
