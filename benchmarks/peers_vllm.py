"""The process of vLLM in `benchmarks.peers`.

Started by `benchmarks.peers_environments`, which sets threads and KV memory by environment
variables. Answers requests on stdin.
"""

from __future__ import annotations

from pathlib import Path

import torch
import vllm

from benchmarks.peers_worker import MAX_NUM_SEQUENCES, MAX_SEQUENCE_LENGTH, serve
from benchmarks.workloads import Generated, Workload


class VLLM:
    """Runs vLLM's engine in this process."""

    def load(self, model: Path, precision: str, num_threads: int) -> None:
        self._llm = vllm.LLM(
            str(model),
            dtype=precision,
            max_model_len=MAX_SEQUENCE_LENGTH,
            max_num_seqs=MAX_NUM_SEQUENCES,
            skip_tokenizer_init=True,
            # Without it samples of one prompt share no KV. Every round has new prompts.
            enable_prefix_caching=True,
        )

    def generate(self, workload: Workload, seed: int) -> Generated:
        # With a seed per request, vLLM would sample row by row.
        torch.manual_seed(seed)
        params = [
            vllm.SamplingParams(
                n=workload.num_samples,
                max_tokens=length,
                temperature=workload.temperature,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if workload.wants_logprobs else None,
            )
            for length in workload.output_lens
        ]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts]
        results = self._llm.generate(prompts, params, use_tqdm=False)
        outputs = [output for result in results for output in result.outputs]
        tokens = [list(output.token_ids) for output in outputs]
        if not workload.wants_logprobs:
            return Generated(tokens=tokens, logprobs=None)
        rows = zip(tokens, (output.logprobs for output in outputs), strict=True)
        logprobs = [
            [step[token].logprob for token, step in zip(row, steps, strict=True)]
            for row, steps in rows
        ]
        return Generated(tokens=tokens, logprobs=logprobs)


if __name__ == "__main__":
    serve(VLLM())
