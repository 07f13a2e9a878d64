"""A program that prints a digest of tokens and log-probs.

    python -m tests.backends.same_bits -march=x86-64-v3 1024
    python -m tests.backends.same_bits -march=x86-64-v4,-mavx512bf16 128 --fastest
    python -m tests.backends.same_bits wheel 128 --fastest

The kernels are compiled with the options of the first argument, or a wheel's. They are used with
deterministic=True, or with --fastest as they are by default.
"""

from __future__ import annotations

import hashlib
import logging
import sys

import numpy as np

from rollout import SamplingParams
from rollout.backends.cpu import library
from tests.family_cases import family_model
from tests.tiny_models import drain, prompt_of, tiny_engine, tiny_model

MODELS = {
    "dense": lambda: tiny_model("qwen3", seed=5, head_dim=64),
    "gelu": lambda: family_model("gemma2"),
}
NUM_REQUESTS = 8


def digest_of(num_tokens: int, *, deterministic: bool = True) -> str:
    """Return the digest of tokens and log-probs of each model in float32 and bfloat16.

    `num_tokens`: how many tokens of each model and dtype.
    """
    digest = hashlib.sha256()
    for make in MODELS.values():
        for dtype in ("float32", "bfloat16"):
            engine = tiny_engine(make(), deterministic=deterministic, dtype=dtype, seed=3)
            for seed in range(NUM_REQUESTS):
                params = SamplingParams(
                    num_tokens_to_generate=num_tokens // NUM_REQUESTS,
                    seed=seed,
                    temperature=0.8,
                    top_p=0.95 if seed % 2 else 1.0,
                    return_log_probs=True,
                    ignore_eos=True,
                )
                engine.add_request(prompt_of(5 + 9 * seed, seed=seed), params, request_id=seed)
            for _, request in sorted(drain(engine).items()):
                digest.update(np.array(request.generated_tokens, np.int32).tobytes())
                digest.update(np.array(request.generated_log_probs, np.float32).tobytes())
            engine.shutdown()
    return digest.hexdigest()


if __name__ == "__main__":
    options, count, *fastest = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)  # which library is loaded, on stderr
    if options != "wheel":
        library._HERE = tuple(options.split(","))
    print(digest_of(int(count), deterministic=not fastest))
