"""Compare three ways to cut rollouts of varied length into micro-batches.

    python benchmarks/packing.py            # two minutes
    python benchmarks/packing.py --small    # seconds: shows that it runs, not how well

A program, run by hand. `benchmarks.update` imports `random_batch`. The ways are a fixed number of
rollouts, a limit of padded tokens, and a limit of packed tokens. Each round computes the gradient
of one batch in all three ways, and measures tokens per CPU second. The program prints a Markdown
page, and writes it and a JSON file to benchmarks/results or to the folder of --output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, publish, results_parser
from trainer_hooks import PolicyLossConfig, RolloutBatch, UpdateSettings, accumulate_gradients

SIGMA, MEDIAN_TOKENS, PROMPT_TOKENS, LIMIT = 1.0, 48, 16, 512
FIXED_ROWS = 8
VOCABULARY = 4096


def long_tailed_batch(num_rollouts: int, limit: int) -> RolloutBatch:
    """Return random rollouts, unsorted, with lognormal completion lengths of at most `limit`."""
    rng = np.random.default_rng(0)
    new = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, num_rollouts)).astype(int)
    return random_batch(torch.from_numpy(new.clip(1, limit)), PROMPT_TOKENS, VOCABULARY, limit)


def random_batch(
    new_B: torch.Tensor, prompt_tokens: int, vocabulary: int, limit: int
) -> RolloutBatch:
    """Return rollouts of random token ids below `vocabulary`.

    Each prompt has `prompt_tokens` tokens. Rollout i has `new_B[i]` generated tokens, and counts as
    truncated if that number equals `limit`.
    """
    num_rollouts, lengths_B = len(new_B), new_B + prompt_tokens
    positions_T = torch.arange(int(lengths_B.max()))
    is_token_BT = positions_T < lengths_B[:, None]
    shape = is_token_BT.shape
    zeros_BT = torch.zeros(shape)
    generator = torch.Generator().manual_seed(0)
    return RolloutBatch(
        tokens_BT=torch.randint(vocabulary, shape, generator=generator) * is_token_BT,
        position_ids_BT=positions_T * is_token_BT,
        attention_mask_BT=is_token_BT,
        mask_BT=is_token_BT & (positions_T >= prompt_tokens),
        behaviour_logprobs_BT=zeros_BT - 8.0,
        policy_lag_BT=zeros_BT.int(),
        kv_lag_BT=zeros_BT,
        kv_staleness_BT=zeros_BT.int(),
        rewards_R=torch.zeros(num_rollouts),
        rollout_index_B=torch.arange(num_rollouts),
        prompt_lengths_B=torch.full((num_rollouts,), prompt_tokens),
        completion_lengths_B=new_B,
        lengths_B=lengths_B,
        is_truncated_B=new_B == limit,
        train_version=0,
    )


def measure(batch: RolloutBatch, max_tokens: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each way in each round. A first round warms up and is left out.

    `max_tokens` is the limit of tokens in a micro-batch.
    """
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    config = Qwen3Config(vocab_size=VOCABULARY, **shape, **heads)
    policy, loss = AutoModelForCausalLM.from_config(config), PolicyLossConfig(kind="dapo")
    advantages_BT = torch.randn(len(batch), 1).expand(batch.tokens_BT.shape)

    def accumulate(rows: torch.Tensor, settings: UpdateSettings) -> None:
        part = batch.select(rows)
        own = {"advantages_BT": advantages_BT[rows, : part.tokens_BT.shape[1]]}
        accumulate_gradients(policy, part, own, loss, settings)

    everything = torch.arange(len(batch))
    ways: dict[str, list[tuple[torch.Tensor, UpdateSettings]]] = {
        "fixed rows": [
            (rows, UpdateSettings(share_prefixes=False)) for rows in everything.split(FIXED_ROWS)
        ],
        "padded": [(everything, UpdateSettings(max_tokens=max_tokens, share_prefixes=False))],
        "packed": [
            (
                everything,
                UpdateSettings(max_tokens=max_tokens, share_prefixes=False, is_packed=True),
            )
        ],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds + 1):
        for name, works in ways.items():
            policy.zero_grad()
            start_s = time.process_time()
            for work in works:
                accumulate(*work)
            seconds[name].append(time.process_time() - start_s)
    return {name: values[1:] for name, values in seconds.items()}  # the first warms up


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row for each way."""
    machine = results["machine"]
    lines = [
        f"# Packing, {results['date']}",
        "",
        f"{machine['cpu']}, one thread, torch {machine['torch']}. Forward and backward of a Qwen3 "
        f"of 4 layers of 256 on {results['num_rollouts']} rollouts, lognormal with median "
        f"{MEDIAN_TOKENS} and sigma {SIGMA}, cut at {results['limit']}, prompts of "
        f"{PROMPT_TOKENS}; {results['num_tokens']:,} tokens. Fixed rows: {FIXED_ROWS} rollouts at "
        f"a time, as they come; the others: at most {results['max_tokens']} tokens at a time. CPU "
        f"time, medians of {results['num_rounds']} interleaved rounds.",
        "",
        "| micro-batches | tokens per CPU second | relative to fixed rows |",
        "|---|---:|---:|",
    ]
    for name, values in results["seconds"].items():
        ratios = [a / b for a, b in zip(results["seconds"]["fixed rows"], values, strict=True)]
        rate = results["num_tokens"] / median(values)
        lines.append(f"| {name} | {rate:,.0f} | **{median(ratios):.2f}** |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    parser = results_parser(__doc__, rounds=5, small="few short rollouts, one round")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of a micro-batch")
    arguments = parser.parse_args(argv)
    num_rollouts, limit = (8, 32) if arguments.small else (64, LIMIT)
    num_rounds = 1 if arguments.small else arguments.rounds
    batch = long_tailed_batch(num_rollouts, limit)
    results = {
        **dated(),
        "num_rollouts": num_rollouts,
        "limit": limit,
        "num_tokens": int(batch.lengths_B.sum()),
        "max_tokens": arguments.max_tokens,
        "num_rounds": num_rounds,
        "seconds": measure(batch, arguments.max_tokens, num_rounds),
    }
    publish(results, as_markdown(results), "packing", arguments.output, Console(stderr=True))
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
